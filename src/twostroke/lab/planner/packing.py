"""Packs replicas into places: column generation, whose programs the solver HiGHS solves.

A pattern is a set of replicas, at most one of a model, that fit into a place together. The linear
program chooses how often each known pattern is used; its duals price each model's load, and a
dynamic program finds the pattern that is worth most at these prices (Gilmore and Gomory, 1961).
When no better pattern exists the linear program's value is a bound that no packing passes. The
integer program over all patterns found gives the packing.

Where all load must be carried, a model needs one replica that carries all of its load, or two. The
linear program would take 1.2 of one that carries five sixths, so it has this as rows of its own:
they bring the bound near to what whole replicas cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from twostroke.core.env import install_command
from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.lab.planner.replicas import UNITS, DeviceGroup, PlannedReplica

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_CELLS: Final = 160  # into which the memory of a place is divided; a replica's is rounded up
_MOST_ROUNDS: Final = 200
_LEAST_GAIN: Final = 1e-6  # of a pattern's cost, for which it is added
_GAP: Final = 0.002
_LOADED: Final = 1 - 1e-6  # of a load that counts as carried
_BLENDS: Final = np.linspace(0, 1, 7)[:, None]
_PRICES: Final = np.linspace(0.2, 1, 9)[:, None, None]


Option: TypeAlias = "tuple[DeviceGroup, Sequence[PlannedReplica]]"  # what a place may hold


class PlacementPattern(Frozen):
    """Replicas in one place."""

    place: DeviceGroup
    replicas: tuple[PlannedReplica, ...]


class Demand(Frozen):
    """What is packed: each model's load, and what a request that is not served costs.

    `stock` limits the devices of a kind. With `must_serve` a packing that leaves load is none.
    `usd_weight` multiplies the price of places; it is small if they only decide between equals.
    """

    loads: tuple[float, ...]
    penalties: tuple[float, ...]
    stock: Mapping[str, int]
    budget: float | None = None
    must_serve: bool = True
    usd_weight: float = 1.0


class PackingResult(Frozen):
    """How often each pattern is used.

    `missing` is the load of each model that is not carried. `bound` is the least value that any
    packing has, `value` what this one has. `load_prices` says by how much a model's next request
    per second would raise the value, `stock_prices` by how much one device more would lower it.
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
        """The price of all places."""
        return sum(pattern.place.usd_per_hour * times for pattern, times in self.used)

    def carries(self, demand: Demand) -> bool:
        """Whether all load is carried."""
        pairs = zip(self.missing, demand.loads, strict=True)
        return all(missing <= (1 - _LOADED) * load for missing, load in pairs)


class Packer:
    """Packs replicas into places; patterns found once serve the next packing, too."""

    def __init__(self, options: Sequence[Option]) -> None:
        """Take each place's possible replicas.

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
        self._items = [_Items(place, found) for place, found in options if found]
        self._patterns: list[PlacementPattern] = []

    def pack(self, demand: Demand, without: str = "", time_limit_s: float = 8.0) -> PackingResult:
        """Return the packing of least value, without devices of the kind `without`."""
        items = [one for one in self._items if one.place.device.name != without]
        program = _Program(self._highs, demand)
        for pattern in self._patterns:
            if pattern.place.device.name != without:
                program.add(pattern)
        self._find_patterns(items, program)
        prices = program.prices()
        if program.count_replicas():
            self._find_patterns(items, program)
        return program.packed(time_limit_s, prices)

    def _find_patterns(self, items: Sequence[_Items], program: _Program) -> None:
        """Add patterns to a program until none lowers its value, and solve it."""
        for _ in range(_MOST_ROUNDS):
            program.solve()
            better = [found for one in items if (found := one.best(program))]
            if not better:
                break
            self._patterns += better
            for pattern in better:
                program.add(pattern)


class _Items:
    """The replicas of a place that may be worth it as arrays: units of time, cells of memory."""

    def __init__(self, place: DeviceGroup, replicas: Sequence[PlannedReplica]) -> None:
        self.place, self._replicas = place, list(replicas)
        self._arrange()
        kept = [self._undominated(group, self._rates) for group in self._groups]
        self._replicas = [self._replicas[index] for group in kept for index in sorted(group)]
        self._arrange()

    def _arrange(self) -> None:
        replicas = self._replicas
        self._models = np.array([one.model for one in replicas])
        self._starts = np.flatnonzero(np.diff(self._models, prepend=-1))
        self._group_of = np.cumsum(np.diff(self._models, prepend=-1) > 0) - 1
        self._groups = [np.flatnonzero(self._models == one) for one in np.unique(self._models)]
        self._rates = np.array([one.requests_per_s for one in replicas])
        self._units = np.array([one.share for one in replicas])
        cells = np.array([one.memory_bytes for one in replicas]) / self.place.memory_bytes * _CELLS
        self._cells = np.ceil(cells - 1e-9).astype(int)
        self._sizes = _BLENDS * (self._units / UNITS) + (1 - _BLENDS) * (self._cells / _CELLS)

    def best(self, program: _Program) -> PlacementPattern | None:
        """Return the pattern that lowers the program's value most, if any does."""
        cost = program.cost(self.place)
        worth = program.worth(self._models, self._rates)
        gained = cost + _LEAST_GAIN * (1 + abs(cost))
        useful = self._useful(worth, cost, gained)
        if not useful.any():
            return None
        items = [group[useful[group]] for group in self._groups]
        groups = [self._undominated(one, worth) for one in items if len(one)]
        value, chosen = self._knapsack(groups, worth)
        if value <= gained:
            return None
        return PlacementPattern(self.place, tuple(self._replicas[index] for index in chosen))

    def _useful(self, worth: NDArray[Any], cost: float, gained: float) -> NDArray[Any]:
        """Return which replicas may be in a pattern that is worth more than `gained`.

        A blend of time and memory is space, and has a price. Parts of replicas that are worth more
        than their space bound any pattern's worth, and that of patterns with a certain replica.
        """
        prices = cost * _PRICES
        gains = (worth - prices * self._sizes).reshape(-1, len(worth))
        of_models = np.maximum(np.maximum.reduceat(gains, self._starts, axis=1), 0)
        of_space = prices.ravel().repeat(len(_BLENDS))[:, None]
        bounds = of_space + of_models.sum(axis=1, keepdims=True)
        with_each = bounds - of_models[:, self._group_of] + gains
        return np.asarray((with_each > gained).all(axis=0) & (worth > 0))

    def _undominated(self, items: NDArray[Any], worth: NDArray[Any]) -> list[int]:
        """Return the replicas of a model that no other beats in worth, time and memory."""
        order = np.lexsort((self._cells[items], self._units[items], -worth[items]))
        least, kept = np.full(UNITS + 1, _CELLS + 1), []  # cells of those kept, by units at most
        for index in items[order].tolist():
            units, cells = int(self._units[index]), int(self._cells[index])
            if cells < least[units]:
                kept.append(index)
                np.minimum(least[units:], cells, out=least[units:])
        return kept

    def _knapsack(self, groups: list[list[int]], worth: NDArray[Any]) -> tuple[float, list[int]]:
        """Return the most worth in a place, and the replicas of it: at most one of a group."""
        tables = [np.zeros((UNITS + 1, _CELLS + 1))]
        for items in groups:
            before, after = tables[-1], tables[-1].copy()
            for index in items:
                units, cells = self._units[index], self._cells[index]
                part = after[units:, cells:]
                gained = before[: UNITS + 1 - units, : _CELLS + 1 - cells] + worth[index]
                np.maximum(part, gained, out=part)
            tables.append(after)
        chosen, units, cells = list[int](), UNITS, _CELLS
        for items, before, after in reversed(list(zip(groups, tables, tables[1:], strict=False))):
            if after[units, cells] == before[units, cells]:
                continue
            index = max(items, key=lambda one: self._with(before, one, units, cells, worth))
            chosen.append(index)
            units, cells = units - int(self._units[index]), cells - int(self._cells[index])
        return float(tables[-1][UNITS, _CELLS]), chosen

    def _with(
        self, table: NDArray[Any], index: int, units: int, cells: int, worth: NDArray[Any]
    ) -> float:
        """Return the worth of a replica with the best that fits beside it."""
        units, cells = units - self._units[index], cells - self._cells[index]
        return float(table[units, cells] + worth[index]) if min(units, cells) >= 0 else -np.inf


class _Prices(NamedTuple):
    """Duals: by how much a request per second, a device of the stock or a $ changes the value."""

    loads: tuple[float, ...]
    stock: dict[str, float]
    budget: float


class _Program:
    """The program over known patterns: columns are missing loads, then patterns.

    Rows are loads, replicas of models (free until `count_replicas`), stocks and the budget.
    """

    def __init__(self, highs: Any, demand: Demand) -> None:
        self._highs, self._demand = highs, demand
        self._solver = highs.Highs()
        self._solver.setOptionValue("output_flag", False)  # noqa: FBT003 - takes no names
        self._columns: list[PlacementPattern] = []
        num_models = len(demand.loads)
        self._stocks = {name: 2 * num_models + i for i, name in enumerate(demand.stock)}
        self._budget_row = 2 * num_models + len(self._stocks)
        infinite = highs.kHighsInf
        self._loads = np.array(demand.loads)
        for _ in demand.loads:  # a row counts whole loads
            self._solver.addRow(1.0, infinite, 0, [], [])
        for _ in demand.loads:
            self._solver.addRow(-infinite, infinite, 0, [], [])
        for most in demand.stock.values():
            self._solver.addRow(-infinite, most, 0, [], [])
        budget = infinite if demand.budget is None else demand.budget
        self._solver.addRow(-infinite, budget, 0, [], [])
        for row, (load, penalty) in enumerate(zip(demand.loads, demand.penalties, strict=True)):
            rows = [row, num_models + row]
            self._solver.addCol(penalty * load, 0, 1, 2, rows, [1.0, 2.0])

    def add(self, pattern: PlacementPattern) -> None:
        """Add a column."""
        place, entries = pattern.place, dict[int, float]()
        for one in pattern.replicas:  # at most one of a model
            share = one.requests_per_s / self._loads[one.model]
            entries[one.model] = share
            entries[len(self._loads) + one.model] = float(_counted(share))
        if (row := self._stocks.get(place.stock)) is not None:
            entries[row] = place.count
        entries[self._budget_row] = place.usd_per_hour
        cost = self._demand.usd_weight * place.usd_per_hour
        rows, values = list(entries), list(entries.values())
        self._solver.addCol(cost, 0, self._highs.kHighsInf, len(rows), rows, values)
        self._columns.append(pattern)

    def solve(self) -> None:
        """Solve the linear program."""
        self._solver.run()
        self._duals = np.array(self._solver.getSolution().row_dual)

    def count_replicas(self) -> bool:
        """Demand one whole replica or two of each model, if all load can and must be carried."""
        self._is_possible = max(self._missing()) <= 1 - _LOADED
        if not (self._demand.must_serve and self._is_possible):
            return False
        self._bound_replicas(2.0)
        return True

    def _bound_replicas(self, least: float) -> None:
        for row in range(len(self._loads), 2 * len(self._loads)):
            self._solver.changeRowBounds(row, least, self._highs.kHighsInf)

    def _missing(self) -> list[float]:
        return list(self._solver.getSolution().col_value[: len(self._loads)])

    def prices(self) -> _Prices:
        """Return what the limits cost; before replicas are counted, which have prices, too."""
        return _Prices(
            tuple(map(float, self._duals[: len(self._loads)].clip(0) / self._loads)),
            {name: float(-self._duals[row]) for name, row in self._stocks.items()},
            float(-self._duals[self._budget_row]),
        )

    def worth(self, models: NDArray[Any], rates: NDArray[Any]) -> NDArray[Any]:
        """Return what replicas of models are worth that carry so many requests per second."""
        shares = rates / self._loads[models]
        of_load, of_replica = self._duals[: 2 * len(self._loads)].clip(0).reshape(2, -1)
        return np.asarray(of_load[models] * shares + of_replica[models] * _counted(shares))

    def cost(self, place: DeviceGroup) -> float:
        """Return what a place costs at the prices of stock and budget."""
        cost = (self._demand.usd_weight - self._duals[self._budget_row]) * place.usd_per_hour
        row = self._stocks.get(place.stock)
        return float(cost if row is None else cost - self._duals[row] * place.count)

    def packed(self, time_limit_s: float, prices: _Prices) -> PackingResult:
        """Return the best packing with the known patterns; `prices` are shown with it."""
        demand, solver = self._demand, self._solver
        bound, num_models = float(solver.getInfo().objective_function_value), len(demand.loads)
        columns = range(num_models, num_models + len(self._columns))
        for column in columns:
            solver.changeColIntegrality(column, self._highs.HighsVarType.kInteger)
        solver.setOptionValue("time_limit", time_limit_s)
        solver.setOptionValue("mip_rel_gap", _GAP)
        values = self._integers(0.0) if demand.must_serve and self._is_possible else None
        if values is None:
            self._bound_replicas(-self._highs.kHighsInf)
            values = self._integers(1.0) or [*(1.0 for _ in demand.loads), *(0.0 for _ in columns)]
        times = [round(value) for value in values[num_models:]]
        pairs_used = zip(self._columns, times, strict=True)
        used = tuple((pattern, count) for pattern, count in pairs_used if count)
        shares = zip(values[:num_models], demand.loads, strict=True)
        lacking = tuple(max(0.0, share) * load for share, load in shares)
        usd = sum(pattern.place.usd_per_hour * count for pattern, count in used)
        lost = sum(p * lack for p, lack in zip(demand.penalties, lacking, strict=True))
        return PackingResult(
            used,
            lacking,
            demand.usd_weight * usd + lost,
            bound,
            *prices,
        )

    def _integers(self, share_missing: float) -> list[float] | None:
        """Return the values of the integer program's columns; None if there is no solution."""
        for column in range(len(self._loads)):
            self._solver.changeColBounds(column, 0, share_missing)
        self._solver.run()
        solution = self._solver.getSolution()
        return list(solution.col_value) if solution.value_valid else None


def _counted(share: Any) -> Any:
    """Return as how many of two replicas one counts that carries so much of a model's load."""
    return 1 + (share >= _LOADED)
