"""A model that costs nothing, and whose tokens tell whether every page was what it should be.

Its memory holds one number a slot, in each cache group another. A row's numbers are hashes of its
token and of what it sees: in a group with a window all numbers within it, else the number before,
which depends on all before that, as real keys and values do. The next token is a hash of all
numbers that the last row sees, read back through the request's pages. A page that was freed too
early, shared wrongly, or not computed changes the tokens. `expected_output` says what they must
be, without any pages.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING

from twostroke.core.request import NO_PAGE, FinishReason
from twostroke.core.step import StepResult

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.core.step import Slice, StepPlan

    Windows = tuple[int | None, ...]

VOCAB_SIZE = 50
END = 0


class FakeModel:
    """Runs plans over pages of numbers.

    `two_arithmetics` computes prompt rows and generated rows differently, as some backends do.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        windows: Windows = (None,),
        *,
        two_arithmetics: bool = False,
    ) -> None:
        self.two_arithmetics = two_arithmetics
        self.windows = windows
        self._page_size = page_size
        self._slots = [-1] * (num_pages * page_size)

    def run(self, plan: StepPlan) -> StepResult:
        """Write the plan's rows, then draw; in reverse, so that no slice can lean on another."""
        written: set[int] = set()
        for piece in reversed(plan.slices):
            self._write(piece, written)
        tokens = [
            self._draw(piece, num_drafts)
            for piece in plan.slices
            for num_drafts in range(piece.num_drawn)
        ]
        return StepResult(tokens, [None] * len(tokens))

    def _write(self, piece: Slice, written: set[int]) -> None:
        request = piece.request
        assert piece.count > 0, "an empty slice"
        assert piece.start == request.num_computed, "a slice that does not continue"
        tokens = [*request.tokens[: piece.start + piece.count], *piece.drafts]
        for at in range(piece.start, len(tokens)):
            seen = [
                [self._slots[slot] for slot in self._slots_of(request, group, first, at)]
                for group, first in enumerate(_first_read(self.windows, at))
            ]
            is_output = self.two_arithmetics and at >= request.num_prompt
            for group, number in enumerate(_numbers(request, tokens[at], is_output, seen)):
                (slot,) = self._slots_of(request, group, at, at + 1)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self._slots[slot] = number

    def _draw(self, piece: Slice, num_drafts: int) -> int:
        """Draw the token behind the newest one and some of the drafts."""
        request = piece.request
        end = piece.start + piece.count
        assert end == len(request.tokens), "a token is drawn from the middle of a request"
        end += num_drafts
        seen = [
            self._slots[slot]
            for group, first in enumerate(_first_seen(self.windows, end - 1))
            for slot in self._slots_of(request, group, first, end)
        ]
        return _choose(seen, request.seed)

    def _slots_of(self, request: Request, group: int, first: int, end: int) -> list[int]:
        """Return where a group's numbers of the positions `first` to `end` - 1 lie."""
        pages, size = request.pages[group], self._page_size
        slots = []
        for at in range(first, end):
            page = pages[at // size]
            assert page != NO_PAGE, "a page that is read was given back"
            slots.append(page * size + at % size)
        return slots


def expected_output(
    request: Request, max_len: int, windows: Windows = (None,), *, two_arithmetics: bool = False
) -> tuple[list[int], FinishReason]:
    """What the fake model must generate for a new request that may grow to `max_len` tokens."""
    tokens = list(request.tokens)
    numbers: list[list[int]] = [[] for _ in windows]
    params = request.params
    if params.max_tokens is not None:
        max_len = min(max_len, len(tokens) + params.max_tokens)
    while True:
        for at in range(len(numbers[0]), len(tokens)):
            first_read = _first_read(windows, at)
            seen = [known[first:] for known, first in zip(numbers, first_read, strict=True)]
            is_output = two_arithmetics and at >= request.num_prompt
            row = _numbers(request, tokens[at], is_output, seen)
            for known, number in zip(numbers, row, strict=True):
                known.append(number)
        first_seen = _first_seen(windows, len(tokens) - 1)
        last = [n for known, first in zip(numbers, first_seen, strict=True) for n in known[first:]]
        tokens.append(_choose(last, request.seed))
        output = tokens[request.num_prompt :]
        if output[-1] in request.end_ids and len(output) > params.min_tokens:
            return output, FinishReason.STOP
        if len(tokens) == max_len:
            return output, FinishReason.LENGTH


def _first_seen(windows: Windows, at: int) -> list[int]:
    """The first position that a row sees, a group."""
    return [0 if window is None else max(0, at + 1 - window) for window in windows]


def _first_read(windows: Windows, at: int) -> list[int]:
    """The first position whose number goes into a row's own."""
    first_seen = zip(windows, _first_seen(windows, at), strict=True)
    return [max(0, at - 1) if window is None else first for window, first in first_seen]


def _numbers(request: Request, token: int, is_output: bool, seen: list[list[int]]) -> list[int]:
    """A row's number in each group."""
    state = hash((_begin(request.salt), token, is_output, *map(tuple, seen)))
    return [hash((state, group)) for group in range(len(seen))]


@cache
def _begin(salt: bytes) -> int:
    return int.from_bytes(sha256(salt).digest()[:7])


def _choose(numbers: list[int], seed: int) -> int:
    return hash((seed, *numbers)) % VOCAB_SIZE
