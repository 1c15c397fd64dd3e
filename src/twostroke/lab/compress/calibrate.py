"""The text that a model is calibrated on: a user's, or its own answers and some documentation."""

from __future__ import annotations

from pydoc_data import topics
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import UsageError
from twostroke.core.options import BatchOptions, CacheOptions, EngineOptions, SpeculationOptions
from twostroke.core.sampling import OPENAI_DEFAULTS
from twostroke.engine.engine import build
from twostroke.lab.measure.compare import held_out_text, pieces_of
from twostroke.lab.train.answers import encode_prompt
from twostroke.lab.train.prompts import prompts

if TYPE_CHECKING:
    from twostroke.engine.generation import Generation
    from twostroke.model.weights import LoadedModel

_PIECE: Final = 512  # tokens that run as one sequence
_LEAST_TOKENS: Final = 1024
_SHARED_CHARACTERS: Final = 200  # a run of the held-out text that calibration text must not have
_DOCUMENTED: Final = 3  # every third token is of documentation
_CONTEXT: Final = 512
_STREAMS: Final = 32  # in a batch
_ANSWER_TOKENS: Final = 160
_TEMPERATURES: Final = (0.7, 1.0)  # in turn


def text_pieces(source: LoadedModel, text: str, num_tokens: int) -> list[list[int]]:
    """Return `num_tokens` tokens of a user's text in pieces.

    Raises:
        UsageError: the text is too short, or has parts of the held-out text.
    """
    held_out = held_out_text()
    for start in range(0, len(held_out) - _SHARED_CHARACTERS, _SHARED_CHARACTERS // 2):
        if held_out[start : start + _SHARED_CHARACTERS] in text:
            message = "The calibration text has parts of the held-out text, which scores the file."
            raise UsageError(message, field="text")
    pieces = pieces_of(text, [str(source.path)], _PIECE, num_tokens)
    found = sum(map(len, pieces))
    if found < _LEAST_TOKENS:
        raise UsageError(
            f"The calibration text has {found} tokens, {_LEAST_TOKENS} are needed.", field="text"
        )
    return pieces


def own_pieces(source: LoadedModel, num_tokens: int) -> list[list[int]]:
    """Return the model's answers to prompts, with these, and some of Python's documentation.

    Answers are most of it: their moments fit other text better than those of documentation. The
    same model gives the same pieces.
    """
    documents = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    path = str(source.path)
    pieces = pieces_of(documents, [path], _PIECE, num_tokens // _DOCUMENTED)
    num_left = num_tokens - sum(map(len, pieces))
    options = EngineOptions(
        cache=CacheOptions(context_length=min(_CONTEXT, source.spec.context_length)),
        batch=BatchOptions(max_running=_STREAMS),
        speculation=SpeculationOptions(method="off"),
    )
    asked: list[tuple[list[int], Generation]] = []
    source.release(source.tensors.values())  # the engine has weights of its own
    with build(path, options) as engine:
        card, num_expected = engine.card, 0
        for number, prompt in enumerate(prompts(0, chat=card.can_chat)):
            if num_expected >= num_left:
                break
            params = replace(
                OPENAI_DEFAULTS,  # to learn from whole distributions
                max_tokens=_ANSWER_TOKENS,
                temperature=_TEMPERATURES[number % len(_TEMPERATURES)],
                seed=number,
                ignore_eos=not prompt.is_chat,
            )
            tokens = encode_prompt(card, prompt)[-card.context_length // 2 :]
            num_expected += len(tokens) + _ANSWER_TOKENS
            asked.append((tokens, engine.client.generate(tokens, params)))
        answered = [[*tokens, *answer.wait()[0].token_ids] for tokens, answer in asked]
    return pieces + answered
