"""POST /infill: writes the text between a prefix and a suffix, as editor plugins request it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.engine.prompts import with_infill_end_ids
from twostroke.model.tokenizer import encode_part
from twostroke.server.body import field
from twostroke.server.protocols.llama_server.completion import LlamaJob, to_job
from twostroke.server.protocols.llama_server.fields import TextFields, num_predict

if TYPE_CHECKING:
    from twostroke.engine.model_card import ModelCard
    from twostroke.model.tokenizer import InfillTokens, Tokenizer
    from twostroke.server.generation.job import EncodedJob, Job
    from twostroke.server.generation.response_store import Tenant

MAX_FILES: Final = 1024
_SUFFIX_DIVISOR: Final = 4  # the suffix gets 1/4 of the prompt, or more if the prefix is short
_ANSWER_DIVISOR: Final = 4  # 1/4 of the context is left for an answer without a limit
_MAX_CHARS_PER_TOKEN: Final = 64  # texts with more characters are cut before they are tokenized
_NUM_MARK_TOKENS: Final = 8  # room for the special tokens and the file's head


class ExtraFile(field.RequestObject):
    """An entry of `input_extra`: another file, or a part of it, as context for the answer."""

    text: str
    filename: str = "tmp"
    time: field.Ignored = None


class InfillRequest(TextFields, kw_only=True):
    """The body of a request to `/infill`: the text before and after an editor's cursor.

    The completed text is `input_prefix`, `prompt`, the answer, `input_suffix`. If the request
    exceeds the context, the first files, the beginning of the prefix and the end of the suffix are
    cut off.
    """

    input_prefix: Annotated[str, field.doc("The text before the cursor's line.")]
    input_suffix: Annotated[str, field.doc("The text after the cursor.")]
    prompt: Annotated[str | None, field.doc("The text of the line before the cursor.")] = None
    input_extra: Annotated[
        list[ExtraFile] | None,
        field.doc("Other files, the least important first.", maxItems=MAX_FILES),
    ] = None


class InfillJob(LlamaJob):
    """The engine job of an `/infill` request.

    Its answers also end at the special token that begins another file.
    """

    def encode(self, card: ModelCard, **defaults: Any) -> EncodedJob:
        """Tokenize the job's prompt, and let its answers end where the model begins another file.

        Raises:
            RequestError: the model cannot fill in the middle.
        """
        encoded = super().encode(card, **defaults)
        encoded.params = with_infill_end_ids(card, encoded.params)
        return encoded


class InfillPrompt(Frozen):
    """The prompt of an infill request, which asks for the text between `prefix` and `suffix`.

    Attributes:
        prefix: the text before the cursor.
        suffix: the text after the cursor.
        files: the names and texts of other files, the least important first.
        limit: the maximum number of tokens of the answer; -1 for no limit.
    """

    prefix: str
    suffix: str
    files: tuple[tuple[str, str], ...]
    limit: int

    def encode(self, card: ModelCard) -> list[int]:
        """Return the prompt's token ids, cut so that the answer fits into the context.

        Raises:
            RequestError: the model has no special tokens for infill.
        """
        tokenizer = card.tokenizer
        marks = tokenizer.infill
        if marks is None:
            reason = "Infill is not supported by {name}, which has no tokens for it: use a model "
            reason += "that has them, such as qwen2.5-coder-1.5b."
            raise RequestError(reason, field="suffix", name=card.name)
        context_length = card.context_length
        if self.limit < 0:
            num_answer = context_length // _ANSWER_DIVISOR
        else:
            num_answer = min(self.limit, context_length // 2)
        room = max(0, context_length - num_answer - _NUM_MARK_TOKENS)
        num_chars = room * _MAX_CHARS_PER_TOKEN
        prefix = self.prefix[max(0, len(self.prefix) - num_chars) :]
        before = encode_part(tokenizer, marks, prefix)
        after = encode_part(tokenizer, marks, self.suffix[:num_chars], continues_text=True)
        after = after[: max(room // _SUFFIX_DIVISOR, room - len(before))]
        before = before[max(0, len(before) + len(after) - room) :]
        extra = self._extra(tokenizer, marks, room - len(before) - len(after))
        start = [*tokenizer.prefix_ids, *extra, marks.prefix, *before]
        return [*start, marks.suffix, *after, marks.middle]

    def _extra(self, tokenizer: Tokenizer, marks: InfillTokens, room: int) -> list[int]:
        """Return the token ids of the other files that fit into `room` tokens.

        Each file's text follows its name. The most important files are chosen first.
        """
        if not self.files:
            return []

        def encode_head(mark: int | None, text: str) -> list[int]:
            return [] if mark is None else [mark, *encode_part(tokenizer, marks, f"{text}\n")]

        head = encode_head(marks.repository, "myproject")
        tail = encode_head(marks.file, "filename")
        room -= len(head) + len(tail)
        ids_of_files: list[list[int]] = []
        for name, text in reversed(self.files):
            if len(name) + len(text) > room * _MAX_CHARS_PER_TOKEN:
                break
            ids = [*encode_head(marks.file, name), *encode_part(tokenizer, marks, text)]
            room -= len(ids)
            if room < 0:
                break
            ids_of_files.insert(0, ids)
        return [*head, *(id_ for ids in ids_of_files for id_ in ids), *tail] if ids_of_files else []


def read(request: InfillRequest, tenant: Tenant) -> Job:
    """Translate the body of an `/infill` request into a job that the engine can run.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    files = request.input_extra or []
    if len(files) > MAX_FILES:
        reason = f"takes at most {MAX_FILES} files, got {len(files)}."
        raise RequestError(reason, field="input_extra")
    gap = InfillPrompt(
        prefix=request.input_prefix + (request.prompt or ""),
        suffix=request.input_suffix,
        files=tuple((file.filename, file.text) for file in files),
        limit=num_predict(request),
    )
    return to_job(request, [gap], tenant=tenant, job_type=InfillJob)
