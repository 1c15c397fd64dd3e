"""The texts that some models write around the text of an answer, such as `<response>`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import regex
from msgspec.structs import replace

from twostroke.core.constraint import ReasoningSection
from twostroke.core.frozen import Frozen
from twostroke.engine.chat.call_reader import BlankTrimmer
from twostroke.engine.structured_output.lark import special_marks
from twostroke.model.tokenizer.preface import ReasoningSplitter, SegmentKind

if TYPE_CHECKING:
    from twostroke.engine.chat.template import ChatTemplate
    from twostroke.model.tokenizer import Tokenizer


class ContentMarks(Frozen):
    """The marks around the text of an answer, such as `<response>` and `</response>`.

    Attributes:
        begin: the mark before the text of the answer, after the reasoning; an answer may lack both
            `begin` and `end`. Empty if the prompt ends with this mark, or if the model writes none.
        end: the mark after the text of the answer, before the tool calls.
        closing: the mark that ends the whole answer; text after it is not part of the answer.
        instructions: texts of the chat template that tell the model to write the marks. If there
            are any, the marks apply only to prompts that have one of these texts.
        has_recipients: whether tool calls follow the name of their function, as a recipient of the
            message (`to=NAME<|message|>`).
    """

    begin: str
    end: str
    closing: str = ""
    instructions: tuple[str, ...] = ()
    has_recipients: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """The marks that the model writes."""
        return tuple(filter(None, (self.begin, self.end, self.closing)))

    def after(
        self,
        prompt: str,
        continued: str,
        *,
        preface: ReasoningSection | None,
        reasoning_end: str,
    ) -> ContentMarks | None:
        """Return the marks in the answer to a prompt; None if the answer has none.

        The prompt may end with the opening mark; then `begin` is empty.

        Args:
            prompt: the text of the prompt.
            continued: the text at the end of the prompt that the answer continues.
            preface: the reasoning section that may begin the answer.
            reasoning_end: the text that closes the model's reasoning; empty without reasoning.
        """
        if self.instructions:
            is_instructed = any(text in prompt for text in self.instructions)
            may_reason = preface is not None or bool(continued.strip())
            if not is_instructed or (self.begin and not may_reason):
                return None
        if continued.strip():
            return self._after_continued(prompt, continued.strip(), preface, reasoning_end)
        is_opened = prompt.rstrip().endswith(self.begin)
        return replace(self, begin="") if is_opened else self

    def _after_continued(
        self, prompt: str, continued: str, preface: ReasoningSection | None, reasoning_end: str
    ) -> ContentMarks | None:
        if preface is not None:  # the answer begins inside the reasoning
            return self
        before = prompt.rstrip().removesuffix(continued).rstrip()
        if self.begin and before.endswith(self.begin):
            return replace(self, begin="")
        _, closed, text = continued.rpartition(reasoning_end) if reasoning_end else ("", "", "")
        text = text.lstrip() if closed else continued
        if not text:
            return self
        is_opened = text.startswith(self.begin) if self.begin else bool(closed)
        return replace(self, begin="") if is_opened and self.end not in text else None


_MARKS: Final = (
    ContentMarks("<|START_RESPONSE|>", "<|END_RESPONSE|>"),  # Command R7B
    ContentMarks(  # Kimi K3
        "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"
    ),
    ContentMarks("<|content|>", "<|end|><|begin|>assistant"),  # Solar
    ContentMarks(  # Muse Glimmer
        "to=user<|message|>", "<|eom|><|start|>assistant", has_recipients=True
    ),
    ContentMarks("<response>", "</response>"),  # Granite 3.3, which names them in its instructions
    ContentMarks("", "[END FINAL RESPONSE]"),  # Apriel 1.5
)


def find_content_marks(
    template: ChatTemplate, before: str, tokenizer: Tokenizer
) -> ContentMarks | None:
    """Return the marks around the text of answers; None if the chat template shows no such marks.

    `before` is the end of a rendered conversation before the text of an answer. Marks that are not
    special tokens, and that the template does not write around answers, count only if the template
    instructs the model to write them.
    """
    for marks in _MARKS:
        if marks.begin and before.endswith(marks.begin):
            return marks
        if not all(mark in template.source for mark in (marks.begin, marks.end)):
            continue
        if all(special_marks((mark,), tokenizer) for mark in marks.texts):
            return marks
        instructions = tuple(
            text.strip() for text in template.texts if marks.begin in text and marks.end in text
        )
        if instructions:
            return replace(marks, instructions=instructions)
    return None


# The recipient of a message with a tool call, at the start of the text outside the marks.
_RECIPIENT: Final = regex.compile(r"\s*+to=[^\s<]{1,200}+<\|message\|>")


class ContentReader:
    """Removes the marks around the text of a streamed answer, and the white space beside them.

    Recipients of messages outside the marks are removed, too.
    """

    def __init__(self, marks: ContentMarks) -> None:
        self._marks = marks
        self._splitter = ReasoningSplitter(ReasoningSection(marks.begin, marks.end))
        closing = ReasoningSection("", marks.closing)
        self._closer = ReasoningSplitter(closing) if marks.closing else None
        self._trim = BlankTrimmer(skips_first=bool(marks.begin))
        self._may_name_recipient = marks.has_recipients
        self._held_recipient = ""  # text that may be the beginning of a recipient

    def feed(self, text: str) -> str:
        """Read more text of an answer; return the text and the calls that are certain now."""
        return self._texts(self._splitter.feed(text))

    def finish(self, *, is_cut: bool) -> str:
        """End the answer; return the rest of its text.

        If the answer `is_cut`, an incomplete mark at its end is dropped.
        """
        [(_, pending_text)] = self._splitter.finish() or [(SegmentKind.AFTER, "")]
        if is_cut and len(pending_text) > 1 and self._is_begun_mark(pending_text):
            pending_text = ""
        text = "" if is_cut else self._held_recipient
        text += self._trim.feed(self._before_closing(pending_text)) + self._trim.finish()
        held_text = self._held_by_closer()
        return text if is_cut and len(held_text) > 1 else text + held_text

    def _is_begun_mark(self, text: str) -> bool:
        return any(mark.startswith(text) for mark in (self._marks.begin, self._marks.end))

    def _texts(self, segments: list[tuple[SegmentKind, str]]) -> str:
        parts: list[str] = []
        for kind, text in segments:
            if kind is SegmentKind.INSIDE:
                parts.append(self._trim.feed(self._before_closing(text)))
            elif kind is SegmentKind.MARK:
                parts.append(self._trim.feed(self._held_by_closer()))
                self._trim = BlankTrimmer(skips_first=True)
            else:
                parts.append(self._before_closing(self._without_recipient(text)))
        return "".join(parts)

    def _without_recipient(self, text: str) -> str:
        """Remove the recipient of a message from the start of text outside the marks."""
        if not self._may_name_recipient:
            return text
        text, self._held_recipient = self._held_recipient + text, ""
        match = _RECIPIENT.match(text, partial=True)
        if match is not None and match.partial:
            self._held_recipient = text
            return ""
        self._may_name_recipient = False
        return text if match is None else text[match.end() :]

    def _before_closing(self, text: str) -> str:
        """Return the text before the closing mark, without an end that may begin this mark."""
        return text if self._closer is None else _inside(self._closer.feed(text))

    def _held_by_closer(self) -> str:
        """Return the text that was held back because it may begin the closing mark."""
        return "" if self._closer is None else _inside(self._closer.finish())


class UnmarkedText:
    """Removes the marks around an answer's text as it arrives, and keeps the reasoning before it.

    The reasoning stays as the model writes it, with its own marks.
    """

    def __init__(self, marks: ContentMarks, preface: ReasoningSection | None) -> None:
        """Start at the beginning of an answer; `preface` delimits its reasoning, if it reasons."""
        self._splitter = None if preface is None else ReasoningSplitter(preface)
        self._reader = ContentReader(marks)
        self._follows_reasoning = False

    def feed(self, text: str) -> str:
        """Read more text of the answer; return the text that is certain now."""
        if self._splitter is None:
            return self._reader.feed(text)
        return "".join(self._visible_text(kind, part) for kind, part in self._splitter.feed(text))

    def finish(self, *, is_cut: bool) -> str:
        """End the answer; return the rest of its text.

        If the answer `is_cut`, an incomplete mark at its end is dropped.
        """
        segments = [] if self._splitter is None else self._splitter.finish()
        rest = "".join(self._visible_text(kind, part) for kind, part in segments)
        return rest + self._below_reasoning(self._reader.finish(is_cut=is_cut))

    def _visible_text(self, kind: SegmentKind, part: str) -> str:
        if kind is SegmentKind.AFTER:
            return self._below_reasoning(self._reader.feed(part))
        self._follows_reasoning = True
        return part

    def _below_reasoning(self, text: str) -> str:
        """Return text of the answer, after a blank line if reasoning was returned before it."""
        if not text or not self._follows_reasoning:
            return text
        self._follows_reasoning = False
        return f"\n\n{text}"


def _inside(segments: list[tuple[SegmentKind, str]]) -> str:
    return "".join(text for kind, text in segments if kind is SegmentKind.INSIDE)
