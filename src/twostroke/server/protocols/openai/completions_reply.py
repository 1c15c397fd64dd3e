"""OpenAI's text completions: a complete response, or a stream of chunks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from twostroke.core.json_io import encode_json
from twostroke.server.generation import events
from twostroke.server.generation.events import SchemaMiss
from twostroke.server.http.responses import sse
from twostroke.server.models.about import FINGERPRINT
from twostroke.server.protocols.common.llama_completion import LlamaCompletion, VerboseAnswers
from twostroke.server.protocols.common.logprobs import CompletionLogprobs, CompletionScorer
from twostroke.server.protocols.common.timings import LlamaTimings, PromptProgress, to_progress
from twostroke.server.protocols.common.usage import (
    RunningUsage,
    TimingsBody,
    UsageBody,
    fail_stream,
    finish_reason,
    finish_stream,
    requested_timings,
    timings_body,
    usage_body,
)
from twostroke.server.protocols.openai.token_ids import PromptLogprobs, TokenIds, to_prompt_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.core.step import TokenLogprobs
    from twostroke.server.generation.protocol import ResponseInfo


class CompletionChoice(msgspec.Struct):
    """An entry of `choices` in a text completion: one answer, or an addition to it in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Annotated[
        str | None, Meta(extra_json_schema={"enum": ["stop", "length", None]})
    ] = None
    timings: TimingsBody | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    schema_miss: SchemaMiss = UNSET


class CompletionBody(msgspec.Struct):
    """The response to a completion request: the complete completion, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    system_fingerprint: str = FINGERPRINT
    timings: LlamaTimings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    verbose: LlamaCompletion | UnsetType = msgspec.field(default=UNSET, name="__verbose")


class CompletionEncoder:
    """Encodes the answers to a completion request, as a stream of chunks or as one response.

    The last chunk of each answer has the finish reason.
    """

    def __init__(self, info: ResponseInfo) -> None:
        """Prepare to encode one response; `info` has its id, model and job.

        One body object is reused for all events of a stream, to save time.
        """
        self._info = info
        self._choice = CompletionChoice(index=0, text="")
        self._body = CompletionBody(
            id=info.id,
            object="text_completion",
            created=info.created_s,
            model=info.model,
            choices=[self._choice],
            usage=None if info.job.include_usage else UNSET,
            service_tier=info.job.caller.service_tier if info.job.tier else UNSET,
        )
        self._started_s = time.monotonic()
        self._usage = RunningUsage(info.job)
        self._ids = TokenIds(info.job)
        self._prompt_scores: dict[int, list[TokenLogprobs | None]] = {}  # by choice
        self._timings: LlamaTimings | UnsetType = UNSET  # of the newest complete answer
        self._verbose = VerboseAnswers(info)
        self._scorers: dict[
            int, CompletionScorer
        ] = {}  # by choice; empty without log-probabilities

    def write(self, event: events.Event) -> bytes:
        """Return the chunks for one event of the answers, as server-sent events; may be empty."""
        match event:
            case events.ContentAdded():
                if event.scored:
                    self._score(event)
                return self._write(event.block.choice, event.text)
            case events.ChoiceStarted():
                self._usage.begin(event)
                text = self._begin(event)
                if self._ids.is_reported:
                    self._choice.prompt_token_ids = self._prompt_tokens(event.choice)
                data = self._write(event.choice, text) if text or self._ids.is_reported else b""
                self._choice.prompt_token_ids = UNSET
                return data
            case events.PrefillAdvanced():
                elapsed_s = time.monotonic() - self._started_s
                self._body.prompt_progress = to_progress(event, elapsed_s)
                data = self._write(event.choice, "")
                self._body.prompt_progress = UNSET
                return data
            case events.PromptScored():
                self._score(event)
            case events.ChoiceEnded():
                return self._end(event)
            case events.AnswerFinished():
                self._body.timings = self._timings
                return finish_stream(self._body, event)
            case events.StreamFailed():
                return fail_stream(event)
        return b""

    def whole_response(self, stream: Iterable[events.Event]) -> CompletionBody:
        """Return the response to a request without a stream, from all events of the answers."""
        choices: list[CompletionChoice] = []
        for event in stream:
            match event:
                case events.ChoiceStarted():
                    choices.append(CompletionChoice(index=event.choice, text=self._begin(event)))
                case events.ContentAdded():
                    self._score(event)
                    choices[-1].text += event.text
                case events.PromptScored():
                    self._score(event)
                case events.ChoiceEnded():
                    if scorer := self._scorers.get(event.choice):
                        choices[-1].logprobs = scorer.take()
                    self._add_reports(choices[-1])
                    self._finish(choices[-1], event)
                    self._body.verbose = self._body.verbose or self._verbose.body(event)
                case events.AnswerFinished():
                    self._body.usage = usage_body(event.usage)
        self._body.choices = choices
        self._body.timings = self._timings
        return self._body

    def _begin(self, event: events.ChoiceStarted) -> str:
        """Begin an answer, and return the text to send before the answer's own text.

        The text is the prompt if the request sets `echo`, else empty.
        """
        info = self._info
        choice = event.choice
        tokens: list[int] = []
        text = ""
        self._ids.begin(event)
        self._verbose.begin(event)
        if info.job.echo:
            prompt_index = choice // info.job.params.n
            prompt = info.job.prompts[prompt_index]
            tokens = list(info.prompts[prompt_index])
            assert isinstance(prompt, str | list)
            text = prompt if isinstance(prompt, str) else info.tokenizer.decode(prompt)
        if info.has_logprobs:
            as_ids = info.job.tokens_as_ids
            self._scorers[choice] = CompletionScorer(
                info.tokenizer, echoed=tokens, text=text, as_ids=as_ids
            )
        return text

    def _prompt_tokens(self, choice: int) -> list[int]:
        return list(self._info.prompts[choice // self._info.job.params.n])

    def _add_reports(self, choice: CompletionChoice) -> None:
        """Add the requested token ids and prompt log-probabilities to a complete answer."""
        index = choice.index
        choice.token_ids = self._ids.take(index)
        if self._ids.is_reported:
            choice.prompt_token_ids = self._prompt_tokens(index)
        if self._info.job.prompt_scores:
            scores = self._prompt_scores.get(index, [])
            tokens = self._prompt_tokens(index)
            choice.prompt_logprobs = to_prompt_logprobs(self._info.tokenizer, tokens, scores)

    def _score(self, event: events.ContentAdded | events.PromptScored) -> None:
        if isinstance(event, events.PromptScored) and self._info.job.prompt_scores:
            self._prompt_scores.setdefault(event.choice, []).extend(event.logprobs)
        elif isinstance(event, events.PromptScored):
            self._scorers[event.choice].add_prompt(event.logprobs)
        elif event.scored:
            self._scorers[event.block.choice].add(event.scored)

    def _write(self, index: int, text: str) -> bytes:
        """Return a chunk that adds text to the answer `index`."""
        choice = self._choice
        choice.index = index
        choice.text = text
        choice.logprobs = self._scorers[index].take() if self._scorers else None
        if self._usage.is_reported:
            self._body.usage = self._usage.body(index)
        choice.token_ids = self._ids.take(index)
        return sse(encode_json(self._body))

    def _end(self, event: events.ChoiceEnded) -> bytes:
        """Return the last chunk of an answer, with its finish reason."""
        choice = self._choice
        scorer = self._scorers.get(event.choice)
        choice.index = event.choice
        choice.text = ""
        choice.logprobs = scorer.take() if scorer is not None and scorer.has_news else None
        choice.token_ids = self._ids.take(event.choice)
        self._finish(choice, event)
        self._body.timings = self._timings
        self._body.verbose = self._verbose.body(event)
        if self._usage.is_reported:
            self._body.usage = usage_body(event.usage)
        data = sse(encode_json(self._body))
        choice.finish_reason = None
        choice.timings = self._body.timings = UNSET
        choice.schema_miss = self._body.verbose = UNSET
        return data

    def _finish(self, choice: CompletionChoice, event: events.ChoiceEnded) -> None:
        choice.finish_reason = finish_reason(event.reason)
        choice.schema_miss = event.schema_miss or UNSET
        self._timings = requested_timings(self._info.job, event)
        if self._info.job.timings:
            choice.timings = timings_body(event.usage, event.timings)
