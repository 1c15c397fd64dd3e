"""Decides how an answer that breaks its JSON schema is generated again, for Python and the server.

The new answer has the same seed, and the wrong value is excluded, so that the text before the value
does not change. If new answers break the schema at the same offset again, shorter and shorter
prefixes of the value are excluded.

`settling` is a generator that does no work itself. It yields each check and each new answer that it
needs, and gets the result with `send`. `engine/redraw.py` blocks while the work is done;
`server/generation/redraw.py` awaits it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from msgspec.structs import replace

from twostroke.core.constraint import ExcludedPrefix
from twostroke.core.errors import DeadlineError, OverloadedError, RequestError, SchemaMissError
from twostroke.core.request import FinishReason
from twostroke.core.sampling import MAX_SEED
from twostroke.engine.output import Timings
from twostroke.engine.structured_output.schema.spans import wrong_span

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.output import Completion
    from twostroke.engine.structured_output.schema.verify import SchemaViolation
    from twostroke.model.tokenizer import Tokenizer

MAX_REDRAWS: Final = 8  # new answers in place of one answer
# The new answers may have this many tokens together, or this many times the first answer's tokens
# if that is more.
MIN_REDRAWN_TOKENS: Final = 2048
MAX_REDRAWN_RATIO: Final = 4
# A last limit, far longer than the tokens need even on a busy machine, so that the result does not
# depend on the speed of the machine.
MAX_REDRAW_S: Final = 1800.0
MISSES_AT_LEVEL: Final = 2  # misses at one offset before a prefix of half the length is excluded
_AFTER_NUMBER: Final = ",}]"
_VALUE_ENDS: Final = ("}", "]", '"', "true", "false", "null")  # of complete values


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedPart:
    """A part of an answer that has a JSON schema: its text, or the arguments of a tool call.

    Attributes:
        text: the part as the model wrote it.
        schema: the JSON schema of the part.
        is_strict: whether an answer that breaks the schema is an error.
        kind: "text" or "call", for reports.
        index: the number of the part's content block, in APIs whose streams have content blocks.
    """

    text: str
    schema: str
    is_strict: bool
    kind: str = "text"
    index: int = 0


class Miss(NamedTuple):
    """A part of an answer that breaks its JSON schema, and the broken rule.

    `fault` is the rule. `num_before` is the number of the answer's characters before the part.
    """

    part: CheckedPart
    fault: SchemaViolation
    num_before: int


class CheckPart(NamedTuple):
    """A step of `settling`: the caller checks a part of an answer against its JSON schema.

    The caller sends back the `SchemaViolation` of the part, or None.
    """

    part: CheckedPart


class DrawAgain(NamedTuple):
    """A step of `settling`: the caller generates another answer, without the excluded texts.

    The new answer, which the caller sends back, replaces `answer`, which breaks its JSON schema.
    The caller throws a RequestError if no other text fits the constraint, and a DeadlineError or an
    OverloadedError if there is no time or no room for another answer.
    """

    answer: Completion
    excluded: tuple[ExcludedPrefix, ...]


class Settled(NamedTuple):
    """The result of `settling`: the final answer, and the JSON schema's rule that it still breaks.

    `miss` is None if the answer fits its schema, or cannot be checked.
    """

    answer: Completion
    miss: Miss | None


class SentText(Protocol):
    """The part of an answer that a stream has sent, and that a new answer must not change.

    The blocking interface and the server implement it.
    """

    def may_change(self, part: CheckedPart, start: int) -> bool:
        """Whether an answer may be generated again from the offset `start` of a part.

        `start` is a character offset in the part's text. The answer may not be generated again if
        the stream has sent text after it.
        """

    def num_shown(self, miss: Miss) -> int:
        """Return how many characters of the answer the stream has sent.

        `miss` says which part of the answer breaks which rule.
        """

    def is_continued_by(self, answer: Completion) -> bool:
        """Whether a new answer begins with everything that the stream has sent."""


def settling(
    answer: Completion,
    read_parts: Callable[[Completion], Sequence[CheckedPart]],
    tokenizer: Tokenizer,
    sent: SentText | None = None,
) -> Generator[CheckPart | DrawAgain, Any, Settled]:
    """Yield the checks and new answers that make an answer fit its JSON schema.

    The caller performs each yielded step, sends its result back, and gets a `Settled` with the
    final answer as the generator's return value. `read_parts` returns the parts of an answer that
    have a schema. `sent` is the text that a stream has sent and that must stay; None if nothing was
    sent. `tokenizer` is the model's. The number of new answers and of their tokens is bounded, so
    that the result does not depend on the speed of the machine.
    """
    excluded: list[ExcludedPrefix] = []
    num_left = max(MIN_REDRAWN_TOKENS, MAX_REDRAWN_RATIO * len(answer.token_ids))
    end_s = time.monotonic() + MAX_REDRAW_S
    miss = yield from _find_miss(answer, read_parts, tokenizer)
    last_start, num_misses, is_widened = -1, 0, False
    for _ in range(MAX_REDRAWS):
        if miss is None or num_left <= 0 or time.monotonic() > end_s:
            break
        start, _ = wrong_span(miss.part.text, miss.fault)
        if sent is not None and not sent.may_change(miss.part, start):
            break
        num_misses = num_misses + 1 if miss.num_before + start == last_start else 0
        last_start = miss.num_before + start
        written = text_of_tokens(answer, tokenizer)
        added = list(exclusions(written, miss, num_misses // MISSES_AT_LEVEL))
        if not added:
            break
        excluded += added
        try:
            other: Completion = yield DrawAgain(answer, tuple(excluded))
        except RequestError:  # no other value fits there: let the text before it change, too
            if is_widened:
                break
            num_shown = 0 if sent is None else sent.num_shown(miss)
            num_bytes = len((written or "")[:num_shown].encode())
            excluded = [dataclasses.replace(value, start=num_bytes) for value in excluded]
            is_widened = True
            continue
        except (DeadlineError, OverloadedError):
            break
        num_left -= len(other.token_ids)
        if sent is None or sent.is_continued_by(other):
            answer = other
            miss = yield from _find_miss(answer, read_parts, tokenizer)
    return Settled(answer, miss)


def _find_miss(
    answer: Completion,
    read_parts: Callable[[Completion], Sequence[CheckedPart]],
    tokenizer: Tokenizer,
) -> Generator[CheckPart | DrawAgain, Any, Miss | None]:
    """Return the first rule of its JSON schema that an answer breaks; None if it breaks none.

    If the answer was cut by its token limit or a stop string, only its complete parts are checked.

    `read_parts` returns the parts of an answer that have a schema. Each check is yielded to the
    caller of `settling`.
    """
    if answer.finish_reason not in {FinishReason.STOP, FinishReason.LENGTH}:
        return None
    has_ended = answer.stop is None or answer.stop in tokenizer.eos_ids
    is_whole = answer.finish_reason is FinishReason.STOP and has_ended
    written, num_before = text_of_tokens(answer, tokenizer) or "", 0
    for part in read_parts(answer):
        num_before = max(0, written.find(part.text, num_before))
        if is_whole or is_complete_json(part.text):
            fault: SchemaViolation | None = yield CheckPart(part)
            if fault is not None:
                return Miss(part, fault, num_before)
        num_before += len(part.text)
    return None


def is_complete_json(text: str) -> bool:
    """Whether a text is a complete JSON value, rather than only the beginning of one.

    A number is never complete, because digits could follow.
    """
    text = text.strip()
    if not text.endswith(_VALUE_ENDS):
        return False
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


def miss_error(fault: SchemaViolation) -> SchemaMissError:
    """Return the error for an answer that breaks its strict JSON schema."""
    return SchemaMissError(
        f"The answer breaks the rule {fault} of its schema, even after it was generated again "
        f"(up to {MAX_REDRAWS} times). Describe the rule in the prompt, or relax it."
    )


def text_of_tokens(answer: Completion, tokenizer: Tokenizer) -> str | None:
    """Return the text of an answer's tokens, without special tokens; None if it is not UTF-8."""
    special_ids = tokenizer.special_ids
    tokens = [token for token in answer.token_ids if token not in special_ids]
    try:
        return b"".join(map(tokenizer.token_bytes, tokens)).decode()
    except UnicodeDecodeError:
        return None


def exclusions(written: str | None, miss: Miss, level: int) -> Iterator[ExcludedPrefix]:
    """Yield the texts that the next answer must not begin with, after an answer broke its schema.

    `written` is the whole text of the answer's tokens; nothing is excluded if it is None. At level
    0 the excluded text is the answer up to the end of the wrong value. Each higher level halves the
    excluded part of the value, so that more values that begin in the same way are excluded.
    """
    part = miss.part.text
    start, end = wrong_span(part, miss.fault)
    begin = miss.num_before + start
    if written is None or written[begin:].find(part[start:end]) != 0:
        return
    before, value = written[:begin], part[start:end]
    num_bytes = len(before.encode())
    length = max(min(2, len(value)), len(value) >> level)
    if length < len(value):
        yield ExcludedPrefix(before + value[:length], num_bytes)
    elif value[-1] in '"}]':
        yield ExcludedPrefix(before + value, num_bytes)
    elif begin + len(value) == len(written):
        yield ExcludedPrefix(before + value, num_bytes, is_whole=True)
    else:
        for sign in _AFTER_NUMBER:
            yield ExcludedPrefix(before + value + sign, num_bytes)


def redrawn_params(params: SamplingParams, work: DrawAgain) -> SamplingParams:
    """Return the sampling parameters for a new answer without the texts that `work` excludes."""
    assert params.constraint is not None
    assert params.seed is not None
    return replace(
        params,
        n=1,
        seed=(params.seed + work.answer.index % params.n) % (MAX_SEED + 1),  # as the engine's
        prompt_logprobs=None,
        constraint=dataclasses.replace(params.constraint, excluded=work.excluded),
    )


def replace_answer(answer: Completion, other: Completion) -> Completion:
    """Return the new answer `other` with the index, prompt data and first times of `answer`."""
    first = answer.timings
    return replace(
        other,
        index=answer.index,
        usage=replace(other.usage, cached_tokens=answer.usage.cached_tokens),
        timings=Timings(
            arrival_s=first.arrival_s,
            started_s=first.started_s,
            first_token_s=first.first_token_s,
            last_token_s=other.timings.last_token_s,
        ),
        prompt_logprobs=answer.prompt_logprobs,
    )
