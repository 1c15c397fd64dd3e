"""Calibration text: a user's text, or the model's own answers and some documentation."""

from __future__ import annotations

from pydoc_data import topics
from typing import TYPE_CHECKING, Final

from twostroke.core.errors import UsageError
from twostroke.core.message_text import counted_noun
from twostroke.core.options import BatchOptions, CacheOptions, EngineOptions, SpeculationOptions
from twostroke.engine.engine import build
from twostroke.lab.measure.compare import held_out_text, pieces_of
from twostroke.lab.train.answers import answer_params, encode_prompt
from twostroke.lab.train.prompts import prompts

if TYPE_CHECKING:
    from twostroke.engine.generation import Generation
    from twostroke.model.weights import LoadedModel

_PIECE_TOKENS: Final = 512  # tokens of a sequence
_MIN_TOKENS: Final = 1024
_OVERLAP_CHARACTERS: Final = 200  # of the held-out text that calibration text must not contain
_DOCUMENTATION_DIVISOR: Final = 3  # one third of the tokens is documentation
_CONTEXT_TOKENS: Final = 512
_STREAMS: Final = 32
_ANSWER_TOKENS: Final = 160
_TEMPERATURES: Final = (0.7, 1.0)  # alternating


def text_pieces(source: LoadedModel, text: str, num_tokens: int) -> list[list[int]]:
    """Return the first `num_tokens` tokens of a user's calibration text, as sequences.

    Raises:
        UsageError: the text is too short, or contains parts of the held-out text.
    """
    held_out = held_out_text()
    for start in range(0, len(held_out) - _OVERLAP_CHARACTERS, _OVERLAP_CHARACTERS // 2):
        if held_out[start : start + _OVERLAP_CHARACTERS] in text:
            message = "The calibration text has parts of the held-out text, which scores the file."
            raise UsageError(message, field="text")
    pieces = pieces_of(text, [str(source.path)], _PIECE_TOKENS, num_tokens)
    count = sum(map(len, pieces))
    if count < _MIN_TOKENS:
        raise UsageError(
            f"The calibration text has {counted_noun(count, 'token')}, {_MIN_TOKENS} are needed.",
            field="text",
        )
    return pieces


def generated_pieces(source: LoadedModel, num_tokens: int) -> list[list[int]]:
    """Return calibration text: prompts with the model's answers, and some Python documentation.

    The result is token sequences. Most tokens are answers, because the moments of their activations
    predict other text better than documentation does. The same model gives the same sequences.
    """
    documents = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    path = str(source.path)
    pieces = pieces_of(documents, [path], _PIECE_TOKENS, num_tokens // _DOCUMENTATION_DIVISOR)
    num_left = num_tokens - sum(map(len, pieces))
    options = EngineOptions(
        cache=CacheOptions(context_length=min(_CONTEXT_TOKENS, source.spec.context_length)),
        batch=BatchOptions(max_running=_STREAMS),
        speculation=SpeculationOptions(method="off"),
    )
    answers: list[tuple[list[int], Generation]] = []
    source.release(source.tensors.values())  # the engine loads its own weights
    with build(path, options) as engine:
        card, num_expected = engine.card, 0
        for number, prompt in enumerate(prompts(0, chat=card.can_chat)):
            if num_expected >= num_left:
                break
            params = answer_params(
                prompt, number, max_tokens=_ANSWER_TOKENS, temperatures=_TEMPERATURES
            )
            tokens = encode_prompt(card, prompt)[-card.context_length // 2 :]
            num_expected += len(tokens) + _ANSWER_TOKENS
            answers.append((tokens, engine.client.generate(tokens, params)))
        sequences = [[*tokens, *answer.wait()[0].token_ids] for tokens, answer in answers]
    return pieces + sequences
