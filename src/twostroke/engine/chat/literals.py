"""Marks special tokens in a chat template's literals, to tell them from the text of messages."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any, Self

from jinja2 import nodes

from twostroke.engine.chat.messages import ROLES
from twostroke.model.tokenizer import Piece, Prompt
from twostroke.model.tokenizer.specials import AddedToken, AddedTokenSplitter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

# Methods that look for their arguments in a text (`replace` only for the first).
_SEARCHES = {"split", "rsplit", "strip", "lstrip", "rstrip", "partition", "rpartition"}
_SEARCHES |= {"startswith", "endswith", "removeprefix", "removesuffix"}
_SEARCHES |= {"find", "rfind", "index", "rindex", "count", "replace"}


class Marker:
    """Replaces special tokens in a chat template's own text by marks, and finds the marks again.

    Only special tokens that the template itself writes become special tokens of the prompt; the
    same text in a client's message stays text. A mark holds 64 random bits, made when the template
    is compiled, so text from outside cannot contain one.
    """

    def __init__(self, specials: Collection[str], tree: nodes.Template) -> None:
        self._texts = list(dict.fromkeys(specials))
        self._splitter = AddedTokenSplitter(
            AddedToken(index, text, special=True) for index, text in enumerate(self._texts)
        )
        # Noncharacters surround a mark, so that trimming or changing case does not change it.
        self._nonce = f"\ufdd0{secrets.randbits(64):020}"
        self.end = f"{self._nonce}!\ufdd1"  # marks the end of a message's text
        self._compared = {id(node) for node in _compared_literals(tree)}
        glued = dict(self._role_tokens(self._written_literals(tree)))
        self._marks_roles = bool(glued)
        self._glued_by_spelling = glued
        spellings = sorted(map(re.escape, glued), key=len, reverse=True)
        role_marks = [f"{self._nonce}[<>]\ufdd1"] if glued else []
        token_marks = [rf"{self._nonce}(?P<index>\d+)\ufdd1"]
        self._any_mark = re.compile("|".join(token_marks + spellings + role_marks))

    def mark(self, text: str) -> str:
        """Return `text` with a secret mark in place of each special token in it."""
        return "".join(
            part if isinstance(part, str) else f"{self._nonce}{part.id}\ufdd1"
            for part in self._splitter.split(text, parse_special=True)
        )

    def mark_literal(self, node: nodes.Node) -> None:
        """Replace the special tokens in a literal of the template by marks, if it may be written.

        Literals that the template only compares with stay as they are.
        """
        if isinstance(node, nodes.TemplateData):
            node.data = self.mark(node.data)
        elif isinstance(node, nodes.Const) and id(node) not in self._compared:
            node.value = self.mark(node.value) if isinstance(node.value, str) else node.value

    def with_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace the roles of messages by marks, if the template makes special tokens from roles.

        For example, a template may write `'<|' + message['role'] + '|>'`.
        """
        if self._marks_roles:
            for message in messages:
                message["role"] = _Role(message["role"], self._spell_role(message["role"]))
        return messages

    def prompt(self, text: str) -> Prompt:
        """Return a rendered text as a prompt in which the marks have become special tokens."""
        pieces: list[Piece] = []
        plain: list[str] = []
        done = 0
        for match in self._any_mark.finditer(text):
            plain.append(text[done : match.start()])
            done = match.end()
            index = match["index"]
            special = self._texts[int(index)] if index else self._glued_by_spelling.get(match[0])
            if special is not None:
                _flush(pieces, plain)
                pieces.append(Piece(special, special=True))
        plain.append(text[done:])
        _flush(pieces, plain)
        return Prompt(tuple(pieces))

    def _written_literals(self, tree: nodes.Template) -> list[str]:
        """Return the literal texts that the chat template may write into a prompt."""
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        consts = (node for node in tree.find_all(nodes.Const) if id(node) not in self._compared)
        return texts + [node.value for node in consts if isinstance(node.value, str)]

    def _role_tokens(self, written: list[str]) -> Iterable[tuple[str, str]]:
        """Yield special tokens that the chat template makes from a role and literal text around it.

        Each is a pair: the text as it is rendered with a marked role, and the special token.
        """
        for text in self._texts:
            for role in ROLES:
                before, separator, after = text.partition(role)
                if not separator or not (before or after) or any(text in part for part in written):
                    continue
                if all(any(side in part for part in written) for side in (before, after)):
                    yield before + self._spell_role(role) + after, text

    def _spell_role(self, role: str) -> str:
        return f"{self._nonce}<\ufdd1{role}{self._nonce}>\ufdd1"


class _Role(str):  # noqa: SLOT000 (a string cannot have slots with values)
    """A message's role that a template compares as usual, but writes as a secret mark."""

    _spelling: str

    def __new__(cls, role: str, spelling: str) -> Self:
        instance = super().__new__(cls, role)
        instance._spelling = spelling
        return instance

    def __str__(self) -> str:
        return self._spelling

    def __add__(self, other: str) -> str:
        return self._spelling + other

    def __radd__(self, other: str) -> str:
        return other + self._spelling


def _flush(pieces: list[Piece], plain: list[str]) -> None:
    if text := "".join(plain):
        pieces.append(Piece(text))
    plain.clear()


def reads_parts(tree: nodes.Template) -> bool:
    """Whether a chat template loops over the parts of a message's content.

    If not, a message's content must be a string.
    """
    return any(
        _key(node) == "content"
        for loop in tree.find_all(nodes.For)
        for node in (loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Getitem)))
    )


def fold_formatted_texts(tree: nodes.Template) -> list[str]:
    """Replace each text that a chat template formats from literals by a literal; return the texts.

    For example, Hy3's template makes its special tokens in this way: `'<think{}>'.format(SUFFIX)`,
    where a name is set to a literal once. Other calls of `format` stay as they are.
    """
    values: dict[str, list[nodes.Node]] = {}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            values.setdefault(assign.target.name, []).append(assign.node)
    texts: dict[str, str] = {}
    for name, (first, *others) in values.items():
        if not others and isinstance(first, nodes.Const) and isinstance(first.value, str):
            texts[name] = first.value
    folded: list[str] = []
    for parent in [tree, *tree.find_all(nodes.Node)]:
        for field, value in parent.iter_fields():
            if (text := _formatted_text(value, texts)) is not None:
                setattr(parent, field, nodes.Const(text, lineno=parent.lineno))
                folded.append(text)
    return folded


def _formatted_text(node: object, texts: Mapping[str, str]) -> str | None:
    """Return the text of a call such as `'<a{}>'.format(NAME)`; None for any other node.

    `texts` has the values of names.
    """
    if not isinstance(node, nodes.Call) or not isinstance(node.node, nodes.Getattr):
        return None
    text = node.node.node
    if node.node.attr != "format" or not isinstance(text, nodes.Const):
        return None
    if node.kwargs or node.dyn_args or node.dyn_kwargs:
        return None
    arguments = [
        texts.get(argument.name) if isinstance(argument, nodes.Name) else None
        for argument in node.args
    ]
    parts = str(text.value).split("{}")
    if None in arguments or len(parts) != len(arguments) + 1 or "{" in "".join(parts):
        return None
    return parts[0] + "".join(
        f"{argument}{part}" for argument, part in zip(arguments, parts[1:], strict=True)
    )


def names_text(tree: nodes.Template, text: str) -> bool:
    """Whether a chat template has exactly this literal in an expression, such as a role's name."""
    return any(node.value == text for node in tree.find_all(nodes.Const))


def read_texts(tree: nodes.Template) -> tuple[str, ...]:
    """Return all literal texts of a chat template."""
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return tuple(texts)


def read_keys(tree: nodes.Template) -> frozenset[str]:
    """Return the keys that a chat template looks up in objects such as messages."""
    keys = [_key(node) for node in tree.find_all((nodes.Getattr, nodes.Getitem))]
    arguments = (arg for call in tree.find_all(nodes.Call) for arg in call.args[:1])
    keys += [arg.value for arg in arguments if isinstance(arg, nodes.Const)]
    return frozenset(key for key in keys if isinstance(key, str))


def _key(node: nodes.Node) -> object:
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value
    return None


def _compared_literals(tree: nodes.Template) -> Iterator[nodes.Node]:
    """Yield the literals that a chat template only compares with other values, or searches.

    These literals are never written into a prompt.
    """
    for compare in tree.find_all(nodes.Compare):
        for node in (compare.expr, *(operand.expr for operand in compare.ops)):
            yield from node.items if isinstance(node, (nodes.List, nodes.Tuple)) else [node]
    for test in tree.find_all(nodes.Test):
        yield from test.args
    for item in tree.find_all(nodes.Getitem):
        yield item.arg
    for pair in tree.find_all(nodes.Pair):
        yield pair.key
    for apply in tree.find_all(nodes.Filter):
        yield from apply.args[:1] if apply.name == "replace" else ()
    for call in tree.find_all(nodes.Call):
        method = call.node.attr if isinstance(call.node, nodes.Getattr) else ""
        if method in _SEARCHES:
            yield from call.args[:1] if method == "replace" else call.args
