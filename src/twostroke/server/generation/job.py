"""Jobs: requests in a form that all API protocols share, and the encoding of their prompts."""

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
from twostroke.core.message_text import counted_noun
from twostroke.core.request import BATCH_SERVICE_TIER, SERVICE_TIERS
from twostroke.core.sampling import MAX_BIAS, MAX_TOKENS
from twostroke.engine.chat.reader import PLAIN, AnswerFormat
from twostroke.engine.chat.reasoning import AS_IT_IS
from twostroke.engine.client import Caller
from twostroke.engine.embedding import check_total_values, choose_pooling
from twostroke.engine.prompts import (
    chat_of,
    encode_beginning,
    encode_infill_prompt,
    encode_parts,
    encode_rendered,
    encode_text,
    to_hints,
    with_infill_end_ids,
    with_reasoning_budget,
    with_shared_lengths,
)
from twostroke.model.tokenizer import TooManyTokensError
from twostroke.server.http.ignored import Ignored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twostroke.core.constraint import Constraint
    from twostroke.core.request import EmbeddingParams, Hints
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
_INSTRUCTION_ROLES: Final = frozenset(("system", "developer"))
_SEED_BITS: Final = 62
_ANSWER_CONTEXT_DIVISOR: Final = 4  # an answer without a limit gets 1/4 of the context


class Conversation(Frozen):
    """The chat messages from which a model's chat template makes the prompt.

    Each message has `role` and `content`.

    Attributes:
        messages: the messages in OpenAI's format.
        tools: the tools that the answer may call, in OpenAI's format.
        continues: whether the answer continues the last message's text.
        has_turn: whether the prompt opens an assistant turn after the messages, if the answer
            does not continue the last message.
        thinking: the request's options for the model's reasoning.
        drops_oldest: whether a conversation that is too long loses its oldest exchanges.
        reserved_tokens: context tokens to reserve for the answer when exchanges are dropped;
            None reserves a quarter of the context.
        ignored: message parts that the protocol does not pass to the model.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    continues: bool = False
    has_turn: bool = True
    thinking: Thinking = AS_IT_IS
    drops_oldest: bool = False
    reserved_tokens: int | None = None
    ignored: tuple[Ignored, ...] = ()

    def encode(self, card: ModelCard) -> list[int]:
        """Render the conversation's prompt, and return its token ids.

        Raises:
            RequestError: the chat template is missing or refuses the messages.
            ContextLengthError: the prompt has more tokens than the context.
        """
        return encode_rendered(card, self.render(card))

    def render(self, card: ModelCard) -> Rendered:
        """Return the prompt that the chat template renders from the messages.

        If `drops_oldest` is set and the prompt is too long, only the newest messages that fit are
        used.

        Raises:
            RequestError: the chat template is missing or refuses the messages.
        """
        full_prompt = self._render(card, self.messages)
        return self._newest_that_fit(card, full_prompt) if self.drops_oldest else full_prompt

    def _newest_that_fit(self, card: ModelCard, full_prompt: Rendered) -> Rendered:
        """Return `full_prompt` if it fits the context, else a prompt without the oldest exchanges.

        As few exchanges as possible are dropped. An exchange begins with a user message, so tool
        calls stay with their results. The instructions at the beginning and the last exchange are
        never dropped.
        """
        context_length = card.context_length
        reserved_tokens = self.reserved_tokens or context_length
        if reserved_tokens >= context_length:  # no limit, or a limit that nothing reaches
            reserved_tokens = context_length // _ANSWER_CONTEXT_DIVISOR
        max_tokens = context_length - reserved_tokens
        roles = [message["role"] for message in self.messages]
        other_indexes = (
            index for index, role in enumerate(roles) if role not in _INSTRUCTION_ROLES
        )
        instructions = self.messages[: next(other_indexes, len(roles))]

        def fits(rendered: Rendered) -> bool:
            try:
                return (
                    len(card.tokenizer.encode_prompt(rendered, max_tokens=max_tokens)) <= max_tokens
                )
            except TooManyTokensError:
                return False

        def render_from(start: int) -> Rendered:
            return self._render(card, (*instructions, *self.messages[start:]))

        exchange_starts = [index for index, role in enumerate(roles) if role == "user"]
        if len(exchange_starts) < 2 or fits(full_prompt):
            return full_prompt
        droppable = exchange_starts[:-1]
        num_dropped = bisect_left(droppable, x=True, key=lambda start: fits(render_from(start)))
        return render_from(exchange_starts[num_dropped])

    def _render(self, card: ModelCard, messages: tuple[dict[str, Any], ...]) -> Rendered:
        return chat_of(card).render(
            messages,
            self.tools,
            add_generation_prompt=self.has_turn,
            continue_final_message=self.continues,
            thinking=chat_of(card).supported_thinking(self.thinking, has_tools=bool(self.tools))[0],
        )

    def with_shared_lengths(
        self, card: ModelCard, hints: Hints, prompt: Rendered, tokens: Sequence[int]
    ) -> Hints:
        """Add to the engine's hints the prefix lengths that later prompts of the chat will share.

        For a model with recurrent layers, the prefix cache keeps a snapshot of the state after each
        of these lengths, which are in tokens. Returns the new hints, or `hints` for other models.
        `tokens` are the token ids of `prompt`, which `prepare` has rendered.
        """

        def render(messages: Sequence[Mapping[str, Any]]) -> Rendered:
            return self._render(card, tuple(map(dict, messages)))

        return with_shared_lengths(
            card, hints, prompt, tokens, messages=self.messages, render=render
        )

    def with_budget(self, card: ModelCard, default: int | None) -> Conversation:
        """Return a copy of the conversation that has a budget of reasoning tokens.

        `default` is the server's budget for requests that set no budget.

        Raises:
            RequestError: the chat template is missing, or cannot be compiled.
        """
        thinking = chat_of(card).thinking_with_budget(
            self.thinking, default, has_tools=bool(self.tools)
        )
        return self if thinking is self.thinking else replace(self, thinking=thinking)

    def ignored_fields(self, card: ModelCard) -> list[Ignored]:
        """Return the request fields without effect on this model, for the response to report.

        They are message parts that the protocol leaves out, and reasoning options that the chat
        template ignores.
        """
        _, errors = chat_of(card).supported_thinking(self.thinking, has_tools=bool(self.tools))
        param = self.thinking.param
        ignored_options = [Ignored.of(error, is_known=error.field == param) for error in errors]
        return [*self.ignored, *ignored_options]

    def prepare(
        self, card: ModelCard, tools: Tools | None, constraint: Constraint | None = None
    ) -> PreparedChat:
        """Render the prompt, and decide how the answers are constrained and parsed.

        Answers may call `tools`; an answer without calls obeys `constraint`.

        Raises:
            RequestError: the chat template is missing or refuses the messages.
        """
        last_message = self.messages[-1]
        continued_text = last_message.get("content") or "" if self.continues else ""
        return chat_of(card).prepare_answer(
            self.render(card),
            tools,
            constraint,
            continued=continued_text,
            has_result=last_message["role"] == "tool",
        )


class ComposedPrompt(Protocol):
    """A prompt that an API protocol assembles itself, for example from texts and token ids."""

    def encode(self, card: ModelCard) -> list[int]:
        """Return the token ids of the assembled prompt.

        Raises:
            RequestError: the model does not support such a prompt.
            ContextLengthError: the prompt has more tokens than the context.
        """


Prompt = str | list[int] | Conversation | ComposedPrompt


@dataclass(slots=True)
class EncodedJob:
    """A job's prompts and parameters, encoded for one model and ready for its engine.

    Attributes:
        prompts: the token ids of each prompt.
        params: the job's sampling parameters, completed by the model's.
        hints: the engine's hints, such as those for speculation.
        reading: how to find reasoning and tool calls in the answers.
        ignored: the request fields that have no effect on this model.
        removed_lines: the kinds of lines that were removed from the conversation.
        calls: the syntax of tool calls that constrains the answers, if tools may be called.
        unenforced_keywords: the rules of the schema that the compiled grammar does not enforce.
    """

    prompts: list[list[int]]
    params: SamplingParams
    hints: Hints
    reading: AnswerFormat = PLAIN
    ignored: tuple[Ignored, ...] = ()
    removed_lines: tuple[str, ...] = ()
    calls: ToolForm | None = None
    unenforced_keywords: tuple[str, ...] = ()

    def fix_seed(self) -> None:
        """Choose a random seed if the request has none, so that answers can be repeated.

        An answer that breaks its JSON schema is generated again, from the same seed.
        """
        if self.params.seed is None:
            self.params = replace(self.params, seed=secrets.randbits(_SEED_BITS))

    def max_total_tokens(self, context_length: int) -> int:
        """Return the maximum number of tokens that all prompts and answers can have together.

        The server reserves these tokens in the limits of the API key before the job runs. Each
        answer has a context of `context_length` tokens, which its prompt shares.
        """
        max_tokens = self.params.max_tokens
        num_answer_tokens = 0
        for prompt in self.prompts:
            num_left = max(0, context_length - len(prompt))
            num_answer_tokens += num_left if max_tokens is None else min(max_tokens, num_left)
        return sum(map(len, self.prompts)) + self.params.n * num_answer_tokens


class Job(Frozen):
    """One generation request in the form that all API protocols share: its prompts and options.

    A protocol's `read` makes the job, and `encode` prepares it for a model's engine.

    Attributes:
        model: the model name that the client used; None for the default model.
        prompts: one conversation, or any number of texts, token id lists and composed prompts.
        context: token ids of an earlier exchange, which precede a conversation.
        params: the sampling parameters.
        caller: the sender, its service tier, priority and deadlines.
        speculate, prediction: values for the engine's `Hints`.
        stream: whether to send the answers while they are generated.
        in_background: whether to generate the answers even if the client disconnects.
        shows_progress: whether to report the progress of prefill.
        include_usage: whether a stream ends with the usage.
        continuous_usage: whether each chunk of such a stream has the usage so far.
        echo: whether to repeat each prompt before its answer.
        suffix: the text after the answer, for a model that can fill in the middle.
        add_special: whether to add the model's begin (or end) of sequence token to texts that
            lack it.
        parse_special: whether special tokens that are spelled out in a text become tokens; None
            for the server's default.
        timings: whether to report durations.
        llama_timings: whether to report durations in llama-server's form.
        is_verbose: whether to add each answer in llama-server's form.
        splits_reasoning: whether to separate reasoning from the answers; None for the server's
            default.
        omits_reasoning: whether to leave separated reasoning out of the response.
        tools: the tools that answers to a conversation may call.
        tier: the service tier to report; None reports no tier.
        store: stores the finished response, if the request asks for it.
        ignored: ignored fields that only the protocol's own reader can find.
        keep_s: seconds to keep the prompt's KV pages in the offload tiers.
        default_params: the protocol's documented sampling defaults; None for the engine's.
        allowed_ids: the token ids that the constraint of `params` allows, if it lists token ids.
        token_ids: whether to report token ids.
        tokens_as_ids: whether log-probabilities name tokens by their ids.
        prompt_scores: whether to report the prompt's log-probabilities without repeating its text.
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
    store: Callable[[Any], None] | None = None
    context: tuple[int, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    keep_s: float = 0.0
    default_params: SamplingParams | None = None
    allowed_ids: tuple[int, ...] | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_scores: bool = False

    @property
    def num_choices(self) -> int:
        """The number of answers that the request asks for: `n` for each prompt."""
        return len(self.prompts) * self.params.n

    def encode(
        self,
        card: ModelCard,
        *,
        splits_reasoning: bool = True,
        reasoning_budget: int | None = None,
    ) -> EncodedJob:
        """Encode the job's prompts and parameters for a model.

        For requests that do not set them, `splits_reasoning` is the server's default for separating
        reasoning from answers, and `reasoning_budget` its maximum number of reasoning tokens.

        Raises:
            RequestError: the chat template is missing or refuses the messages, or the model
                cannot fill in the middle.
            ContextLengthError: a prompt has more tokens than the context.
        """
        hints = to_hints(card, self.speculate, self.prediction)
        conversation = self.prompts[0]
        params, ignored = _with_known_ids(self.params, card)
        params = _without_other_ends(params, self.allowed_ids, card)
        hints = replace(hints, shows_progress=self.shows_progress, keep_s=self.keep_s)
        if isinstance(conversation, Conversation):
            conversation = conversation.with_budget(card, reasoning_budget)
            params = with_reasoning_budget(card, params, conversation.thinking)
            chat = conversation.prepare(card, self.tools, self.params.constraint)
            tokens = encode_rendered(card, chat.prompt, self.caller.prompt_field)
            hints = conversation.with_shared_lengths(card, hints, chat.prompt, tokens)
            ignored += conversation.ignored_fields(card)
            if self.splits_reasoning is not None:
                splits_reasoning = self.splits_reasoning
            if self.context:
                rest = _without_bos(tokens, card)
                num_added = len(self.context) + len(rest) - len(tokens)
                lengths = tuple(length + num_added for length in hints.shared_lengths)
                hints = replace(hints, shared_lengths=lengths)
                tokens = [*self.context, *rest]
            return EncodedJob(
                [tokens],
                params=chat.constrained(params),
                hints=hints,
                reading=chat.answer_format(splits_reasoning=splits_reasoning),
                ignored=tuple(ignored),
                removed_lines=chat_of(card).removed_lines(conversation.messages),
                calls=chat.calls,
            )
        params = with_infill_end_ids(card, params) if self.suffix else params
        prompts = [self._encode(prompt, card) for prompt in self.prompts]
        return EncodedJob(prompts, params, hints, ignored=tuple(ignored))

    def _encode(self, prompt: Prompt, card: ModelCard) -> list[int]:
        assert not isinstance(prompt, Conversation)
        if not isinstance(prompt, (str, list)):
            return prompt.encode(card)
        if self.suffix:
            return encode_infill_prompt(card, prompt, self.suffix)
        return encode_text(
            card, prompt, add_special=self.add_special, parse_special=self.parse_special
        )


class EmbeddingJob(Frozen):
    """One embedding request in the form that all API protocols share.

    Attributes:
        model: the model name that the client used; None for the default model.
        texts: the inputs: each a text, or a list of token ids and texts that are joined.
        params: the embedding parameters.
        caller: the sender, its service tier, priority and deadlines.
        write: encodes an embedding as JSON for the response.
        truncates: whether to cut texts that are longer than the context.
        add_special, parse_special: as in `Job`.
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
        """Return the token ids of each text to embed.

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
        add_special, parse_special = self.add_special, self.parse_special
        field = self.caller.prompt_field
        if isinstance(text, list) and any(isinstance(part, str) for part in text):
            return encode_parts(
                card, text, field=field, add_special=add_special, parse_special=parse_special
            )
        text_or_ids = cast("str | list[int]", text)
        if self.truncates:
            return encode_beginning(
                card, text_or_ids, add_special=add_special, parse_special=parse_special
            )
        return encode_text(
            card, text_or_ids, field=field, add_special=add_special, parse_special=parse_special
        )


def _with_known_ids(
    params: SamplingParams, card: ModelCard
) -> tuple[SamplingParams, list[Ignored]]:
    """Remove `logit_bias` entries of tokens that the vocabulary lacks from sampling parameters.

    Returns the parameters, and the removed entries as ignored request fields.
    """
    vocab_size = card.cost.program.vocab_size
    unknown_id = next((id_ for id_ in params.logit_bias if id_ >= vocab_size), None)
    if unknown_id is None:
        return params, []
    reason = f"has token ids outside 0 to {vocab_size - 1}: the first is {unknown_id}."
    error = RequestError(reason, field="logit_bias")
    known_biases = {id_: bias for id_, bias in params.logit_bias.items() if id_ < vocab_size}
    return replace(params, logit_bias=known_biases), [Ignored.of(error)]


def _without_other_ends(
    params: SamplingParams, allowed_ids: tuple[int, ...] | None, card: ModelCard
) -> SamplingParams:
    """Return parameters with which only the end tokens in `allowed_ids` can end an answer.

    `allowed_ids` comes from the request's field `allowed_token_ids`; without the field it is None,
    and the parameters do not change.

    Raises:
        RequestError: an id is not in the model's vocabulary.
    """
    if allowed_ids is None:
        return params
    vocab_size = card.cost.program.vocab_size
    if max(allowed_ids) >= vocab_size:
        reason = f"has token ids outside 0 to {vocab_size - 1}, such as {max(allowed_ids)}."
        raise RequestError(reason, field="allowed_token_ids")
    eos_ids = card.tokenizer.eos_ids
    if not {*eos_ids, *params.stop_token_ids}.intersection(allowed_ids):
        return replace(params, min_tokens=params.max_tokens or MAX_TOKENS)
    # A constraint allows every end token once its text is complete, so a bias forbids the others.
    forbidden = dict.fromkeys(eos_ids.difference(allowed_ids), -MAX_BIAS)
    return replace(params, logit_bias={**params.logit_bias, **forbidden})


def _without_bos(tokens: list[int], card: ModelCard) -> list[int]:
    """Remove the begin-of-sequence token from a prompt that will be appended to other tokens."""
    return tokens[1:] if tokens[:1] == [card.tokenizer.bos_id] else tokens


def check_messages(count: int, field: str) -> None:
    """Check that a request does not have too many messages or items.

    Raises:
        RequestError: there are more than `MAX_MESSAGES`; the error names `field`.
    """
    if count > MAX_MESSAGES:
        raise RequestError(f"takes at most {MAX_MESSAGES} messages, got {count}.", field=field)


def check_choices(job: Job, limit: int) -> None:
    """Check that a job does not request more than `limit` answers.

    Raises:
        RequestError: prompts times `n` exceeds the limit.
    """
    if job.num_choices > limit:
        field = "prompt" if len(job.prompts) > 1 else "n"
        raise RequestError(
            f"asks for too many answers: prompts times n must be at most {limit}, got "
            f"{job.num_choices}.",
            field=field,
        )


def check_texts(job: EmbeddingJob, limit: int) -> None:
    """Check that an embedding job does not have more than `limit` texts.

    Raises:
        RequestError: there are more texts.
    """
    if (num_texts := len(job.texts)) > limit:
        reason = f"takes at most {counted_noun(limit, 'text', form=',')}, got {num_texts:,}."
        raise RequestError(reason, field=job.caller.prompt_field)


def check_vectors(
    job: EmbeddingJob, texts: Sequence[Sequence[int]], card: ModelCard, limit: int
) -> None:
    """Check that an embedding job's vectors do not have more than `limit` values in total.

    Raises:
        RequestError: the vectors would have more values.
    """
    width = card.embedding_width
    check_total_values(
        texts,
        job.params,
        choose_pooling(job.params, card.name, card.pooling, width),
        width=width,
        limit=limit,
        field=job.caller.prompt_field,
    )


J = TypeVar("J", "Job", "EmbeddingJob")


def with_sender(job: J, sender: ServedRequest, goodput: Goodput) -> J:
    """Return a copy of a job with the weight, timeout, service tier and priority of its sender.

    The tier's objective for the time to first token limits how long the job may wait for its start;
    batch requests may wait.

    Raises:
        ClassError: the sender's key does not allow the service tier or the priority.
    """
    caller = replace(job.caller, weight=sender.weight, timeout_s=sender.timeout_s)
    service_tier, priority = caller.service_tier, caller.priority
    if sender.service_tier is not None:
        service_tier = sender.service_tier
        priority = SERVICE_TIERS[sender.service_tier]
    elif sender.key is not None:
        service_tier, priority = sender.key.resolve_service_tier(
            service_tier, priority, is_named=caller.names_service_tier
        )
    caller = replace(caller, service_tier=service_tier, priority=priority)
    ttft_s = goodput.limits[service_tier].get("ttft")
    if ttft_s is not None and service_tier != BATCH_SERVICE_TIER:
        caller = replace(caller, start_within_s=ttft_s)
    return replace(job, caller=caller)


def with_spent_time(job: J, sender: ServedRequest) -> J:
    """Return a copy of a job whose caller has the seconds that its request has already taken."""
    spent_s = time.monotonic() - sender.began_s
    return replace(job, caller=replace(job.caller, spent_s=spent_s))
