"""How much an operation has to do: arithmetic and traffic, and what of a step they grow with."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.core.frozen import Frozen
from twostroke.model.program.batch import BatchShape


class Cost(Frozen):
    """Work of a step or of one operation: floating-point operations, and bytes that must move.

    `weight_bytes` and `cache_bytes` (keys and values, read and written) are the traffic that no
    kernel can avoid; values between operations are left out, since they stay in the caches.
    A rank exchanges values with others: in each of `exchanges` it waits once, and all of them
    together bring it `received_bytes`.
    """

    flops: int
    weight_bytes: int = 0
    cache_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    exchanges: int = 0

    @property
    def bytes(self) -> int:
        """All bytes that memory must move."""
        return self.weight_bytes + self.cache_bytes

    def __add__(self, other: Cost) -> Cost:
        """Return both together."""
        return Cost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.exchanges + other.exchanges,
        )


# A property of a batch with which work grows in proportion.
Count = Callable[[BatchShape], float]


def once(batch: BatchShape) -> int:
    """Count the step itself."""
    del batch
    return 1


def each_row(batch: BatchShape) -> int:
    """Count the tokens that are computed."""
    return batch.num_rows


def each_row_of_all(batch: BatchShape) -> int:
    """Count the tokens that all row parts compute."""
    return batch.whole.num_rows


def each_sampled_row(batch: BatchShape) -> int:
    """Count the rows with logits."""
    return batch.num_sampled


def once_if_sampled(batch: BatchShape) -> int:
    """Count the step if any of its rows has logits."""
    return min(1, batch.num_sampled)


class EachAttended(Frozen):
    """Counts the pairs of a row and a position that it attends to."""

    window: int | None

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of pairs."""
        return batch.num_attended(self.window)


class EachCached(Frozen):
    """Counts the positions whose keys and values are read, and the rows whose own are written."""

    window: int | None

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of positions."""
        return batch.num_context(self.window) + batch.whole.num_rows


class EachRead(Frozen):
    """Counts the positions whose keys and values are read."""

    window: int | None

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of positions."""
        return batch.num_context(self.window)


class EachShare(Frozen):
    """Counts the pairs of a row and a piece that it attends to, for requests with few rows."""

    window: int | None
    most_rows: int

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of pairs, in requests with at most `most_rows`."""
        return batch.with_rows(0, self.most_rows).num_shares(self.window)


class EachPiece(Frozen):
    """Counts the pieces that the rows of each request attend to, for requests with many rows."""

    window: int | None
    fewest_rows: int

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of pieces, in requests with at least `fewest_rows`."""
        return batch.with_rows(self.fewest_rows).num_pieces(self.window)


class OfWholeStep(Frozen):
    """Counts what all row parts have together."""

    count: Count

    def __call__(self, batch: BatchShape) -> float:
        """Return the count of the whole step."""
        return self.count(batch.whole)


class ShareOfExperts(Frozen):
    """The expected share of experts that is read if each row chooses independently."""

    num_used: int
    num_experts: int

    def __call__(self, batch: BatchShape) -> float:
        """Return the share, from 0 to 1."""
        return 1 - (1 - self.num_used / self.num_experts) ** batch.num_rows


class OfDrawn(Frozen):
    """Counts what the rows with logits have: other rows are not computed there."""

    count: Count

    def __call__(self, batch: BatchShape) -> float:
        """Return the count of these rows, 0 if there are none."""
        return self.count(batch.drawn) if batch.num_sampled else 0


def of_drawn(count: Count) -> Count:
    """Return the count of the rows with logits alone."""
    if count in (each_sampled_row, once_if_sampled):
        return count
    if count is each_row:
        return each_sampled_row
    return once_if_sampled if count is once else OfDrawn(count)


class StepCost(Frozen):
    """A cost as a sum of terms, each proportional to a count: quick to get for any batch.

    It is that of row part `row_part` of `num_row_parts`.
    """

    terms: tuple[tuple[Count, Cost], ...]
    row_part: int = 0
    num_row_parts: int = 1

    def flops_and_bytes(self, batch: BatchShape) -> tuple[float, float]:
        """Return these two of the cost of a whole batch, which is quicker; not rounded."""
        flops: float = 0
        moved: float = 0
        for count, cost in self.terms:
            times = count(batch)
            flops += times * cost.flops
            moved += times * (cost.weight_bytes + cost.cache_bytes)
        return flops, moved

    def of(self, batch: BatchShape) -> Cost:
        """Return the cost for a batch."""
        if self.num_row_parts > 1:
            batch = batch.part(self.row_part, self.num_row_parts)
        flops: float = 0
        weight_bytes: float = 0
        cache_bytes: float = 0
        sent_bytes: float = 0
        received_bytes: float = 0
        exchanges: float = 0
        for count, cost in self.terms:
            times = count(batch)
            flops += times * cost.flops
            weight_bytes += times * cost.weight_bytes
            cache_bytes += times * cost.cache_bytes
            if cost.sent_bytes or cost.received_bytes or cost.exchanges:  # of ranks alone
                sent_bytes += times * cost.sent_bytes
                received_bytes += times * cost.received_bytes
                exchanges += times * cost.exchanges
        amounts = (flops, weight_bytes, cache_bytes, sent_bytes, received_bytes, exchanges)
        return Cost(*map(round, amounts))
