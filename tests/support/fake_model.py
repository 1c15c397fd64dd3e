"""A model that costs nothing, and whose tokens tell whether every page was what it should be.

Its memory holds one number a slot, a hash of the slot's token and of the slot before, as real keys
and values depend on all tokens before them. The next token is a hash of all numbers read back
through the request's pages. A page that was freed too early, shared wrongly, or not computed
changes the tokens. `expected_output` says what they must be, without any pages.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from twostroke.core.request import FinishReason
from twostroke.core.step import StepResult

if TYPE_CHECKING:
    from twostroke.core.request import Request
    from twostroke.core.step import Slice, StepPlan

VOCAB_SIZE = 50
END = 0


class FakeModel:
    """Runs plans over pages of numbers.

    `two_arithmetics` computes prompt rows and generated rows differently, as some backends do.
    """

    def __init__(self, num_pages: int, page_size: int, *, two_arithmetics: bool = False) -> None:
        self.two_arithmetics = two_arithmetics
        self._page_size = page_size
        self._slots = [[-1] * page_size for _ in range(num_pages)]

    def run(self, plan: StepPlan) -> StepResult:
        """Write the plan's rows, then draw; in reverse, so that no slice can lean on another."""
        written: set[tuple[int, int]] = set()
        for piece in reversed(plan.slices):
            self._write(piece, written)
        tokens = [self._draw(piece) for piece in plan.slices if piece.samples]
        return StepResult(tokens, [None] * len(tokens))

    def _write(self, piece: Slice, written: set[tuple[int, int]]) -> None:
        request, size = piece.request, self._page_size
        assert piece.count > 0, "an empty slice"
        assert piece.start == request.num_computed, "a slice that does not continue"
        state = _begin(request.salt)
        if piece.start:
            state = self._slots[request.pages[0][(piece.start - 1) // size]][
                (piece.start - 1) % size
            ]
        for at in range(piece.start, piece.start + piece.count):
            is_output = self.two_arithmetics and at >= request.num_prompt
            state = hash((state, request.tokens[at], is_output))
            page, slot = request.pages[0][at // size], at % size
            assert (page, slot) not in written, "two rows write one slot"
            written.add((page, slot))
            self._slots[page][slot] = state

    def _draw(self, piece: Slice) -> int:
        request, size = piece.request, self._page_size
        end = piece.start + piece.count
        assert end == len(request.tokens), "a token is drawn from the middle of a request"
        states: list[int] = []
        for page in request.pages[0][: -(-end // size)]:
            states.extend(self._slots[page])
        return _choose(states[:end], request.seed)


def expected_output(
    request: Request, max_len: int, *, two_arithmetics: bool = False
) -> tuple[list[int], FinishReason]:
    """What the fake model must generate for a new request that may grow to `max_len` tokens."""
    tokens = list(request.tokens)
    states: list[int] = []
    params = request.params
    if params.max_tokens is not None:
        max_len = min(max_len, len(tokens) + params.max_tokens)
    while True:
        for at in range(len(states), len(tokens)):
            before = states[-1] if states else _begin(request.salt)
            is_output = two_arithmetics and at >= request.num_prompt
            states.append(hash((before, tokens[at], is_output)))
        tokens.append(_choose(states, request.seed))
        output = tokens[request.num_prompt :]
        if output[-1] in request.end_ids and len(output) > params.min_tokens:
            return output, FinishReason.STOP
        if len(tokens) == max_len:
            return output, FinishReason.LENGTH


def _begin(salt: bytes) -> int:
    return int.from_bytes(sha256(salt).digest()[:7])


def _choose(states: list[int], seed: int) -> int:
    return hash((seed, *states)) % VOCAB_SIZE
