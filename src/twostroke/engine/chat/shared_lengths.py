"""Finds how much of a conversation's prompt later prompts will share, for recurrent states.

A model with recurrent layers can reuse a prefix only where a snapshot of its state was kept. Later
turns of a chat share less than the whole prompt if the chat template opens an answer in another way
than it renders the finished answer, or leaves out the reasoning of earlier turns. Clients may also
change the last user message, for instance if they add documents to it for one turn only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError
from twostroke.model.tokenizer import Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from twostroke.model.tokenizer import Tokenizer

    Messages = Sequence[Mapping[str, Any]]


def find_shared_lengths(
    tokenizer: Tokenizer,
    prompt: Prompt,
    tokens: Sequence[int],
    messages: Messages,
    render: Callable[[Messages], Prompt],
) -> tuple[int, ...]:
    """Return how many of a prompt's first tokens other prompts of the same chat will share.

    Two variants of the conversation are rendered: with a different last user message, and with
    another turn. Their prompts are compared with `prompt` as texts. To count the tokens of a common
    text, only the text before or after its end is encoded again, whichever is shorter.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the rendered conversation.
        tokens: its token ids.
        messages: the conversation.
        render: renders a conversation as `prompt` was rendered.
    """
    text, lengths = prompt.text, set()
    for other_messages in _other_conversations(messages):
        try:
            other_text = render(other_messages).text
        except TwostrokeError:  # the template accepts no such conversation
            continue
        length = _num_tokens(tokenizer, prompt, tokens, _num_common(text, other_text))
        if 0 < length <= len(tokens):
            lengths.add(length)
    return tuple(sorted(lengths))


def _other_conversations(messages: Messages) -> Iterator[Messages]:
    """Yield variants of a conversation: with another last user message, and with another turn."""
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    if users:
        last = users[-1]
        changed = dict(messages[last]) | {"content": _other_text(messages[last].get("content"))}
        yield [*messages[:last], changed, *messages[last + 1 :]]
    if messages[-1].get("role") != "assistant":
        answer = {"role": "assistant", "content": "Yes."}
        yield [*messages, answer, {"role": "user", "content": "Go on."}]


def _other_text(content: object) -> str:
    """Return a text whose first character differs from the first one of a message's content."""
    first = content
    if isinstance(content, (list, tuple)) and content and isinstance(content[0], dict):
        first = content[0].get("text")
    return "-" if isinstance(first, str) and first.lstrip()[:1] == "." else "."


def _num_tokens(tokenizer: Tokenizer, prompt: Prompt, tokens: Sequence[int], num_chars: int) -> int:
    """Return how many tokens of a prompt lie completely within its first `num_chars` characters."""
    num_all_chars = sum(len(piece.text) for piece in prompt.pieces)
    first_char = first = 0
    if 2 * num_chars >= num_all_chars:
        first_char = _special_token_before(prompt, num_chars)
        first = len(tokens) - len(
            tokenizer.encode_prompt(_slice(prompt, first_char, num_all_chars))
        )
    common = tokenizer.encode_prompt(_slice(prompt, first_char, num_chars))
    return first + _num_common(common, tokens[first : first + len(common)])


def _num_common(values: Sequence[Any], others: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two texts, or of two lists."""
    low, high = 0, min(len(values), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if values[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _special_token_before(prompt: Prompt, num_chars: int) -> int:
    """Return the offset of the end of the last special token that begins within `num_chars`.

    If the token ends after `num_chars` characters, this is the offset of its start instead. No
    token reaches across the offset. 0 if there is no special token.
    """
    boundary = end = 0
    for piece in prompt.pieces:
        start, end = end, end + len(piece.text)
        if piece.special and start <= num_chars:
            boundary = end if end <= num_chars else start
    return boundary


def _slice(prompt: Prompt, first: int, end: int) -> Prompt:
    """Return the part of a prompt between two character offsets; special tokens stay whole."""
    pieces, start = [], 0
    for piece in prompt.pieces:
        low, high = max(first - start, 0), min(end - start, len(piece.text))
        start += len(piece.text)
        if low < high:
            is_whole = piece.special or (low, high) == (0, len(piece.text))
            pieces.append(piece if is_whole else replace(piece, text=piece.text[low:high]))
    return Prompt(tuple(pieces))
