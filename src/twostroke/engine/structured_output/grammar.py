"""Grammars: a constraint's text to a matcher that says which tokens may come next.

llguidance reads the notations and walks the vocabulary; what is here ties it to our tokenizers and
to steps with drafts.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np

from twostroke.core.draft_tree import ROOT
from twostroke.core.errors import RequestError
from twostroke.engine.structured_output.exclusion import Exclusions, TokenTexts
from twostroke.engine.structured_output.lark import (
    NO_FORCING,
    after_preface,
    either,
    with_prepared_schemas,
)
from twostroke.engine.structured_output.schema.document import Deadline
from twostroke.engine.structured_output.schema.prepare import prepare
from twostroke.engine.structured_output.schema.size import MOST_FORCED, forces_little, pattern_size
from twostroke.engine.structured_output.schema.verify import UncheckedError, Verifier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llguidance import GrammarFormat, LLMatcher, LLTokenizer
    from numpy.typing import NDArray

    from twostroke.core.constraint import Constraint
    from twostroke.model.tokenizer import Tokenizer

_MAX_KNOWN: Final = 64  # compiled grammars that are kept, or why they could not be compiled
_MAX_ERROR: Final = 300  # characters
MAX_CHOICES: Final = 1024
_NAMES: Final = {
    "json_schema": "The JSON schema",
    "regex": "The regular expression",
    "choice": "The list of choices",
    "grammar": "The grammar",
    "lark": "The grammar",
}

# At the rates that llguidance gives: a tenth of a second of compiling, and some ten milliseconds
# for the mask of a step, beyond which the request fails.
_LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 5_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_items_in_row": 1000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
# A larger `multipleOf` gets `_MORE_LIMITS`. llguidance computes each remainder once for all
# requests. `_walk` makes it compute most of them before the first step needs them.
_SMALL_MULTIPLE: Final = 1000
_MORE_LIMITS: Final = _LIMITS | {"step_lexer_fuel": 5_000_000, "max_lexer_states": 500_000}
_NUM_WALKS: Final = 8
_WALK_LENGTH: Final = 12  # tokens
# Also found in a text or a comment of a grammar, where it does no harm.
_MULTIPLE: Final = re.compile(r'\\?"multipleOf\\?": ?(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,4})?)')

_UNSPELLABLE: Final = "the model has no tokens for a part of the text."

# Our sentences about llguidance's limits, by a part of llguidance's error message.
_MEANINGS: Final = {
    "too many expressions constructed": (
        f"one token needs more than {_LIMITS['step_lexer_fuel']:,} steps of its regular "
        "expressions: use smaller counts, and simpler patterns, formats or limits of numbers."
    ),
    "too many states": (
        f"its regular expressions have more than {_LIMITS['max_lexer_states']:,} states: use "
        "smaller counts, and simpler patterns."
    ),
    "relevance check fuel": (
        f"its regular expressions need more than {_LIMITS['initial_lexer_fuel']:,} steps: use "
        "smaller counts, and simpler patterns."
    ),
    "Unable to determine if regex is empty": (
        "its pattern and its limits of length together need more than 10,000 states: use smaller "
        "counts, or a simpler pattern."
    ),
    "Current row has": (
        f"more than {_LIMITS['max_items_in_row']:,} of its rules could go on at one place: use "
        "fewer alternatives that begin alike."
    ),
    "Too many items": (
        f"one token fits more than {_LIMITS['step_max_items']:,} places of its rules: use fewer "
        "alternatives that begin alike."
    ),
    "schema too large": (
        f"its grammar has more than {_LIMITS['max_grammar_size']:,} parts: use fewer members and "
        "alternatives, or smaller counts."
    ),
    "NoExtensionBias": _UNSPELLABLE,
    "forced bytes: got": _UNSPELLABLE,
}


class Grammars:
    """Compiles constraints for one model's vocabulary, and remembers those that were used last.

    Safe to use from several threads; only one compiles at a time.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Compile for logits of `vocab_size`, of which the tokenizer may leave some unused."""
        self.ends = tokenizer.eos_ids
        self.num_words = -(-vocab_size // 32)  # of a mask
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._known: OrderedDict[Constraint, GrammarMatcher | str] = OrderedDict()
        self._lock = threading.Lock()  # of what is known
        self._compiling = threading.Lock()
        self.verifier = Verifier()  # of finished answers
        self._checks_schemas = Verifier()  # another, which does not wait for hostile answers

    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        """Return a matcher for a new request; raises as `compile`."""
        return self.compile(constraint).another(constraint)

    def compile(self, constraint: Constraint, limit_s: float = math.inf) -> GrammarMatcher:
        """Return the matcher that new requests copy (`another`).

        Once it is under way it looks at the time between the stages of its work and in those that
        are not llguidance's, which has limits of work (`_LIMITS`).

        Raises:
            RequestError: the constraint is not valid, not supported or too complex, or takes
                longer than `limit_s`; the message says why.
        """
        if not self.ends:
            reason = "needs an end token, which this model lacks."
            raise RequestError(reason, field=constraint.param)
        found = self._find(constraint)
        if found is None:
            with self._compiling:
                found = self._find(constraint) or self._try(constraint, Deadline(limit_s))
        if isinstance(found, str):
            raise _error(constraint, found)
        return found

    def known(self, constraint: Constraint) -> GrammarMatcher | None:
        """Return what `compile` would return at once, if it would."""
        found = self._find(constraint)
        return None if isinstance(found, str) else found

    def refusal(self, constraint: Constraint, *, only_known: bool = False) -> str | None:
        """Return why a constraint cannot be used, or None.

        `only_known` looks at earlier answers only, and takes no time.
        """
        if not only_known:
            with suppress(RequestError):
                self.compile(constraint)
        found = self._find(constraint)
        return found if isinstance(found, str) else None

    def prepare(self) -> None:
        """Read the vocabulary now rather than for the first constraint.

        It takes a second or two, during which other threads hardly run.
        """
        with self._compiling:
            if self.ends:
                _ = self._vocabulary

    def _find(self, constraint: Constraint) -> GrammarMatcher | str | None:
        """Return what is known of a constraint: compiled, or why it cannot be."""
        with self._lock:  # not the one of `_compiling`, which must not block other readers
            found = self._known.get(constraint)
            if found is not None:
                self._known.move_to_end(constraint)
            return found

    def _try(self, constraint: Constraint, deadline: Deadline) -> GrammarMatcher | str:
        """Compile a constraint, or find out why it cannot be; remember either."""
        found: GrammarMatcher | str
        try:
            found = on_large_stack(partial(self._compile, deadline=deadline), constraint)
        except TimeoutError as error:  # not remembered: another time it may be quicker
            raise RequestError(str(error), field=constraint.param) from None
        except RequestError as error:
            found = str(error.facts["why"])
        with self._lock:
            self._known[constraint] = found
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return found

    def _compile(self, constraint: Constraint, deadline: Deadline) -> GrammarMatcher:
        from llguidance import LLMatcher, LLParserLimits

        text, gaps = self._read(constraint, deadline)
        if constraint.alternative is not None:
            other, more = self._read(constraint.alternative, deadline)
            text, gaps = either(text, other), gaps + more
        if constraint.preface is not None:
            text = after_preface(constraint.preface, text, self._tokenizer)
        deadline.check()
        multiples = [Decimal(number) for number in _MULTIPLE.findall(text)]
        is_large = max(map(_num_remainders, multiples), default=Decimal()) > _SMALL_MULTIPLE
        limits = LLParserLimits(**(_MORE_LIMITS if is_large else _LIMITS))
        compiled = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        matcher = GrammarMatcher(compiled, self, constraint, gaps)
        deadline.check()
        # The first mask is the most work, and is not done again.
        matcher.masks((), (), (), np.zeros((1, matcher.num_words), np.uint32))
        for seed in range(_NUM_WALKS if is_large else 0):
            _walk(matcher.another(constraint), np.random.default_rng(seed), deadline)
        return matcher

    def _read(self, constraint: Constraint, deadline: Deadline) -> tuple[str, tuple[str, ...]]:
        """Do as `_limited`; refuse a schema that can be neither held nor checked."""
        text, gaps = _limited(constraint, deadline)
        if gaps and constraint.notation == "json_schema":
            try:
                self._checks_schemas.check_schema(constraint.text)
            except UncheckedError as error:
                raise _refusal(constraint, str(error)) from None
        return text, gaps

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The bytes of the tokens, which excluded texts are compared with."""
        return TokenTexts(self._tokenizer)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        words: Any = _Words(self._tokenizer, self._vocab_size)
        return LLTokenizer(words, n_vocab=self._vocab_size, eos_token=sorted(self.ends))


class _Words:
    """A tokenizer as llguidance wants to see it."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokens = [
            tokenizer.token_bytes(i) if i < tokenizer.vocab_size else b"" for i in range(vocab_size)
        ]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Return tokens with exactly the bytes of a text, none of them special."""
        return self._tokenizer.encode_exact(text if isinstance(text, str) else text.decode())


class GrammarMatcher:
    """A compiled grammar, and where in it one request's output is.

    `gaps` are the keywords of JSON schemas that it does not hold: with any, a finished answer must
    be checked.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        grammars: Grammars,
        constraint: Constraint,
        gaps: tuple[str, ...] = (),
    ) -> None:
        """Begin with no output."""
        self.gaps = gaps
        self._matcher = matcher
        self._is_shared = False  # `_matcher` belongs to the compiled grammar
        self._grammars = grammars
        self._constraint = constraint
        self._num_known = 0  # tokens of the output
        self._exclusions: Exclusions | None = None
        self.ends = grammars.ends
        self.num_words = grammars.num_words

    def another(self, constraint: Constraint) -> GrammarMatcher:
        """Return a matcher for a new request with the same constraint.

        The grammar is copied when the engine first uses the matcher: a large one takes half a
        millisecond, and a request may have a thousand answers.
        """
        assert not self._num_known
        found = GrammarMatcher(self._matcher, self._grammars, constraint, self.gaps)
        found._is_shared = True
        if constraint.excluded:
            texts = self._grammars.token_texts
            found._exclusions = Exclusions.of(constraint.excluded, texts, self.ends)
        return found

    def masks(
        self,
        output: Sequence[int],
        drafts: Sequence[int],
        parents: Sequence[int],
        out: NDArray[np.uint32],
    ) -> None:
        """Write which tokens may come next, as `core.constraint.Matcher` says."""
        self._follow(output)
        _mask(self._matcher, out[0])
        self._check()
        if self._exclusions:
            self._exclusions.clear(self._matcher, out[0])
            if not out[0].any():
                reason = "allows no text other than the excluded ones."
                raise RequestError(reason, field=self._constraint.param)
        if drafts:
            self._mask_drafts(drafts, parents, out[1:])

    def _mask_drafts(
        self, drafts: Sequence[int], parents: Sequence[int], out: NDArray[np.uint32]
    ) -> None:
        """Write what may follow each draft: nothing after a draft that is not allowed.

        On a copy: if a wrong draft exceeds a limit, the answer must not fail.
        """
        matcher, path = self._matcher.deep_copy(), [ROOT]  # drafts that it has taken in
        out[:] = 0
        for i, (draft, parent) in enumerate(zip(drafts, parents, strict=True)):
            if parent not in path:
                continue
            kept = path.index(parent) + 1
            if kept < len(path):
                matcher.rollback(len(path) - kept)
                del path[kept:]
            if draft not in self.ends and matcher.validate_tokens([draft]):
                matcher.consume_token(draft)
                path.append(i)
                _mask(matcher, out[i])
                if self._exclusions:
                    tokens = [drafts[index] for index in path if index != ROOT]
                    self._exclusions.after(tokens).clear(matcher, out[i])
            if matcher.is_error():  # the request fails only if this draft is right
                out[i] = 0
                return

    def count_allowed(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many of the first `tokens` may follow; 0 where the matcher has failed."""
        self._follow(output)
        if self._matcher.is_error():
            return 0
        return self._matcher.deep_copy().validate_tokens(list(tokens))

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Return the tokens that must follow, as many as are found quickly."""
        self._follow(output)
        # A copy: a search that reaches its limit leaves the matcher unusable.
        return () if self._matcher.is_error() else self._matcher.deep_copy().compute_ff_tokens()

    def _follow(self, output: Sequence[int]) -> None:
        """Take in the tokens that are new."""
        if self._is_shared:
            self._matcher, self._is_shared = self._matcher.deep_copy(), False
        if len(output) > self._num_known:
            tokens = list(output[self._num_known :])
            self._matcher.consume_tokens(tokens)
            self._num_known = len(output)
            if self._exclusions:
                self._exclusions = self._exclusions.after(tokens)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._constraint, self._matcher.get_error())


def _num_remainders(multiple: Decimal) -> Decimal:
    """Return how many remainders a `multipleOf` has, with a fraction scaled to an integer."""
    _, digits, exponent = multiple.normalize().as_tuple()
    return Decimal((0, digits, max(int(exponent), 0)))


def _walk(matcher: GrammarMatcher, rng: np.random.Generator, deadline: Deadline) -> None:
    """Compute the masks of a random answer's first tokens, so that llguidance caches its states."""
    output: list[int] = []
    mask = np.zeros((1, matcher.num_words), np.uint32)
    while len(output) < _WALK_LENGTH:
        deadline.check()
        matcher.masks(output, (), (), mask)
        (allowed,) = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()
        output.append(int(rng.choice(allowed)))
        if output[-1] in matcher.ends:
            return


def _mask(matcher: LLMatcher, row: NDArray[np.uint32]) -> None:
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def _limited(constraint: Constraint, deadline: Deadline) -> tuple[str, tuple[str, ...]]:
    """Return a constraint in llguidance's own form, and what it does not hold.

    It does not force text without a limit.
    """
    from llguidance import LLMatcher

    if constraint.notation != "json_schema":
        text, gaps = _grammar(constraint, deadline)
        return (text if _may_force(constraint) else _without_forcing(text)), gaps
    try:
        prepared = prepare(constraint.text, deadline)
        deadline.check()
        form = cast("Any", dict(prepared.json_form))
        text = LLMatcher.grammar_from_json_schema(prepared.text, overrides=form)
    except ValueError as error:
        raise _refusal(constraint, str(error)) from None
    is_little = forces_little(json.loads(prepared.text))
    return (text if is_little else _without_forcing(text)), prepared.gaps


def _grammar(constraint: Constraint, deadline: Deadline) -> tuple[str, tuple[str, ...]]:
    """Return a constraint that is not one schema in llguidance's own form, as `_limited` does."""
    from llguidance import grammar_from

    text, notation = constraint.text, constraint.notation
    gaps: tuple[str, ...] = ()
    try:
        if notation == "choice" and not _are_texts(json.loads(text)):
            message = f"it must be 1 to {MAX_CHOICES:,} texts, none of them empty"
            raise _refusal(constraint, message)
        if notation in {"grammar", "lark"} and text.lstrip().startswith("{"):
            raise _refusal(constraint, "no rule begins with '{'")  # JSON would be read as objects
        if notation == "lark":
            text, gaps = with_prepared_schemas(text, deadline)
        return grammar_from(cast("GrammarFormat", notation), text), gaps
    except ValueError as error:
        raise _refusal(constraint, str(error)) from None


def _may_force(constraint: Constraint) -> bool:
    """Return whether llguidance may look for text that can continue in one way only.

    A client's grammar can force any length. Grammars in Lark's notation are our own, or those of
    programs that use the library, and contain `NO_FORCING` themselves.
    """
    match constraint.notation:
        case "regex" | "choice":
            return pattern_size(constraint.text) <= MOST_FORCED
        case notation:
            return notation == "lark"


def _without_forcing(grammar: str) -> str:
    """Return the grammar, in Lark's notation or llguidance's own object, that forces nothing."""
    if not grammar.startswith("{"):
        return f"{grammar}\n{NO_FORCING}\n"
    first, *others = json.loads(grammar)["grammars"]
    first["name"] = "unforced"
    outer = {"name": "outer", "lark_grammar": f"start: @unforced\n{NO_FORCING}\n"}
    return json.dumps({"grammars": [outer, first, *others]})


def _are_texts(value: object) -> bool:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_CHOICES:
        return False
    return all(isinstance(text, str) and text for text in value)


def _refusal(constraint: Constraint, why: str) -> RequestError:
    return _error(constraint, f"{_NAMES[constraint.notation]} cannot be used: {_first_line(why)}")


def _error(constraint: Constraint, why: str) -> RequestError:
    return RequestError("cannot be followed. {why}", field=constraint.param, why=why)


def _first_line(text: str) -> str:
    """Return the first line of an error's text: the rest is about llguidance's internals."""
    if "Unsatisfiable schema" in text:
        text = "no value fits it"
    for sign, meaning in _MEANINGS.items():
        if sign in text:
            return meaning
    lines = text.strip().splitlines() or [""]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = (errors or lines)[0][:_MAX_ERROR]
    return line if line.endswith((".", "?")) else f"{line}."


Given = TypeVar("Given")
Found = TypeVar("Found")

_NICENESS: Final = 10
_STACK_BYTES: Final = 512 << 20
_stack_lock = threading.Lock()  # the size of new stacks is the process's


def on_large_stack(function: Callable[[Given], Found], given: Given) -> Found:
    """Return what `function` returns, called in a separate thread with a large stack."""
    with ThreadPoolExecutor(1, "twostroke-grammar", _lower_priority) as thread, _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            work = thread.submit(function, given)
        finally:
            threading.stack_size(before)
    return work.result()


def _lower_priority() -> None:
    """Lower this thread's priority, where the system has priorities of threads."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
