"""Chat templates: render messages into a prompt, in which only the template has special tokens."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from twostroke.core.errors import ModelFormatError, RequestError, TwostrokeError
from twostroke.core.message_text import counted_noun
from twostroke.engine.chat.literals import (
    Marker,
    fold_formatted_texts,
    names_text,
    read_keys,
    read_texts,
    reads_parts,
)
from twostroke.engine.chat.messages import RefusedByTemplateError, check_messages, to_plain_json
from twostroke.engine.chat.sandbox import METER, RenderBudget, RenderMeter, TemplateEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from twostroke.model.tokenizer import Prompt, Tokenizer

_MAX_SOURCE_CHARS = 64 * 1024


class ChatTemplate:
    """A compiled chat template (a Jinja source as Hugging Face defines it).

    Special tokens and text are told apart by their origin. When the template is compiled, special
    tokens in the literals that it writes become marks that clients cannot guess; after rendering,
    marks become the special pieces of the `Prompt`, and all other text is plain, whatever the
    template did to it (trimmed, split, joined). Literals that the template only compares or
    searches for stay as they are, so that tests such as `'</think>' in message.content` still work.
    A special token made from a role (`'<|' + message['role'] + '|>'`) works too: roles are replaced
    by marks, too.

    `variables` are the names of variables that the template reads, `keys` the names that it looks
    up in objects such as messages. `reads_parts` says whether the template reads content that is
    a list of parts, `names_developer` whether it has a case for the role developer.
    `formatted_texts` are texts that it makes from literals, such as special tokens with a suffix.
    `texts` are all of its literal texts.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer | None = None,
        *,
        budget: RenderBudget | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile a template's source.

        `tokenizer` has the special tokens, `bos_token` and the like; without a tokenizer, no text
        is a special token. `now` is the clock of `strftime_now`.

        Raises:
            ModelFormatError: the source is not a template.
        """
        if len(source) > _MAX_SOURCE_CHARS:
            raise ModelFormatError(
                f"The chat template has {counted_noun(len(source), 'character', form=',')}; "
                f"{_MAX_SOURCE_CHARS:,} are allowed."
            )
        self.source = source
        self._budget = budget or RenderBudget()
        self._now = now
        self._environment = TemplateEnvironment(
            {"raise_exception": _refuse, "strftime_now": self._strftime_now}
        )
        try:
            tree = self._environment.parse(source)
            self.formatted_texts = fold_formatted_texts(tree)
            self.reads_parts = reads_parts(tree)
            self.texts = read_texts(tree)
            self.names_developer = names_text(tree, "developer")
            self.variables = frozenset(find_undeclared_variables(tree))
            self.keys = read_keys(tree)
            self._marker = Marker(tokenizer.special_texts() if tokenizer else (), tree)
            self._template = self._environment.guarded(tree, self._marker.mark_literal)
        except TemplateSyntaxError as error:
            raise ModelFormatError(
                f"The chat template is not valid (line {error.lineno}): {error.message}"
            ) from error
        except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise ModelFormatError(
                f"The chat template cannot be compiled ({type(error).__name__})."
            ) from error
        named = tokenizer.named_texts if tokenizer else {}
        self._variables: dict[str, Any] = {
            name: self._marker.mark(text) for name, text in named.items()
        }
        if tokenizer and tokenizer.additional_texts:
            additional = [self._marker.mark(text) for text in tokenizer.additional_texts]
            self._variables["additional_special_tokens"] = additional

    @classmethod
    def for_tokenizer(
        cls, tokenizer: Tokenizer, *, name: str = "default", budget: RenderBudget | None = None
    ) -> ChatTemplate:
        """Return the template with this name in the model's files.

        A model without a template gets ChatML if its vocabulary has the marks of ChatML.

        Raises:
            RequestError: the model has no template.
        """
        source = find_source(tokenizer, name)
        if source is None:
            raise RequestError(
                "This model has no chat template, so it cannot chat; "
                "use completions with a plain prompt."
            )
        return cls(source, tokenizer, budget=budget)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        has_text_arguments: bool = False,
        extra_variables: Mapping[str, object] | None = None,
    ) -> Prompt:
        """Return the prompt for a conversation; `Tokenizer.encode_prompt` makes its token ids.

        With `continue_final_message` the prompt ends where the last message's text ends, so that
        the answer continues it; there is no generation prompt then. `tools` are JSON schemas of
        functions. `extra_variables` are further variables of the template, such as
        `enable_thinking`. Arguments of calls are objects, or with `has_text_arguments` as they
        were given.

        Raises:
            RequestError: messages are not well formed, or the template refuses them.
            BudgetError: the template takes too much time or space.
        """
        variables: dict[str, Any] = deepcopy(self._variables)  # the template may change its values
        reserved = {
            *variables,
            "messages",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
        }
        for name, value in (extra_variables or {}).items():
            if name in reserved or name in self._environment.globals:
                raise RequestError("is a name that the chat template itself uses.", field=name)
            variables[name] = to_plain_json(value, name)
        variables.setdefault("documents", None)  # transformers defines it as None
        plain_tools = None if tools is None else to_plain_json(list(tools), "tools")
        reads_date = "datetime" in self.variables
        # firefunction reads tools as JSON, and the date; other templates ask whether there are any
        if "functions" in self.variables and (tools or reads_date):
            functions = [tool.get("function") for tool in plain_tools or ()]
            variables.setdefault("functions", json.dumps(functions, ensure_ascii=False, indent=4))
            variables.setdefault("datetime", self._strftime_now("%Y-%m-%d"))
        checked = check_messages(
            messages, keep_parts=self.reads_parts, has_text_arguments=has_text_arguments
        )
        if continue_final_message:
            self._mark_end(checked[-1])
        variables["messages"] = self._marker.with_roles(checked)
        variables["tools"] = plain_tools
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        meter = RenderMeter(self._budget)
        text = self._run({**variables, METER: meter})
        meter.weigh(text)
        return self._marker.prompt(self._until_end(text) if continue_final_message else text)

    def _mark_end(self, message: dict[str, Any]) -> None:
        parts = message["content"]
        if isinstance(parts, list) and parts and not message.get("tool_calls"):
            parts[-1]["text"] += self._marker.end
            return
        if not isinstance(parts, str) or message.get("tool_calls"):
            reason = "must end with a message of text without tool calls, if it is to be continued."
            raise RequestError(reason, field="messages")
        message["content"] += self._marker.end

    def _until_end(self, text: str) -> str:
        before, mark, after = text.partition(self._marker.end)
        if not mark or self._marker.end in after:
            raise RequestError(
                "The last message cannot be continued, because the chat template changes it: end "
                "with a user message.",
                field="messages",
            )
        return before

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            return "".join(self._template.root_render_func(self._template.new_context(variables)))
        except TwostrokeError:
            raise
        except RecursionError as error:
            reason = "The chat template calls itself too deeply."
            raise RefusedByTemplateError(reason, field="messages") from error
        except Exception as error:  # a template is foreign code: it can fail in any way
            raise RefusedByTemplateError(self._complaint(error), field="messages") from error

    def _complaint(self, error: Exception) -> str:
        text = " ".join(self._marker.prompt(str(error)).text.split())[:300]
        if isinstance(error, TemplateError):
            return f"The chat template refuses these messages: {text}"
        return f"The chat template failed on these messages: {type(error).__name__}: {text}"

    def _strftime_now(self, form: str) -> str:
        if len(form) > 100 or re.search(r"\d{3}", form):
            raise RequestError("The chat template's date format is too long.")
        return self._now().strftime(form)


def _refuse(message: object = "") -> None:
    raise TemplateError(str(message))


DEFAULT: Final = "default"  # transformers' name of the main template
FOR_TOOLS: Final = "tool_use"

_CHATML_MARKS: Final = frozenset(("<|im_start|>", "<|im_end|>"))
_CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def find_source(tokenizer: Tokenizer, name: str = DEFAULT) -> str | None:
    """Return the source of the model's template with this name; None if there is none.

    If the model has no default template, its first template replaces it. If the model has no
    template at all, but its vocabulary has the marks of ChatML, the default is ChatML.
    """
    sources = {key: text for key, text in tokenizer.chat_templates.items() if text.strip()}
    if name in sources or name != DEFAULT:
        return sources.get(name)
    if sources:
        return next(iter(sources.values()))
    return _CHATML if set(tokenizer.special_texts()) >= _CHATML_MARKS else None
