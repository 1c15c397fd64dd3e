"""The field `__verbose` of OpenAI's responses: the answer in llama-server's own form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from twostroke.core.request import FinishReason
from twostroke.server.protocols.common.timings import final_timings
from twostroke.server.protocols.llama_server.fields import TextFields
from twostroke.server.protocols.llama_server.reply import NO_SLOT, LlamaCompletion
from twostroke.server.protocols.llama_server.settings import settings_of

if TYPE_CHECKING:
    from twostroke.server.generation.events import ChoiceEnded, ChoiceStarted
    from twostroke.server.generation.protocol import ResponseInfo


class Verbose:
    """Makes the `__verbose` field of each answer, if the request has `verbose`."""

    def __init__(self, reply: ResponseInfo) -> None:
        """Describe the answers of `reply`."""
        self._reply = reply
        self._tokens: dict[int, list[int]] = {}  # by choice

    def begin(self, event: ChoiceStarted) -> None:
        """Note that a choice has started."""
        self._tokens[event.choice] = event.tokens

    def body(self, event: ChoiceEnded) -> LlamaCompletion | UnsetType:
        """Return a complete answer with its prompt and special tokens; UNSET if not requested."""
        reply, job = self._reply, self._reply.job
        if not job.is_verbose:
            return UNSET
        tokenizer = reply.tokenizer
        tokens = self._tokens[event.choice]
        usage = event.usage
        if tokens and tokens[-1] in tokenizer.eos_ids:
            tokens = tokens[:-1]
        text = tokenizer.decode(tokens, skip_special=False)
        limit = -1 if job.params.max_tokens is None else job.params.max_tokens
        fields = TextFields(
            n_predict=limit,
            stream=job.stream,
            n_probs=job.params.logprobs,
            timings_per_token=job.llama_timings,
        )
        is_cut = event.reason is FinishReason.LENGTH
        word = event.stop if isinstance(event.stop, str) else ""
        return LlamaCompletion(
            index=event.choice,
            content=text,
            tokens=tokens,
            id_slot=NO_SLOT,
            model=reply.model,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            generation_settings=settings_of(fields, job.params),
            prompt=tokenizer.decode(
                reply.prompts[event.choice // job.params.n], skip_special=False
            ),
            has_new_line="\n" in text,
            truncated=is_cut and usage.completion_tokens != limit,
            stop_type="limit" if is_cut else "word" if word else "eos",
            stopping_word=word,
            tokens_cached=usage.prompt_tokens + usage.completion_tokens,
            timings=final_timings(usage, event.timings),
        )
