"""Responses of /completion and /infill: a complete response, or a stream of chunks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from twostroke.core.json_io import encode_json
from twostroke.core.request import FinishReason
from twostroke.server.generation import events
from twostroke.server.http.error_forms import LLAMA_SERVER
from twostroke.server.http.responses import sse
from twostroke.server.protocols.common.llama_completion import (
    NO_SLOT,
    GenerationSettings,
    LikelyToken,
    LlamaCompletion,
    ScoredToken,
)
from twostroke.server.protocols.common.timings import (
    LlamaTimings,
    PromptProgress,
    final_timings,
    llama_timings,
    to_progress,
)
from twostroke.server.protocols.llama_server.completion import LlamaJob
from twostroke.server.protocols.llama_server.fields import generation_settings, num_predict
from twostroke.server.protocols.llama_server.post_sampling import sampled_probabilities

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twostroke.core.step import TokenLogprobs
    from twostroke.model.tokenizer import Tokenizer
    from twostroke.server.generation.protocol import ResponseInfo


class LlamaPiece(msgspec.Struct, kw_only=True, frozen=True):
    """A chunk of a streamed answer: the next text and tokens. Tokens may come before their text."""

    index: int
    content: str
    tokens: list[int]
    stop: Annotated[bool, Meta(extra_json_schema={"const": False})] = False
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    timings: LlamaTimings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    completion_probabilities: list[ScoredToken] | UnsetType = UNSET


class _SentAnswer:
    """One answer while the response is written: its text so far, and how many tokens were sent."""

    def __init__(self, event: events.ChoiceStarted, started_s: float) -> None:
        self.tokens = event.tokens
        self.usage = event.usage
        self.prompt_s = time.monotonic() - started_s
        self.answer_started_s = time.monotonic()
        self.texts: list[str] = []
        self.scored: list[ScoredToken] = []
        self.num_sent = 0

    def read(self, event: events.PrefillAdvanced, elapsed_s: float) -> None:
        """Note how far prefill of the answer's prompt is, `elapsed_s` after the request started."""
        self.usage = event.usage
        self.prompt_s = elapsed_s
        self.answer_started_s = time.monotonic()

    def take_tokens(self) -> list[int]:
        """Return the answer's tokens that no chunk has sent yet, and count them as sent."""
        tokens = self.tokens[self.num_sent :]
        self.num_sent += len(tokens)
        return tokens


class LlamaEncoder:
    """Encodes the answers to a `/completion` or `/infill` request, as a stream or as one response.

    The last event of each answer has its settings and counts.
    """

    def __init__(self, info: ResponseInfo) -> None:
        """Prepare to encode one response; `info` has its id, model and job."""
        assert isinstance(info.job, LlamaJob)
        self._info = info
        self._request = info.job.request
        self._settings = generation_settings(info.job.request, info.job.params)
        # For `n_predict` 0 the engine generates one token, which is not sent.
        self._hides_answer = num_predict(info.job.request) == 0
        self._id_slot = NO_SLOT if self._request.id_slot is None else self._request.id_slot
        self._started_s = time.monotonic()
        self._answers: dict[int, _SentAnswer] = {}  # by choice

    def write(self, event: events.Event) -> bytes:
        """Return the chunks for one event of the answers, as server-sent events; may be empty."""
        match event:
            case events.ChoiceStarted():
                self._answers[event.choice] = _SentAnswer(event, self._started_s)
            case events.PrefillAdvanced():
                elapsed_s = time.monotonic() - self._started_s
                self._answers[event.choice].read(event, elapsed_s)
                return self._write(event.choice, "", [], progress=to_progress(event, elapsed_s))
            case events.ContentAdded():
                scored = self._add(event)
                if self._hides_answer:
                    return b""
                return self._write_added(event, scored)
            case events.ChoiceEnded():
                rest = self._answers[event.choice].take_tokens()
                unsent = b""
                if rest and not self._hides_answer:
                    unsent = self._write(event.choice, "", rest)
                last = replace(self._end(event), content="", tokens=[])
                last = replace(last, completion_probabilities=UNSET)
                return unsent + sse(encode_json(self._select_fields(last)))
            case events.StreamFailed():
                return sse(LLAMA_SERVER.body(event.error, event.request_id, str))
        return b""

    def whole_response(self, stream: Iterable[events.Event]) -> Any:
        """Return the response to a request without a stream, from all events of the answers.

        The response is one answer, or a list of several answers.
        """
        responses = []
        for event in stream:
            match event:
                case events.ChoiceStarted():
                    self._answers[event.choice] = _SentAnswer(event, self._started_s)
                case events.ContentAdded():
                    self._add(event)
                case events.ChoiceEnded():
                    responses.append(self._select_fields(self._end(event)))
        return responses if self._info.job.num_choices > 1 else responses[0]

    def _add(self, event: events.ContentAdded) -> list[ScoredToken]:
        """Add an event's text to its answer; return the event's tokens with their probabilities."""
        answer = self._answers[event.block.choice]
        answer.texts.append(event.text)
        scored = [self._scored(token, scores) for token, scores in event.scored]
        answer.scored += scored
        return scored

    def _scored(self, token: int, scores: TokenLogprobs) -> ScoredToken:
        """Return one token of an answer with its probability and the likeliest alternatives."""
        tokenizer = self._info.tokenizer
        request = self._request
        if request.post_sampling_probs:
            sampled = sampled_probabilities(self._info.job.params, token, scores)
            likely = [
                LikelyToken(**_token_fields(tokenizer, other), prob=prob)
                for other, prob in sampled[: request.n_probs]
            ]
            prob = dict(sampled).get(token, 0.0)
            return ScoredToken(**_token_fields(tokenizer, token), prob=prob, top_probs=likely)
        likely = [
            LikelyToken(**_token_fields(tokenizer, other), logprob=logprob)
            for other, logprob in zip(scores.top_ids, scores.top_logprobs, strict=True)
        ]
        spelled = _token_fields(tokenizer, token)
        return ScoredToken(**spelled, logprob=scores.logprob, top_logprobs=likely)

    def _write_added(self, event: events.ContentAdded, scored: list[ScoredToken]) -> bytes:
        """Return the chunks that send an event's text.

        With log-probabilities, there is a chunk for each token, as in llama-server.
        """
        choice = event.block.choice
        text = event.text
        tokens = self._answers[choice].take_tokens()
        chunks = b""
        while len(scored) > 1:
            first, *scored = scored
            token_text = first.token if text.startswith(first.token) else ""
            text = text.removeprefix(token_text)
            chunks += self._write(choice, token_text, tokens[:1], [first])
            tokens = tokens[1:]
        return chunks + self._write(choice, text, tokens, scored)

    def _write(
        self,
        choice: int,
        text: str,
        tokens: list[int],
        scored: Sequence[ScoredToken] = (),
        *,
        progress: PromptProgress | UnsetType = UNSET,
    ) -> bytes:
        """Return one chunk of an answer, with more text or tokens, or with prefill progress."""
        answer = self._answers[choice]
        piece = LlamaPiece(
            index=choice,
            content=text,
            tokens=tokens,
            id_slot=self._id_slot,
            tokens_predicted=answer.num_sent,
            tokens_evaluated=self._num_prompt(choice),
            timings=self._timings(answer) if self._request.timings_per_token else UNSET,
            prompt_progress=progress,
            completion_probabilities=[*scored] or UNSET,
        )
        return sse(encode_json(piece))

    def _timings(self, answer: _SentAnswer) -> LlamaTimings | UnsetType:
        """Return an answer's durations so far, measured by the server process.

        Returns UNSET, which leaves the field out, if the engine has not reported the prompt's
        usage.
        """
        if answer.usage is None:
            return UNSET
        usage = replace(answer.usage, completion_tokens=len(answer.tokens))
        return llama_timings(usage, answer.prompt_s, time.monotonic() - answer.answer_started_s)

    def _end(self, event: events.ChoiceEnded) -> LlamaCompletion:
        """Build the complete answer in llama-server's form when the answer has ended."""
        info = self._info
        answer = self._answers[event.choice]
        usage = event.usage
        if self._hides_answer:
            answer.texts = []
            answer.tokens = []
            answer.scored = []
            usage = replace(usage, completion_tokens=0)
        prompt = info.prompts[event.choice // info.job.params.n]
        num_tokens = usage.prompt_tokens + usage.completion_tokens
        is_cut = event.reason is FinishReason.LENGTH
        word = event.stop if isinstance(event.stop, str) else ""
        text = "".join(answer.texts)
        return LlamaCompletion(
            index=event.choice,
            content=text,
            tokens=answer.tokens if self._request.return_tokens else [],
            id_slot=self._id_slot,
            model=info.model,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            generation_settings=self._settings,
            prompt=info.tokenizer.decode(prompt, skip_special=False),
            has_new_line="\n" in text,
            truncated=is_cut and usage.completion_tokens != self._settings.n_predict,
            stop_type="limit" if is_cut or self._hides_answer else "word" if word else "eos",
            stopping_word=word,
            tokens_cached=num_tokens,
            timings=final_timings(usage, event.timings),
            completion_probabilities=answer.scored or UNSET,
            schema_miss=event.schema_miss or UNSET,
        )

    def _select_fields(self, answer: LlamaCompletion) -> LlamaCompletion | dict[str, Any]:
        """Return a complete answer, or only the fields named by the request's `response_fields`."""
        if not self._request.response_fields:
            return answer
        fields: dict[str, Any] = {}
        for path in self._request.response_fields:
            value: Any = answer
            for name in path.split("/", _MAX_PATH_SPLITS):
                is_field = (
                    isinstance(value, _SELECTABLE_STRUCTS) and name in value.__struct_fields__
                )
                value = getattr(value, name) if is_field else UNSET
            if value is not UNSET:
                fields[path] = value
        return fields

    def _num_prompt(self, choice: int) -> int:
        return len(self._info.prompts[choice // self._info.job.params.n])


# The structs inside an answer whose fields `response_fields` can select, and their depth.
_SELECTABLE_STRUCTS = (LlamaCompletion, GenerationSettings, LlamaTimings)
_MAX_PATH_SPLITS = 2


def _token_fields(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"id": token, "token": data.decode(errors="ignore"), "bytes": list(data)}
