"""Packs replicas of models onto groups of devices at the lowest price, by column generation.

The solver HiGHS solves the linear and integer programs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from twostroke.core.env import install_command
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.lab.planner.replicas import TIME_UNITS, DeviceGroup, PlannedReplica

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_MEMORY_CELLS: Final = 160  # a group's memory is divided into these; a replica's is rounded up
_MAX_ITERATIONS: Final = 200
_MIN_RELATIVE_GAIN: Final = 1e-6  # of a pattern's cost; patterns that gain less are not added
_MIP_RELATIVE_GAP: Final = 0.002
_SERVED_SHARE: Final = 1 - 1e-6  # a load counts as served from this share on
_TIME_WEIGHTS: Final = np.linspace(0, 1, 7)[:, None]
_PRICE_FACTORS: Final = np.linspace(0.2, 1, 9)[:, None, None]


Option: TypeAlias = "tuple[DeviceGroup, Sequence[PlannedReplica]]"  # a group and its replicas


class PlacementPattern(Frozen):
    """Replicas of models that share one group of devices.

    The linear program has a column for each pattern: how many groups of devices are used in this
    way.
    """

    group: DeviceGroup
    replicas: tuple[PlannedReplica, ...]


class Demand(Frozen):
    """The load that the devices of a fleet must serve, and the limits of devices and budget.

    Attributes:
        loads: requests per second of each model.
        penalties: cost of not serving one request per second of each model.
        stock: number of available devices by name of the stock; no entry for no limit.
        budget: maximum $ per hour.
        must_serve: whether a packing that leaves load unserved is no solution.
        usd_weight: multiplies the prices of groups. A small weight makes prices only break
            ties.
    """

    loads: tuple[float, ...]
    penalties: tuple[float, ...]
    stock: Mapping[str, int]
    budget: float | None = None
    must_serve: bool = True
    usd_weight: float = 1.0


class PackingResult(Frozen):
    """The patterns of replicas that a packing uses, and the limits that determine it.

    Attributes:
        used: patterns and how often each is used.
        missing: load of each model that is not served, in requests per second.
        value: objective value: weighted price plus penalties.
        bound: lower bound for the value of every packing.
        load_prices: increase of the value per additional request per second of each model.
        stock_prices: decrease of the value per additional device of a stock.
        budget_price: decrease of the value per additional $ per hour of budget.
    """

    used: tuple[tuple[PlacementPattern, int], ...]
    missing: tuple[float, ...]
    value: float
    bound: float
    load_prices: tuple[float, ...]
    stock_prices: Mapping[str, float]
    budget_price: float

    @property
    def usd_per_hour(self) -> float:
        """The price of all used device groups, in $ per hour."""
        return sum(pattern.group.usd_per_hour * times for pattern, times in self.used)

    def carries(self, demand: Demand) -> bool:
        """Whether the packed replicas serve all load of the demand."""
        pairs = zip(self.missing, demand.loads, strict=True)
        return all(missing <= (1 - _SERVED_SHARE) * load for missing, load in pairs)


class Packer:
    """Packs replicas of models onto device groups at the lowest price.

    It keeps the patterns that earlier packings found.
    """

    def __init__(self, options: Sequence[Option]) -> None:
        """Pack the possible replicas of `options`, a list of device groups with their replicas.

        Raises:
            UsageError: the solver is not installed.
        """
        try:
            import highspy
        except ImportError:
            raise UsageError(
                "Planning a fleet needs the packages highspy and pyyaml: run "
                f"{install_command('plan')}."
            ) from None
        self._highs: Any = highspy
        self._items = [_GroupItems(group, replicas) for group, replicas in options if replicas]
        self._patterns: list[PlacementPattern] = []

    def pack(self, demand: Demand, without: str = "", time_limit_s: float = 8.0) -> PackingResult:
        """Return the packing of lowest value (price plus penalties).

        Devices of the kind `without` (a device's name) are not used. After `time_limit_s` seconds,
        the solver returns the best packing so far.
        """
        group_items = [items for items in self._items if items.group.device.name != without]
        program = _LinearProgram(self._highs, demand)
        for pattern in self._patterns:
            if pattern.group.device.name != without:
                program.add(pattern)
        self._find_patterns(group_items, program)
        prices = program.prices()
        if program.require_whole_replicas():
            self._find_patterns(group_items, program)
        return program.packed(time_limit_s, prices)

    def _find_patterns(self, group_items: Sequence[_GroupItems], program: _LinearProgram) -> None:
        """Solve the linear program of a packing, and add patterns of replicas that improve it."""
        for _ in range(_MAX_ITERATIONS):
            program.solve()
            patterns = [pattern for items in group_items if (pattern := items.best(program))]
            if not patterns:
                break
            self._patterns += patterns
            for pattern in patterns:
                program.add(pattern)


class _GroupItems:
    """The possible replicas of one device group as arrays, for a knapsack of time and memory.

    A replica is left out if another replica of its model has a higher rate, and needs less time and
    memory.
    """

    def __init__(self, group: DeviceGroup, replicas: Sequence[PlannedReplica]) -> None:
        self.group = group
        self._replicas = list(replicas)
        self._build_arrays()
        undominated = [self._undominated(indices, self._rates) for indices in self._by_model]
        self._replicas = [self._replicas[index] for group in undominated for index in sorted(group)]
        self._build_arrays()

    def _build_arrays(self) -> None:
        replicas = self._replicas
        self._models = np.array([replica.model for replica in replicas])
        is_new_model = np.diff(self._models, prepend=-1)
        self._model_starts = np.flatnonzero(is_new_model)
        self._model_order = np.cumsum(is_new_model > 0) - 1
        self._by_model = [np.flatnonzero(self._models == m) for m in np.unique(self._models)]
        self._rates = np.array([replica.requests_per_s for replica in replicas])
        self._units = np.array([replica.time_units for replica in replicas])
        num_bytes = np.array([replica.memory_bytes for replica in replicas])
        cells = num_bytes / self.group.memory_bytes * _MEMORY_CELLS
        self._cells = np.ceil(cells - 1e-9).astype(int)
        time_share = self._units / TIME_UNITS
        memory_share = self._cells / _MEMORY_CELLS
        # Weighted means of both shares: (weights, replicas).
        self._sizes = _TIME_WEIGHTS * time_share + (1 - _TIME_WEIGHTS) * memory_share

    def best(self, program: _LinearProgram) -> PlacementPattern | None:
        """Return the pattern of replicas on this group that lowers the program's cost most.

        Returns None if no pattern lowers it.
        """
        cost = program.cost(self.group)
        values = program.values(self._models, self._rates)
        min_value = cost + _MIN_RELATIVE_GAIN * (1 + abs(cost))
        useful = self._useful(values, cost, min_value)
        if not useful.any():
            return None
        items = [indices[useful[indices]] for indices in self._by_model]
        candidates = [self._undominated(indices, values) for indices in items if len(indices)]
        value, selected = self._knapsack(candidates, values)
        if value <= min_value:
            return None
        return PlacementPattern(self.group, tuple(self._replicas[index] for index in selected))

    def _useful(self, values: NDArray[Any], cost: float, min_value: float) -> NDArray[Any]:
        """Return which replicas can be part of a pattern worth more than `min_value`: (replicas,).

        A replica's size is a weighted mean of its shares of time and memory, so the sizes of a
        pattern's replicas add up to at most 1. If size had a price, a replica's gain would be its
        value minus the price of its size. For every price, a pattern's value is at most the price
        plus the largest gain (or 0) of each model. A replica is useful if this bound, with the
        replica itself in place of its model's best one, exceeds `min_value`.
        """
        prices = cost * _PRICE_FACTORS
        gains = (values - prices * self._sizes).reshape(-1, len(values))
        model_gains = np.maximum.reduceat(gains, self._model_starts, axis=1)
        model_gains = np.maximum(model_gains, 0)
        size_prices = prices.ravel().repeat(len(_TIME_WEIGHTS))[:, None]
        bounds = size_prices + model_gains.sum(axis=1, keepdims=True)
        bounds_with_replica = bounds - model_gains[:, self._model_order] + gains
        return np.asarray((bounds_with_replica > min_value).all(axis=0) & (values > 0))

    def _undominated(self, items: NDArray[Any], values: NDArray[Any]) -> list[int]:
        """Return the replicas of a model that no other replica beats in value, time and memory."""
        order = np.lexsort((self._cells[items], self._units[items], -values[items]))
        min_cells = np.full(TIME_UNITS + 1, _MEMORY_CELLS + 1)  # by time units, or fewer
        undominated: list[int] = []
        for index in items[order].tolist():
            units, cells = int(self._units[index]), int(self._cells[index])
            if cells < min_cells[units]:
                undominated.append(index)
                np.minimum(min_cells[units:], cells, out=min_cells[units:])
        return undominated

    def _knapsack(self, models: list[list[int]], values: NDArray[Any]) -> tuple[float, list[int]]:
        """Return the highest value of replicas that fit on the group together, and these replicas.

        There is at most one replica of each model.
        """
        tables = [np.zeros((TIME_UNITS + 1, _MEMORY_CELLS + 1))]
        for items in models:
            before, after = tables[-1], tables[-1].copy()
            for index in items:
                units, cells = self._units[index], self._cells[index]
                reachable = after[units:, cells:]
                rest = before[: TIME_UNITS + 1 - units, : _MEMORY_CELLS + 1 - cells]
                np.maximum(reachable, rest + values[index], out=reachable)
            tables.append(after)
        selected, units, cells = list[int](), TIME_UNITS, _MEMORY_CELLS
        for items, before, after in reversed(list(zip(models, tables, tables[1:], strict=False))):
            if after[units, cells] == before[units, cells]:
                continue
            sums = [self._value_with(before, index, units, cells, values) for index in items]
            index = items[int(np.argmax(sums))]
            selected.append(index)
            units -= int(self._units[index])
            cells -= int(self._cells[index])
        return float(tables[-1][TIME_UNITS, _MEMORY_CELLS]), selected

    def _value_with(
        self, table: NDArray[Any], index: int, units: int, cells: int, values: NDArray[Any]
    ) -> float:
        """Return the value of replica `index` together with the best pattern that fits beside it.

        The group has `units` of time and `cells` of memory. `table` has the highest value of
        replicas for each remaining time and memory, and `values` the value of each replica. The
        result is minus infinity if the replica does not fit.
        """
        units, cells = units - self._units[index], cells - self._cells[index]
        return float(table[units, cells] + values[index]) if min(units, cells) >= 0 else -np.inf


class _Prices(NamedTuple):
    """The dual prices of a packing's linear program.

    They say by how much its cost changes per request per second, per device of a stock, and per $.
    """

    loads: tuple[float, ...]
    stock: dict[str, float]
    budget: float


class _LinearProgram:
    """The linear program that finds the cheapest mix of the known placement patterns.

    Columns are the missing share of each model's load, then patterns. Rows are served loads,
    numbers of replicas (free until `require_whole_replicas`), stocks, and the budget.
    """

    def __init__(self, highs: Any, demand: Demand) -> None:
        self._highs, self._demand = highs, demand
        self._solver = highs.Highs()
        self._solver.setOptionValue("output_flag", False)  # noqa: FBT003 - takes no names
        self._columns: list[PlacementPattern] = []
        num_models = len(demand.loads)
        self._stock_rows = {name: 2 * num_models + i for i, name in enumerate(demand.stock)}
        self._budget_row = 2 * num_models + len(self._stock_rows)
        infinite = highs.kHighsInf
        self._loads = np.array(demand.loads)
        for _ in demand.loads:  # in shares of the load: at least 1
            self._solver.addRow(1.0, infinite, 0, [], [])
        for _ in demand.loads:
            self._solver.addRow(-infinite, infinite, 0, [], [])
        for num_devices in demand.stock.values():
            self._solver.addRow(-infinite, num_devices, 0, [], [])
        budget = infinite if demand.budget is None else demand.budget
        self._solver.addRow(-infinite, budget, 0, [], [])
        for row, (load, penalty) in enumerate(zip(demand.loads, demand.penalties, strict=True)):
            self._add_column(penalty * load, upper=1, entries={row: 1.0, num_models + row: 2.0})

    def _add_column(self, cost: float, *, upper: float, entries: dict[int, float]) -> None:
        """Add a column to the linear program; its value is from 0 to `upper`.

        `entries` are the column's coefficients by row.
        """
        rows, values = list(entries), list(entries.values())
        self._solver.addCol(cost, 0, upper, len(entries), rows, values)

    def add(self, pattern: PlacementPattern) -> None:
        """Add the column of a placement pattern to the linear program."""
        group = pattern.group
        entries = dict[int, float]()
        for replica in pattern.replicas:  # at most one of each model
            share = replica.requests_per_s / self._loads[replica.model]
            entries[replica.model] = share
            entries[len(self._loads) + replica.model] = float(_replica_count(share))
        if (row := self._stock_rows.get(group.stock)) is not None:
            entries[row] = group.count
        entries[self._budget_row] = group.usd_per_hour
        cost = self._demand.usd_weight * group.usd_per_hour
        self._add_column(cost, upper=self._highs.kHighsInf, entries=entries)
        self._columns.append(pattern)

    def solve(self) -> None:
        """Solve the linear program of the packing, and store its dual prices."""
        self._solver.run()
        self._duals = np.array(self._solver.getSolution().row_dual)

    def require_whole_replicas(self) -> bool:
        """Require whole replicas of each model in the linear program, if all load must be served.

        If load may remain unserved, or cannot be served at all, this does nothing. Returns whether
        constraints were added, so that the linear program must be solved again.
        """
        self._is_possible = max(self._missing_shares()) <= 1 - _SERVED_SHARE
        if not (self._demand.must_serve and self._is_possible):
            return False
        self._set_min_replicas(2.0)
        return True

    def _set_min_replicas(self, count: float) -> None:
        for row in range(len(self._loads), 2 * len(self._loads)):
            self._solver.changeRowBounds(row, count, self._highs.kHighsInf)

    def _missing_shares(self) -> list[float]:
        return list(self._solver.getSolution().col_value[: len(self._loads)])

    def prices(self) -> _Prices:
        """Return the dual prices of the linear program's limits on load, stock and budget.

        Call this before `require_whole_replicas`, whose constraints would take over a part of the
        prices.
        """
        return _Prices(
            tuple(map(float, self._duals[: len(self._loads)].clip(0) / self._loads)),
            {name: float(-self._duals[row]) for name, row in self._stock_rows.items()},
            float(-self._duals[self._budget_row]),
        )

    def values(self, models: NDArray[Any], rates: NDArray[Any]) -> NDArray[Any]:
        """Return how much replicas are worth at the dual prices of load: (n,).

        `models` has the model of each replica, and `rates` its requests per second.
        """
        shares = rates / self._loads[models]
        load_duals, replica_duals = self._duals[: 2 * len(self._loads)].clip(0).reshape(2, -1)
        load_values = load_duals[models] * shares
        return np.asarray(load_values + replica_duals[models] * _replica_count(shares))

    def cost(self, group: DeviceGroup) -> float:
        """Return the cost of a device group at the dual prices of stock and budget."""
        cost = (self._demand.usd_weight - self._duals[self._budget_row]) * group.usd_per_hour
        row = self._stock_rows.get(group.stock)
        return float(cost if row is None else cost - self._duals[row] * group.count)

    def packed(self, time_limit_s: float, prices: _Prices) -> PackingResult:
        """Return the best packing with the known patterns; `prices` become part of the result."""
        demand, solver = self._demand, self._solver
        bound, num_models = float(solver.getInfo().objective_function_value), len(demand.loads)
        columns = range(num_models, num_models + len(self._columns))
        for column in columns:
            solver.changeColIntegrality(column, self._highs.HighsVarType.kInteger)
        solver.setOptionValue("time_limit", time_limit_s)
        solver.setOptionValue("mip_rel_gap", _MIP_RELATIVE_GAP)
        values = self._solve_integer(0.0) if demand.must_serve and self._is_possible else None
        if values is None:
            self._set_min_replicas(-self._highs.kHighsInf)
            empty_packing = [*(1.0 for _ in demand.loads), *(0.0 for _ in columns)]
            values = self._solve_integer(1.0) or empty_packing
        counts = [round(value) for value in values[num_models:]]
        pairs = zip(self._columns, counts, strict=True)
        used = tuple((pattern, count) for pattern, count in pairs if count)
        shares = zip(values[:num_models], demand.loads, strict=True)
        missing = tuple(max(0.0, share) * load for share, load in shares)
        usd = sum(pattern.group.usd_per_hour * count for pattern, count in used)
        penalty = sum(p * load for p, load in zip(demand.penalties, missing, strict=True))
        return PackingResult(
            used=used,
            missing=missing,
            value=demand.usd_weight * usd + penalty,
            bound=bound,
            load_prices=prices.loads,
            stock_prices=prices.stock,
            budget_price=prices.budget,
        )

    def _solve_integer(self, max_missing_share: float) -> list[float] | None:
        """Solve for whole numbers of patterns; return the values of all columns, or None.

        None means that there is no solution. At most `max_missing_share` of each model's load may
        be missing.
        """
        for column in range(len(self._loads)):
            self._solver.changeColBounds(column, 0, max_missing_share)
        self._solver.run()
        solution = self._solver.getSolution()
        return list(solution.col_value) if solution.value_valid else None


def _replica_count(share: Any) -> Any:
    """Return how much a replica counts in the constraint that each model has two replicas.

    This constraint is a row of the linear program. A replica counts 1; it counts 2 if its `share`
    is all of the model's load, since one such replica is enough.
    """
    return 1 + (share >= _SERVED_SHARE)
