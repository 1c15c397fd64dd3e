"""POST /infill: text between a prefix and a suffix, as llama-server's editor plugins ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from twostroke.core.errors import RequestError
from twostroke.core.frozen import Frozen
from twostroke.engine.prompts import ending_gaps
from twostroke.model.tokenizer import encode_part
from twostroke.server.body import field
from twostroke.server.protocols.llama_server.completion import LlamaJob, to_job
from twostroke.server.protocols.llama_server.fields import TextFields, num_predict

if TYPE_CHECKING:
    from twostroke.engine.model_card import ModelCard
    from twostroke.model.tokenizer import InfillTokens, Tokenizer
    from twostroke.server.generation.job import Encoded, Job
    from twostroke.server.generation.response_store import Tenant

MAX_FILES: Final = 1024
_SUFFIX_SHARE: Final = 4  # the suffix may take 1/4 of the room, or more if the prefix is short
_ANSWER_SHARE: Final = 4  # an answer without a limit is left 1/4 of the context
_MAX_CHARS: Final = 64  # longer texts than so many characters a token are cut first
_NUM_MARKS: Final = 8  # for the special tokens and the head of the file


class ExtraFile(field.RequestObject):
    """A file, or a part of one, that the answer may build on."""

    text: str
    filename: str = "tmp"
    time: field.Ignored = None


class InfillRequest(TextFields, kw_only=True):
    """The body of a request; `input_prefix`, `prompt`, the answer and `input_suffix` are one text.

    What exceeds the context is cut off: the oldest files, then the beginning of the prefix and the
    end of the suffix.
    """

    input_prefix: Annotated[str, field.doc("The text before the cursor's line.")]
    input_suffix: Annotated[str, field.doc("The text after the cursor.")]
    prompt: Annotated[str | None, field.doc("The text of the line before the cursor.")] = None
    input_extra: Annotated[
        list[ExtraFile] | None,
        field.doc("Other files, the least important first.", maxItems=MAX_FILES),
    ] = None


class InfillJob(LlamaJob):
    """A job whose answers also end where another file would begin."""

    def encode(self, card: ModelCard, *, splits_reasoning: bool = True) -> Encoded:
        """Encode the job.

        Raises:
            RequestError: the model cannot fill in the middle.
        """
        encoded = super().encode(card, splits_reasoning=splits_reasoning)
        encoded.params = ending_gaps(card, encoded.params)
        return encoded


class Gap(Frozen):
    """A prompt for the text between `prefix` and `suffix`.

    `files` are texts by name; `limit` are the tokens that the answer may have, -1 for any number.
    """

    prefix: str
    suffix: str
    files: tuple[tuple[str, str], ...]
    limit: int

    def encode(self, card: ModelCard) -> list[int]:
        """Return the token ids, at most as many as leave room for the answer.

        Raises:
            RequestError: the model has no tokens for this.
        """
        tokenizer = card.tokenizer
        marks = tokenizer.infill
        if marks is None:
            reason = "Infill is not supported by {name}, which has no tokens for it: use a model "
            reason += "that has them, such as qwen2.5-coder-1.5b."
            raise RequestError(reason, field="suffix", name=card.name)
        size = card.context_length
        most = size // _ANSWER_SHARE if self.limit < 0 else min(self.limit, size // 2)
        room = max(0, size - most - _NUM_MARKS)
        num_chars = room * _MAX_CHARS
        prefix = self.prefix[max(0, len(self.prefix) - num_chars) :]
        before = encode_part(tokenizer, marks, prefix)
        after = encode_part(tokenizer, marks, self.suffix[:num_chars], goes_on=True)
        after = after[: max(room // _SUFFIX_SHARE, room - len(before))]
        before = before[max(0, len(before) + len(after) - room) :]
        extra = self._extra(tokenizer, marks, room - len(before) - len(after))
        start = [*tokenizer.prefix_ids, *extra, marks.prefix, *before]
        return [*start, marks.suffix, *after, marks.middle]

    def _extra(self, tokenizer: Tokenizer, marks: InfillTokens, room: int) -> list[int]:
        """Return the token ids of the last files that fit, and of the heads around them."""
        if not self.files:
            return []

        def headed(mark: int | None, text: str) -> list[int]:
            return [] if mark is None else [mark, *encode_part(tokenizer, marks, f"{text}\n")]

        head, tail = headed(marks.repository, "myproject"), headed(marks.file, "filename")
        room -= len(head) + len(tail)
        found: list[list[int]] = []
        for name, text in reversed(self.files):
            if len(name) + len(text) > room * _MAX_CHARS:
                break
            ids = [*headed(marks.file, name), *encode_part(tokenizer, marks, text)]
            room -= len(ids)
            if room < 0:
                break
            found.insert(0, ids)
        return [*head, *(id_ for ids in found for id_ in ids), *tail] if found else []


def read(asked: InfillRequest, tenant: Tenant) -> Job:
    """Translate a request.

    Raises:
        RequestError: a value is out of bounds or not supported; `field` names it.
    """
    files = asked.input_extra or []
    if len(files) > MAX_FILES:
        reason = f"takes at most {MAX_FILES} files, got {len(files)}."
        raise RequestError(reason, field="input_extra")
    gap = Gap(
        asked.input_prefix + (asked.prompt or ""),
        asked.input_suffix,
        tuple((file.filename, file.text) for file in files),
        num_predict(asked),
    )
    return to_job(asked, [gap], tenant, InfillJob)
