"""The cost of an operation: arithmetic and traffic, each proportional to a count of the batch."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.core.frozen import Frozen
from twostroke.model.program.batch import BatchShape


class Cost(Frozen):
    """The cost of a step or an operation: FLOPs, and bytes that must move.

    `weight_bytes` and `cache_bytes` (keys and values, read and written) are the memory traffic that
    no kernel can avoid. Values between operations are left out, since they stay in the processor's
    caches. A rank sends `sent_bytes` to other ranks and receives `received_bytes`, in `exchanges`
    for which it waits once each.
    """

    flops: int
    weight_bytes: int = 0
    cache_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    exchanges: int = 0

    @property
    def bytes(self) -> int:
        """Return all bytes that memory must move: weights, and keys and values."""
        return self.weight_bytes + self.cache_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            flops=self.flops + other.flops,
            weight_bytes=self.weight_bytes + other.weight_bytes,
            cache_bytes=self.cache_bytes + other.cache_bytes,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            received_bytes=self.received_bytes + other.received_bytes,
            exchanges=self.exchanges + other.exchanges,
        )


# Counts a property of a batch to which work is proportional.
Count = Callable[[BatchShape], float]


def once(batch: BatchShape) -> int:
    """Count every batch as 1, for costs that a step has once, such as reading a weight."""
    del batch
    return 1


def each_row(batch: BatchShape) -> int:
    """Count the rows of a batch, for costs that each row (computed token) has."""
    return batch.num_rows


def each_request(batch: BatchShape) -> int:
    """Count the requests of a batch, for costs that each request's state has."""
    return len(batch.starts)


def each_row_of_all_parts(batch: BatchShape) -> int:
    """Count the rows of the whole step, even if this rank computes only a part of them."""
    return batch.whole_step.num_rows


def each_sampled_row(batch: BatchShape) -> int:
    """Count the rows of a batch that get logits, for costs that only such rows have."""
    return batch.num_sampled


def each_draft(batch: BatchShape) -> int:
    """Count the draft rows of a batch: rows with logits, except one for each request."""
    return max(0, batch.num_sampled - len(batch.starts))


def once_if_sampled(batch: BatchShape) -> int:
    """Count a batch as 1 if any row gets logits, else as 0: for reading the output matrix."""
    return min(1, batch.num_sampled)


class EachAttended(Frozen):
    """Counts the (row, position) pairs in which the row attends to the position, in a batch."""

    window: int | None
    is_chunked: bool = False

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of (row, attended position) pairs of a batch."""
        return batch.num_attended(self.window, is_chunked=self.is_chunked)


class EachCached(Frozen):
    """Counts the positions whose keys and values attention reads or stores, in a batch."""

    window: int | None
    is_chunked: bool = False

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of positions that are read, plus the rows that are stored."""
        num_read = batch.num_context(self.window, is_chunked=self.is_chunked)
        return num_read + batch.whole_step.num_rows


class EachRead(Frozen):
    """Counts the positions whose keys and values attention reads, in a batch."""

    window: int | None
    is_chunked: bool = False

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of positions whose keys and values a batch reads."""
        return batch.num_context(self.window, is_chunked=self.is_chunked)


class EachPartialAttention(Frozen):
    """Counts (row, KV split) pairs of attention, in requests with at most `max_rows` rows.

    For the cost of context parallel attention (`SplitKvAttention`): for each pair of such a
    request, the rank that stores the KV split sends a partial attention to the rank that merges
    the row. Requests with more rows exchange keys and values (`EachKvSplit`).
    """

    window: int | None
    max_rows: int
    is_chunked: bool = False

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of (row, KV split) pairs in requests with at most `max_rows` rows."""
        requests = batch.requests_with_rows(0, self.max_rows)
        return requests.num_partial_attentions(self.window, is_chunked=self.is_chunked)


class EachKvSplit(Frozen):
    """Counts the KV splits that are read, in requests with at least `min_rows` rows.

    For the cost of context parallel attention (`SplitKvAttention`): the rank that stores such a
    split sends its keys and values to the other ranks of the team.
    """

    window: int | None
    min_rows: int
    is_chunked: bool = False

    def __call__(self, batch: BatchShape) -> int:
        """Return the number of KV splits, summed over requests with at least `min_rows` rows."""
        requests = batch.requests_with_rows(self.min_rows)
        return requests.num_kv_splits(self.window, is_chunked=self.is_chunked)


class OfWholeStep(Frozen):
    """Applies `count` to the whole step, even if this rank computes only some of its rows."""

    count: Count

    def __call__(self, batch: BatchShape) -> float:
        """Return `count` of the whole step that the batch belongs to."""
        return self.count(batch.whole_step)


class ShareOfExperts(Frozen):
    """Estimates the share of a model's experts whose weights a step reads.

    Each row is assumed to choose its experts independently.
    """

    num_used: int
    num_experts: int

    def __call__(self, batch: BatchShape) -> float:
        """Return the expected share of experts that a batch reads, from 0 to 1."""
        return 1 - (1 - self.num_used / self.num_experts) ** batch.num_rows


class OfLogitsRows(Frozen):
    """Applies `count` only to the rows of a batch that get logits."""

    count: Count

    def __call__(self, batch: BatchShape) -> float:
        """Return `count` of the batch's rows with logits; 0 if there are none."""
        return self.count(batch.logits_rows) if batch.num_sampled else 0


def of_logits_rows(count: Count) -> Count:
    """Turn a count of all rows of a batch into a count of only the rows with logits."""
    if count in (each_sampled_row, once_if_sampled, each_request):
        return count
    if count is each_row:
        return each_sampled_row
    return once_if_sampled if count is once else OfLogitsRows(count)


class StepCost(Frozen):
    """The cost of a step as a function of its batch, which is fast to evaluate.

    The cost is the sum of `terms`: each is a cost, multiplied by a count of the batch. If this is
    one rank's cost, the rank computes row part `row_part` of `num_row_parts`.
    """

    terms: tuple[tuple[Count, Cost], ...]
    row_part: int = 0
    num_row_parts: int = 1

    def flops_and_bytes(self, batch: BatchShape) -> tuple[float, float]:
        """Return the FLOPs and memory bytes of a batch, not rounded; faster than `of`."""
        flops: float = 0
        moved: float = 0
        for count, cost in self.terms:
            num_units = count(batch)
            flops += num_units * cost.flops
            moved += num_units * (cost.weight_bytes + cost.cache_bytes)
        return flops, moved

    def of(self, batch: BatchShape) -> Cost:
        """Return the cost of a step for a batch."""
        if self.num_row_parts > 1:
            batch = batch.part(self.row_part, self.num_row_parts)
        flops: float = 0
        weight_bytes: float = 0
        cache_bytes: float = 0
        sent_bytes: float = 0
        received_bytes: float = 0
        exchanges: float = 0
        for count, cost in self.terms:
            num_units = count(batch)
            flops += num_units * cost.flops
            weight_bytes += num_units * cost.weight_bytes
            cache_bytes += num_units * cost.cache_bytes
            if cost.sent_bytes or cost.received_bytes or cost.exchanges:  # only with several ranks
                sent_bytes += num_units * cost.sent_bytes
                received_bytes += num_units * cost.received_bytes
                exchanges += num_units * cost.exchanges
        return Cost(
            flops=round(flops),
            weight_bytes=round(weight_bytes),
            cache_bytes=round(cache_bytes),
            sent_bytes=round(sent_bytes),
            received_bytes=round(received_bytes),
            exchanges=round(exchanges),
        )
