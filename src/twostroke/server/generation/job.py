"""Jobs: the internal form of the requests of all protocols."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.core.request import BATCH_SERVICE, SERVICES
from twostroke.core.sampling import MAX_BIAS, MAX_TOKENS
from twostroke.engine.chat.reader import PLAIN, AnswerFormat
from twostroke.engine.chat.reasoning import AS_IT_IS
from twostroke.engine.client import Caller
from twostroke.engine.embedding import check_total_values, choose_pooling
from twostroke.engine.prompts import (
    chat_of,
    encode_beginning,
    encode_gap,
    encode_parts,
    encode_rendered,
    encode_text,
    ending_gaps,
    to_hints,
)
from twostroke.model.tokenizer import TooManyTokensError
from twostroke.server.http.ignored import Ignored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twostroke.core.constraint import Constraint
    from twostroke.core.embedding import EmbeddingParams
    from twostroke.core.request import Hints
    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.chat.conversation import PreparedChat
    from twostroke.engine.chat.reasoning import Thinking
    from twostroke.engine.chat.tools import ToolForm, Tools
    from twostroke.engine.embedding import Embedding
    from twostroke.engine.model_card import ModelCard
    from twostroke.model.tokenizer import Prompt as Rendered
    from twostroke.server.http.request_context import ServedRequest
    from twostroke.server.observability.objectives import Goodput

MAX_MESSAGES: Final = 10_000
_INSTRUCTING: Final = frozenset(("system", "developer"))  # roles
_SEED_BITS: Final = 62
_ANSWER_SHARE: Final = 4  # 1/4 of the context is left for an answer without a limit


class Conversation(Frozen):
    """Messages for the model's chat template; each has `role` and `content`.

    Attributes:
        messages: OpenAI's objects.
        tools: the tools that the answer may call, as OpenAI's objects.
        continues: whether the answer continues the last message's text.
        has_turn: whether to open the assistant's turn after the messages otherwise.
        thinking: the request's options for the model's reasoning.
        drops_oldest: whether a conversation that is too long loses its oldest exchanges.
        left_out: the reports of parts that the protocol has left out.
        room: how many tokens to leave for the answer then; None for a share of the context.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    continues: bool = False
    has_turn: bool = True
    thinking: Thinking = AS_IT_IS
    drops_oldest: bool = False
    room: int | None = None
    left_out: tuple[Ignored, ...] = ()

    def encode(self, card: ModelCard) -> list[int]:
        """Return the token ids.

        Raises:
            RequestError: the chat template is missing or refuses the messages.
            ContextLengthError: the prompt is long, and has more tokens than the context.
        """
        return encode_rendered(card, self.render(card))

    def render(self, card: ModelCard) -> Rendered:
        """Render the chat template with all messages, or with the newest that fit.

        Raises as `encode` does.
        """
        whole = self._render(card, self.messages)
        return self._newest(card, whole) if self.drops_oldest else whole

    def _newest(self, card: ModelCard, whole: Rendered) -> Rendered:
        """Drop the fewest exchanges from the beginning that make the rest fit, but the last one.

        An exchange begins with a message of the user, so that calls stay with their results.
        Instructions stay.
        """
        size = card.context_length
        is_limit = self.room and self.room < size  # and not one that is cut to what fits
        most = size - (self.room if self.room and is_limit else size // _ANSWER_SHARE)
        roles = [message["role"] for message in self.messages]
        others = (index for index, role in enumerate(roles) if role not in _INSTRUCTING)
        instructions = self.messages[: next(others, len(roles))]

        def fits(rendered: Rendered) -> bool:
            try:
                return len(card.tokenizer.encode_prompt(rendered, most=most)) <= most
            except TooManyTokensError:
                return False

        def render_from(start: int) -> Rendered:
            return self._render(card, (*instructions, *self.messages[start:]))

        starts = [index for index, role in enumerate(roles) if role == "user"]
        if len(starts) < 2 or fits(whole):
            return whole
        earlier = starts[:-1]
        first = bisect_left(earlier, x=True, key=lambda start: fits(render_from(start)))
        return render_from(starts[first])

    def _render(self, card: ModelCard, messages: tuple[dict[str, Any], ...]) -> Rendered:
        return chat_of(card).render(
            messages,
            self.tools,
            add_generation_prompt=self.has_turn,
            continue_final_message=self.continues,
            thinking=chat_of(card).follow(self.thinking, has_tools=bool(self.tools))[0],
        )

    def unfollowed(self, card: ModelCard) -> list[Ignored]:
        """Return its left-out parts, and fields of reasoning that the template cannot follow."""
        _, errors = chat_of(card).follow(self.thinking, has_tools=bool(self.tools))
        param = self.thinking.param
        unfollowed = [Ignored.of(error, is_known=error.field == param) for error in errors]
        return [*self.left_out, *unfollowed]

    def turn(
        self, card: ModelCard, tools: Tools | None, form: Constraint | None = None
    ) -> PreparedChat:
        """Return its prompt, and how answers are held and read.

        They may call `tools`, and have a `form` if they do not.
        """
        last = self.messages[-1]
        continued = last.get("content") or "" if self.continues else ""
        has_result = last["role"] == "tool"
        return chat_of(card).turn(
            self.render(card), tools, form, continued=continued, has_result=has_result
        )


class Composed(Protocol):
    """A prompt that a protocol puts together for the model."""

    def encode(self, card: ModelCard) -> list[int]:
        """Return the token ids.

        Raises:
            RequestError: the model cannot read such a prompt.
            ContextLengthError: it has more tokens than the context.
        """


Prompt = str | list[int] | Conversation | Composed


@dataclass(slots=True)
class Encoded:
    """A job encoded for one model.

    Attributes:
        prompts: token ids, a list for each prompt.
        params: the job's, completed by the model's own.
        hints: for speculation.
        reading: how to find reasoning and calls in the answers.
        ignored: the fields that this model cannot follow.
        calls: the form of calls that constrains the answers, if tools may be called.
        gaps: what the grammar of the compiled constraint does not hold of it.
    """

    prompts: list[list[int]]
    params: SamplingParams
    hints: Hints
    reading: AnswerFormat = PLAIN
    ignored: tuple[Ignored, ...] = ()
    calls: ToolForm | None = None
    gaps: tuple[str, ...] = ()

    def fix_seed(self) -> None:
        """Choose a seed if the request has none, so that an answer can be generated again."""
        if self.params.seed is None:
            self.params = replace(self.params, seed=secrets.randbits(_SEED_BITS))

    def most_tokens(self, context_length: int) -> int:
        """Return how many tokens the prompts and all answers may have, each in its own context."""
        most = self.params.max_tokens
        rooms = [max(0, context_length - len(prompt)) for prompt in self.prompts]
        answers = sum(room if most is None else min(most, room) for room in rooms)
        return sum(map(len, self.prompts)) + self.params.n * answers


class Job(Frozen):
    """Prompts and how to answer them.

    Attributes:
        model: the name that the client used; None for the default.
        prompts: one conversation, or any number of texts, lists of token ids and composed prompts.
        context: token ids before a conversation, which are those of an earlier exchange.
        params: how to choose tokens.
        caller: the sender, and the urgency.
        speculate, prediction: become the engine's `Hints`.
        stream: whether to send the answers while they come.
        in_background: whether to compute them although the client may leave.
        shows_progress: whether to report how much of the prompts is read.
        include_usage: whether a stream ends with the usage.
        continuous_usage: whether the chunks of such a stream have the usage so far.
        echo: whether to repeat each prompt before its answer.
        suffix: the text after the answer, for a model that can fill in the middle.
        add_special: whether to add the model's begin (or end) of sequence to texts without it.
        parse_special: whether the texts of special tokens in texts become these tokens; None
            leaves that to the server.
        timings: whether to report durations.
        llama_timings: whether to report them in llama-server's form.
        is_verbose: whether to report each answer in llama-server's form, too.
        splits_reasoning: whether reasoning is separated from the answers; None leaves that to the
            server.
        omits_reasoning: whether separated reasoning is left out of the response.
        tools: the tools that answers to a conversation may call.
        tier: the class of service to report; None reports nothing.
        keep: stores the whole response when it has ended, if the request says so.
        ignored: the fields in parts of the request that only the protocol's reader knows.
        keep_s: how long to keep the prompt in a page cache, if there is one.
        usual: the protocol's documented defaults of sampling values; None for the engine's
            defaults.
        allowed_ids: the tokens that the constraint of `params` allows, if it is made of tokens.
        token_ids: whether to report the ids of tokens.
        tokens_as_ids: whether to report the tokens of log-probabilities by their ids.
        prompt_scores: whether to report the prompt's log-probabilities apart from an echo.
    """

    model: str | None
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    caller: Caller = msgspec.field(default_factory=Caller)
    speculate: str = "auto"
    prediction: str = ""
    stream: bool = False
    in_background: bool = False
    shows_progress: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    suffix: str = ""
    add_special: bool = True
    parse_special: bool | None = None
    timings: bool = False
    llama_timings: bool = False
    is_verbose: bool = False
    splits_reasoning: bool | None = None
    omits_reasoning: bool = False
    tools: Tools | None = None
    tier: str | None = None
    keep: Callable[[Any], None] | None = None
    context: tuple[int, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    keep_s: float = 0.0
    usual: SamplingParams | None = None
    allowed_ids: tuple[int, ...] | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_scores: bool = False

    @property
    def num_choices(self) -> int:
        """The number of answers."""
        return len(self.prompts) * self.params.n

    def encode(self, card: ModelCard, *, splits_reasoning: bool = True) -> Encoded:
        """Encode the job for a model; `splits_reasoning` separates reasoning from answers.

        Raises:
            RequestError: the chat template is missing or refuses the messages, or the model cannot
                fill in the middle.
            ContextLengthError: a prompt has more tokens than the context.
        """
        hints, first = to_hints(card, self.speculate, self.prediction), self.prompts[0]
        params, ignored = _with_known_ids(self.params, card)
        params = _held_to_allowed(params, self.allowed_ids, card)
        hints = replace(hints, shows_progress=self.shows_progress, keep_s=self.keep_s)
        if isinstance(first, Conversation):
            turn = first.turn(card, self.tools, self.params.constraint)
            tokens = encode_rendered(card, turn.prompt, self.caller.prompt_field)
            ignored += first.unfollowed(card)
            if self.splits_reasoning is not None:
                splits_reasoning = self.splits_reasoning
            reading = turn.reading(splits_reasoning=splits_reasoning)
            if self.context:
                tokens = [*self.context, *_without_begin(tokens, card)]
            params = turn.constrained(params)
            return Encoded([tokens], params, hints, reading, tuple(ignored), turn.calls)
        params = ending_gaps(card, params) if self.suffix else params
        prompts = [self._encode(prompt, card) for prompt in self.prompts]
        return Encoded(prompts, params, hints, ignored=tuple(ignored))

    def _encode(self, prompt: Prompt, card: ModelCard) -> list[int]:
        assert not isinstance(prompt, Conversation)
        if not isinstance(prompt, (str, list)):
            return prompt.encode(card)
        if self.suffix:
            return encode_gap(card, prompt, self.suffix)
        return encode_text(
            card, prompt, add_special=self.add_special, parse_special=self.parse_special
        )


class EmbeddingJob(Frozen):
    """Inputs to embed: texts, or lists of token ids and texts that are joined.

    `model` is the name that the client used, None for the default; `write` encodes an embedding
    for the response. `truncates` cuts texts that are longer than the context; `add_special` and
    `parse_special` as in `Job`.
    """

    model: str | None
    texts: tuple[str | list[int | str], ...]
    params: EmbeddingParams
    caller: Caller
    write: Callable[[Embedding], msgspec.Raw]
    truncates: bool = False
    add_special: bool = True
    parse_special: bool | None = None

    def encode(self, card: ModelCard) -> list[list[int]]:
        """Return the token ids of each text.

        Raises:
            ContextLengthError: a text has more tokens than the context.
            RequestError: a text has no token.
        """
        encoded = [self._encode(text, card) for text in self.texts]
        name = self.caller.prompt_field
        for index, ids in enumerate(encoded):
            if not ids:
                field = f"{name}[{index}]" if len(encoded) > 1 else name
                raise RequestError("is empty: give at least one token.", field=field)
        return encoded

    def _encode(self, text: str | list[int | str], card: ModelCard) -> list[int]:
        add, parse, field = self.add_special, self.parse_special, self.caller.prompt_field
        if isinstance(text, list) and any(isinstance(part, str) for part in text):
            return encode_parts(card, text, field=field, add_special=add, parse_special=parse)
        plain = cast("str | list[int]", text)
        if self.truncates:
            return encode_beginning(card, plain, add_special=add, parse_special=parse)
        return encode_text(card, plain, field=field, add_special=add, parse_special=parse)


def _with_known_ids(
    params: SamplingParams, card: ModelCard
) -> tuple[SamplingParams, list[Ignored]]:
    """Return parameters without the bias of tokens that the model does not have."""
    size = card.cost.program.vocab_size
    wrong = next((token for token in params.logit_bias if token >= size), None)
    if wrong is None:
        return params, []
    reason = f"has token ids outside 0 to {size - 1}: the first is {wrong}."
    error = RequestError(reason, field="logit_bias")
    kept = {token: bias for token, bias in params.logit_bias.items() if token < size}
    return replace(params, logit_bias=kept), [Ignored.of(error)]


def _held_to_allowed(
    params: SamplingParams, allowed_ids: tuple[int, ...] | None, card: ModelCard
) -> SamplingParams:
    """Return parameters with which only an allowed end token can end an answer.

    Raises:
        RequestError: an id is not in the model's vocabulary.
    """
    if allowed_ids is None:
        return params
    size = card.cost.program.vocab_size
    if max(allowed_ids) >= size:
        reason = f"has token ids outside 0 to {size - 1}, such as {max(allowed_ids)}."
        raise RequestError(reason, field="allowed_token_ids")
    own_ends = card.tokenizer.eos_ids
    if not {*own_ends, *params.stop_token_ids}.intersection(allowed_ids):
        return replace(params, min_tokens=params.max_tokens or MAX_TOKENS)
    # When a constraint's text is complete, the constraint allows every end token.
    barred = dict.fromkeys(own_ends.difference(allowed_ids), -MAX_BIAS)
    return replace(params, logit_bias={**params.logit_bias, **barred})


def _without_begin(tokens: list[int], card: ModelCard) -> list[int]:
    """Return tokens without the one that begins every text."""
    return tokens[1:] if tokens[:1] == [card.tokenizer.bos_id] else tokens


def check_messages(count: int, field: str) -> None:
    """Raise a RequestError if a conversation has too many messages or items."""
    if count > MAX_MESSAGES:
        raise RequestError(f"takes at most {MAX_MESSAGES} messages, got {count}.", field=field)


def check_choices(job: Job, limit: int) -> None:
    """Raise a RequestError if a job asks for too many answers."""
    if job.num_choices > limit:
        reason = f"asks for too many answers: prompts times n must be at most {limit}, got "
        field = "prompt" if len(job.prompts) > 1 else "n"
        raise RequestError(f"{reason}{job.num_choices}.", field=field)


def check_texts(job: EmbeddingJob, limit: int) -> None:
    """Raise a RequestError if a job has too many texts."""
    if (num_texts := len(job.texts)) > limit:
        reason = f"takes at most {limit:,} texts, got {num_texts:,}."
        raise RequestError(reason, field=job.caller.prompt_field)


def check_vectors(
    job: EmbeddingJob, texts: Sequence[Sequence[int]], card: ModelCard, limit: int
) -> None:
    """Raise a RequestError if the vectors of a job's encoded texts have too many values."""
    width = card.embedding_width
    pooling = choose_pooling(job.params, card.name, card.pooling, width)
    field = job.caller.prompt_field
    check_total_values(texts, job.params, pooling, width=width, limit=limit, field=field)


J = TypeVar("J", "Job", "EmbeddingJob")


def sent_by(served: ServedRequest, job: J, goodput: Goodput) -> J:
    """Return a job with the facts of its request.

    Its class's objective for the first token says when it must start. Batches have time.

    Raises:
        ClassError: the key may not have its class.
    """
    caller = replace(job.caller, weight=served.weight, timeout_s=served.timeout_s)
    service, priority = caller.service, caller.priority
    if served.service is not None:
        service, priority = served.service, SERVICES[served.service]
    elif served.key is not None:
        is_named = caller.names_class
        service, priority = served.key.class_of(service, priority, is_named=is_named)
    caller = replace(caller, service=service, priority=priority)
    ttft_s = goodput.limits[service].get("ttft")
    if ttft_s is not None and service != BATCH_SERVICE:
        caller = replace(caller, start_within_s=ttft_s)
    return replace(job, caller=caller)


def begun(job: J, served: ServedRequest) -> J:
    """Return a job that knows how much of its request's timeout is over."""
    spent_s = time.monotonic() - served.began_s
    return replace(job, caller=replace(job.caller, spent_s=spent_s))
