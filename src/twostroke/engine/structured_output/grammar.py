"""Compiles constraints into matchers, which say which tokens may come next.

llguidance parses the notations and computes the masks over the vocabulary. This module connects it
to our tokenizers, to steps with draft tokens, and to JSON schemas that `schema` prepares.
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
from twostroke.engine.structured_output.argument_grammar import with_prepared_schemas
from twostroke.engine.structured_output.exclusion import Exclusions, TokenTexts
from twostroke.engine.structured_output.lark import (
    NO_FORCING,
    union_grammar,
    with_begin,
    with_reasoning_section,
)
from twostroke.engine.structured_output.schema.document import Deadline
from twostroke.engine.structured_output.schema.prepare import prepare
from twostroke.engine.structured_output.schema.size import (
    MAX_FORCED_BYTES,
    forces_little,
    pattern_size,
)
from twostroke.engine.structured_output.schema.verify import UncheckedError, Verifier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llguidance import GrammarFormat, LLMatcher, LLTokenizer
    from numpy.typing import NDArray

    from twostroke.core.constraint import Constraint
    from twostroke.model.tokenizer import Tokenizer

Argument = TypeVar("Argument")
Result = TypeVar("Result")

_MAX_CACHED_GRAMMARS: Final = 64  # compiled grammars, and reasons for refusals
_MAX_ERROR_CHARS: Final = 300
MAX_CHOICES: Final = 1024
_NAMES: Final = {  # of the notations, in errors
    "json_schema": "The JSON schema",
    "regex": "The regular expression",
    "choice": "The list of choices",
    "grammar": "The grammar",
    "lark": "The grammar",
}

# llguidance's limits: about 0.1 s to compile a grammar, and about 10 ms for the mask of a step. A
# request beyond them fails.
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
# A `multipleOf` with more remainders gets `_LARGE_LIMITS`. llguidance computes each remainder once
# for all requests, and `_warm_mask_cache` makes it compute most of them before the first step.
_MAX_SMALL_REMAINDERS: Final = 1000
_LARGE_LIMITS: Final = _LIMITS | {"step_lexer_fuel": 5_000_000, "max_lexer_states": 500_000}
_NUM_WALKS: Final = 8
_WALK_TOKENS: Final = 12
# A match in a text or a comment of a grammar only makes the limits larger.
_MULTIPLE: Final = re.compile(r'\\?"multipleOf\\?": ?(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,4})?)')

_UNSPELLABLE: Final = "the model has no tokens for a part of the text."

# Errors that a user can act on, by a part of llguidance's error message.
_EXPLANATIONS: Final = {
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
        f"more than {_LIMITS['max_items_in_row']:,} of its rules are possible at one position: use "
        "fewer alternatives with the same beginning."
    ),
    "Too many items": (
        f"one token fits more than {_LIMITS['step_max_items']:,} positions of its rules: use fewer "
        "alternatives with the same beginning."
    ),
    "schema too large": (
        f"its grammar has more than {_LIMITS['max_grammar_size']:,} parts: use fewer members and "
        "alternatives, or smaller counts."
    ),
    "NoExtensionBias": _UNSPELLABLE,
    "forced bytes: got": _UNSPELLABLE,
}


_NICENESS: Final = 10  # of the compiling thread
_STACK_BYTES: Final = 512 << 20
_stack_lock = threading.Lock()  # the stack size of new threads is set for the whole process


class Grammars:
    """Compiles constraints on answers into matchers for one model, and caches the last matchers.

    A constraint is a JSON schema, a regular expression or a grammar. Several threads may use this
    class; they compile one after another.

    Attributes:
        ends: the end tokens of the model.
        num_words: 32-bit words of a mask over the vocabulary.
        verifier: checks finished answers against their JSON schemas.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Prepare for a model with `vocab_size` logits; there may be more logits than tokens."""
        self.ends = tokenizer.eos_ids
        self.num_words = -(-vocab_size // 32)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # The last constraints: compiled, or the reason for their refusal.
        self._cache: OrderedDict[Constraint, GrammarMatcher | str] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()
        self.verifier = Verifier()
        # A second verifier: the first may be busy with a slow answer.
        self._schema_verifier = Verifier()

    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        """Return a constraint's matcher for a new request.

        Raises:
            RequestError: the constraint cannot be compiled.
        """
        return self.compile(constraint).for_request(constraint)

    def compile(self, constraint: Constraint, limit_s: float = math.inf) -> GrammarMatcher:
        """Compile a constraint, or take its matcher from the cache.

        Each new request gets its own copy of the returned matcher by `for_request`. The time limit
        is checked between the stages of compiling, and inside all stages except llguidance's
        compilation, which has other limits (`_LIMITS`).

        Raises:
            RequestError: the constraint is not valid, not supported or too complex, or takes
                longer than `limit_s` to compile.
        """
        if not self.ends:
            reason = "needs an end token, which this model lacks."
            raise RequestError(reason, field=constraint.param)
        result = self._cached_result(constraint)
        if result is None:
            with self._compile_lock:
                result = self._cached_result(constraint) or self._compile_and_cache(
                    constraint, Deadline(limit_s)
                )
        if isinstance(result, str):
            raise _error(constraint, result)
        return result

    def cached(self, constraint: Constraint) -> GrammarMatcher | None:
        """Return a constraint's matcher from the cache without compiling.

        None if the constraint is not in the cache, or cannot be used.
        """
        result = self._cached_result(constraint)
        return None if isinstance(result, str) else result

    def refusal(self, constraint: Constraint, *, only_known: bool = False) -> str | None:
        """Return why a constraint cannot be used, or None if it can be used.

        With `only_known`, nothing is compiled: only a refusal that is in the cache is returned, and
        None means that no refusal is known.
        """
        if not only_known:
            with suppress(RequestError):
                self.compile(constraint)
        cached = self._cached_result(constraint)
        return cached if isinstance(cached, str) else None

    def prepare(self) -> None:
        """Index the vocabulary at start, so that the first constrained request need not wait.

        The index takes a second or two, in which other threads hardly run.
        """
        with self._compile_lock:
            if self.ends:
                _ = self._vocabulary

    def _cached_result(self, constraint: Constraint) -> GrammarMatcher | str | None:
        """Return a constraint's cached matcher, or the cached reason for its refusal.

        None if the constraint is not in the cache.
        """
        with self._cache_lock:  # not `_compile_lock`: a compilation must not block readers
            cached = self._cache.get(constraint)
            if cached is not None:
                self._cache.move_to_end(constraint)
            return cached

    def _compile_and_cache(
        self, constraint: Constraint, deadline: Deadline
    ) -> GrammarMatcher | str:
        """Compile a constraint, and cache the matcher or the reason for the refusal.

        Raises RequestError, and caches nothing, if the time limit is over: the next attempt may be
        faster.
        """
        result: GrammarMatcher | str
        try:
            result = on_large_stack(partial(self._compile, deadline=deadline), constraint)
        except TimeoutError as error:  # not cached: the next attempt may be faster
            raise RequestError(str(error), field=constraint.param) from None
        except RequestError as error:
            result = str(error.facts["why"])
        with self._cache_lock:
            self._cache[constraint] = result
            if len(self._cache) > _MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return result

    def _compile(self, constraint: Constraint, deadline: Deadline) -> GrammarMatcher:
        from llguidance import LLMatcher, LLParserLimits

        text, unenforced_keywords = self._to_llguidance(constraint, deadline)
        if constraint.alternative is not None:
            other_text, other_keywords = self._to_llguidance(constraint.alternative, deadline)
            text = union_grammar(text, other_text)
            unenforced_keywords += other_keywords
        if constraint.preface is not None:
            text = with_reasoning_section(constraint.preface, text, self._tokenizer)
        deadline.check()
        multiples = [Decimal(number) for number in _MULTIPLE.findall(text)]
        is_large = max(map(_num_remainders, multiples), default=Decimal()) > _MAX_SMALL_REMAINDERS
        limits = LLParserLimits(**(_LARGE_LIMITS if is_large else _LIMITS))
        compiled = LLMatcher(self._vocabulary, text, log_level=0, limits=limits)
        matcher = GrammarMatcher(compiled, self, constraint, unenforced_keywords)
        deadline.check()
        # The first mask is the most work. llguidance caches the result.
        matcher.masks((), (), (), np.zeros((1, matcher.num_words), np.uint32))
        for seed in range(_NUM_WALKS if is_large else 0):
            _warm_mask_cache(matcher.for_request(constraint), np.random.default_rng(seed), deadline)
        return matcher

    def _to_llguidance(
        self, constraint: Constraint, deadline: Deadline
    ) -> tuple[str, tuple[str, ...]]:
        """Return a constraint's grammar for llguidance, and the JSON schema's unenforced keywords.

        The grammar does not enforce these keywords, so finished answers are checked against the
        schema. Raises RequestError if the schema cannot be used for that check either.
        """
        text, unenforced_keywords = _limited_grammar(constraint, deadline)
        if unenforced_keywords and constraint.notation == "json_schema":
            try:
                self._schema_verifier.check_schema(constraint.text)
            except UncheckedError as error:
                raise _refusal(constraint, str(error)) from None
        if constraint.begin:
            text = with_begin(constraint.begin, text, self._tokenizer)
        return text, unenforced_keywords

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The bytes of each token in the vocabulary; built at first use, for excluded texts."""
        return TokenTexts(self._tokenizer)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        vocabulary: Any = _Vocabulary(self._tokenizer, self._vocab_size)
        return LLTokenizer(vocabulary, n_vocab=self._vocab_size, eos_token=sorted(self.ends))


class _Vocabulary:
    """Gives llguidance a model's tokens and tokenizer in the form that it expects."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokens = [
            tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
            for token in range(vocab_size)
        ]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the model's tokens for the bytes of a text, without special tokens."""
        return self._tokenizer.encode_exact(text if isinstance(text, str) else text.decode())


class GrammarMatcher:
    """A constraint's compiled grammar, and how far one request's output has got in it.

    It computes masks: which tokens of the vocabulary may come next.

    Attributes:
        unenforced_keywords: keywords of JSON schemas that the grammar does not enforce. If there
            are any, the finished answer must be checked.
        ends: the end tokens of the model.
        num_words: 32-bit words of a mask.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        grammars: Grammars,
        constraint: Constraint,
        unenforced_keywords: tuple[str, ...] = (),
    ) -> None:
        """Begin at the start of the grammar, before any output."""
        self.unenforced_keywords = unenforced_keywords
        self._matcher = matcher
        self._is_shared = False  # whether other requests use `_matcher`, too
        self._grammars = grammars
        self._constraint = constraint
        self._num_consumed = 0  # tokens of the output
        self._exclusions: Exclusions | None = None
        self.ends = grammars.ends
        self.num_words = grammars.num_words

    def for_request(self, constraint: Constraint) -> GrammarMatcher:
        """Return a copy of the matcher for a new request with the same constraint.

        llguidance's grammar is copied when the new matcher is used first: copying a large grammar
        takes half a millisecond, and one call may submit a thousand requests.
        """
        assert not self._num_consumed
        matcher = GrammarMatcher(
            self._matcher, self._grammars, constraint, self.unenforced_keywords
        )
        matcher._is_shared = True
        if constraint.excluded:
            texts = self._grammars.token_texts
            matcher._exclusions = Exclusions.of(constraint.excluded, texts, self.ends)
        return matcher

    def masks(
        self,
        output: Sequence[int],
        drafts: Sequence[int],
        parents: Sequence[int],
        out: NDArray[np.uint32],
    ) -> None:
        """Write the mask of allowed tokens after `output`, and one after each draft token.

        `parents` has the index of each draft's parent in the draft tree. `out` has one row for the
        output and one for each draft, with one bit for each token (see `core.constraint.Matcher`).
        """
        self._consume(output)
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
        """Write the mask of allowed tokens after each draft; none after a draft that is wrong."""
        # A copy, so that a wrong draft that exceeds a limit of llguidance does not end the request.
        matcher = self._matcher.deep_copy()
        path = [ROOT]  # the drafts that the copy has consumed
        out[:] = 0
        for i, (draft, parent) in enumerate(zip(drafts, parents, strict=True)):
            if parent not in path:
                continue
            path_length = path.index(parent) + 1
            if path_length < len(path):
                matcher.rollback(len(path) - path_length)
                del path[path_length:]
            if draft not in self.ends and matcher.validate_tokens([draft]):
                matcher.consume_token(draft)
                path.append(i)
                _mask(matcher, out[i])
                if self._exclusions:
                    tokens = [drafts[index] for index in path if index != ROOT]
                    self._exclusions.after(tokens).clear(matcher, out[i])
            if matcher.is_error():  # the request fails later, if the draft is accepted
                out[i] = 0
                return

    def count_allowed(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """Return how many tokens of a draft the grammar allows in sequence after `output`.

        The speculator drops the tokens of a draft after these. Returns 0 if llguidance has failed.
        """
        self._consume(output)
        if self._matcher.is_error():
            return 0
        return self._matcher.deep_copy().validate_tokens(list(tokens))

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Return the next tokens after `output` if the grammar leaves no choice; empty otherwise.

        The n-gram proposer drafts these tokens. llguidance's search has a limit, so not all forced
        tokens may be returned.
        """
        self._consume(output)
        # A copy, because a matcher is unusable after a search that reached the limit.
        return () if self._matcher.is_error() else self._matcher.deep_copy().compute_ff_tokens()

    def _consume(self, output: Sequence[int]) -> None:
        """Advance the grammar by the tokens of `output` that the matcher has not consumed yet."""
        if self._is_shared:
            self._matcher = self._matcher.deep_copy()
            self._is_shared = False
        if len(output) > self._num_consumed:
            tokens = list(output[self._num_consumed :])
            self._matcher.consume_tokens(tokens)
            self._num_consumed = len(output)
            if self._exclusions:
                self._exclusions = self._exclusions.after(tokens)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._constraint, self._matcher.get_error())


def _num_remainders(multiple: Decimal) -> Decimal:
    """Return the number of possible remainders of a division by a schema's `multipleOf`.

    llguidance's automaton for the keyword has a state for each remainder, so a large number of
    remainders needs larger limits. A fraction is scaled to an integer first.
    """
    _, digits, exponent = multiple.normalize().as_tuple()
    return Decimal((0, digits, max(int(exponent), 0)))


def _warm_mask_cache(matcher: GrammarMatcher, rng: np.random.Generator, deadline: Deadline) -> None:
    """Compute the masks along one random answer, so that llguidance caches them for requests.

    Stops after `_WALK_TOKENS` tokens. Raises TimeoutError if the deadline is over.
    """
    output: list[int] = []
    mask = np.zeros((1, matcher.num_words), np.uint32)
    while len(output) < _WALK_TOKENS:
        deadline.check()
        matcher.masks(output, (), (), mask)
        (allowed,) = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()
        output.append(int(rng.choice(allowed)))
        if output[-1] in matcher.ends:
            return


def _mask(matcher: LLMatcher, row: NDArray[np.uint32]) -> None:
    matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def _limited_grammar(constraint: Constraint, deadline: Deadline) -> tuple[str, tuple[str, ...]]:
    """Return a constraint's grammar for llguidance, with long forced text disabled.

    Forced text is text without a choice. llguidance would follow it to its end within one step,
    which can take long, so in a grammar that may force much text, this is switched off by an
    option. Also returns the keywords of a JSON schema that the grammar does not enforce.
    """
    from llguidance import LLMatcher

    if constraint.notation != "json_schema":
        text, unenforced_keywords = _grammar(constraint, deadline)
        return (text if _may_force(constraint) else _disable_forcing(text)), unenforced_keywords
    try:
        prepared = prepare(constraint.text, deadline)
        deadline.check()
        json_form = cast("Any", dict(prepared.json_form))
        text = LLMatcher.grammar_from_json_schema(prepared.text, overrides=json_form)
    except ValueError as error:
        raise _refusal(constraint, str(error)) from None
    is_short = forces_little(json.loads(prepared.text))
    return (text if is_short else _disable_forcing(text)), prepared.unenforced_keywords


def _grammar(constraint: Constraint, deadline: Deadline) -> tuple[str, tuple[str, ...]]:
    """Return llguidance's grammar of a constraint that is not a JSON schema.

    Also returns the keywords that the grammar does not enforce, of JSON schemas inside the grammar.
    """
    from llguidance import grammar_from

    text = constraint.text
    notation = constraint.notation
    unenforced_keywords: tuple[str, ...] = ()
    try:
        if notation == "choice" and not _are_texts(json.loads(text)):
            reason = f"it must have 1 to {MAX_CHOICES:,} texts, none of them empty"
            raise _refusal(constraint, reason)
        if notation in {"grammar", "lark"} and text.lstrip().startswith("{"):
            raise _refusal(constraint, "no rule begins with '{'")  # llguidance reads it as JSON
        if notation == "lark":
            text, unenforced_keywords = with_prepared_schemas(text, deadline)
        return grammar_from(cast("GrammarFormat", notation), text), unenforced_keywords
    except ValueError as error:
        raise _refusal(constraint, str(error)) from None


def _may_force(constraint: Constraint) -> bool:
    """Whether llguidance may follow forced text (text without a choice) under a constraint.

    This is False if the forced text may be long. A client's grammar can force text of any length.
    Grammars in the notation "lark" come from Twostroke itself, or from programs that use the
    library, and contain `NO_FORCING` where necessary.
    """
    match constraint.notation:
        case "regex" | "choice":
            return pattern_size(constraint.text) <= MAX_FORCED_BYTES
        case notation:
            return notation == "lark"


def _disable_forcing(grammar: str) -> str:
    """Return a grammar with the option that keeps llguidance from following forced text.

    `grammar` is in Lark's notation, or is one of llguidance's JSON objects.
    """
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
    """Return the error for a constraint that cannot be used, with the reason's first line."""
    return _error(constraint, f"{_NAMES[constraint.notation]} cannot be used: {_first_line(why)}")


def _error(constraint: Constraint, why: str) -> RequestError:
    return RequestError("cannot be followed. {why}", field=constraint.param, why=why)


def _first_line(text: str) -> str:
    """Return the first line of llguidance's error message; later lines are about its internals."""
    if "Unsatisfiable schema" in text:
        text = "no value fits it"
    for message_part, explanation in _EXPLANATIONS.items():
        if message_part in text:
            return explanation
    lines = text.strip().splitlines() or [""]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    line = (errors or lines)[0][:_MAX_ERROR_CHARS]
    return line if line.endswith((".", "?")) else f"{line}."


def on_large_stack(function: Callable[[Argument], Result], argument: Argument) -> Result:
    """Call `function(argument)` in a thread with a large stack and low priority; return its result.

    The compiler of grammars, llguidance, follows rules that refer to each other by recursion, a
    stack frame for each rule, so the stack must suffice for the longest grammar. Only the used part
    of the stack takes memory.
    """
    with ThreadPoolExecutor(1, "twostroke-grammar", _lower_priority) as thread, _stack_lock:
        before = threading.stack_size(_STACK_BYTES)
        try:
            future = thread.submit(function, argument)
        finally:
            threading.stack_size(before)
    return future.result()


def _lower_priority() -> None:
    """Lower the priority of the thread that compiles a grammar, where the system allows that."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
