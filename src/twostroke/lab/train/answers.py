"""Generates a model's answers with their hidden states, to train heads or a smaller model."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core.errors import UsageError
from twostroke.core.files import read_regular_file
from twostroke.core.message_text import counted_noun
from twostroke.core.options import BatchOptions, CacheOptions, EngineOptions, SpeculationOptions
from twostroke.core.sampling import OPENAI_DEFAULTS
from twostroke.engine.engine import build
from twostroke.engine.prompts import encode_chat, encode_text
from twostroke.lab.train.prompts import TrainingPrompt, prompts
from twostroke.lab.train.record import AnswerStore, RecordedAnswer, Recorder, load_answers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.core.sampling import SamplingParams
    from twostroke.engine.engine import Engine
    from twostroke.engine.generation import Generation
    from twostroke.engine.model_card import ModelCard
    from twostroke.lab.train.options import LearnOptions
    from twostroke.model.families.spec import ModelSpec

    Report = Callable[[str], None]

_STREAMS = 48
_ANSWER_TOKENS = 200
_PROMPT_TOKENS = 600
_CONTEXT_LENGTH = 1024
_NUM_REPORTS = 50
_TEMPERATURES = (0.0, 0.0, 0.7)  # in rotation


def collect(
    model: str, spec: ModelSpec, folder: Path, options: LearnOptions, report: Report
) -> list[RecordedAnswer]:
    """Return a model's answers to training prompts, with `options.num_tokens` tokens in all.

    They are generated, and written to `folder` as they arrive, so that an interrupted run can
    continue. `spec` is the specification of `model`.

    Raises:
        UsageError: the file of prompts is missing, or has too few prompts.
        TwostrokeError: the model cannot be loaded, or the disk is full.
    """
    answers = load_answers(folder, spec.hidden_size)
    if sum(map(len, answers)) >= options.num_tokens:
        return answers
    cache = CacheOptions(context_length=min(_CONTEXT_LENGTH, spec.context_length))
    batch = BatchOptions(max_running=_STREAMS)
    engine_options = EngineOptions(
        cache=cache, batch=batch, speculation=SpeculationOptions(method="off")
    )
    store = AnswerStore(folder, len(answers))
    # The engine's thread appends here: writing in the watcher would hide errors.
    finished = deque[RecordedAnswer]()
    with build(model, engine_options, watcher=Recorder(finished.append)) as engine:
        training_prompts = _prompts(options, has_chat=engine.card.can_chat)
        num_before = num_reported = sum(map(len, answers))
        for _ in _generate(engine, training_prompts, len(answers)):
            store.take(finished)
            num_rows = num_before + store.num_rows
            is_done = num_rows >= options.num_tokens
            if is_done or (num_rows - num_reported) * _NUM_REPORTS >= options.num_tokens:
                num_reported = num_rows
                report(
                    f"answers: {num_rows:,} of "
                    f"{counted_noun(options.num_tokens, 'token', form=',')}"
                )
            if is_done:
                break
    store.take(finished)
    store.flush()
    answers = load_answers(folder, spec.hidden_size)
    if sum(map(len, answers)) < options.num_tokens:
        raise UsageError(
            f"{options.data} has too few prompts for "
            f"{counted_noun(options.num_tokens, 'token', form=',')} of answers: add some, or lower "
            "--tokens."
        )
    return answers


def _prompts(options: LearnOptions, *, has_chat: bool) -> Iterator[TrainingPrompt]:
    """Yield training prompts: the built-in prompts, or the prompts in a user's file.

    Each line of the file is a question, or {"prompt": "a text"}.
    """
    if options.data == "self":
        return prompts(options.seed, chat=has_chat)
    path = Path(options.data)
    try:
        lines = read_regular_file(path).decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--data {path} cannot be read: {reason}.") from None
    file_prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not line.startswith("{"):
            file_prompts.append(TrainingPrompt(line, has_chat))
            continue
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, KeyError):
            text = None
        if not isinstance(text, str):
            raise UsageError(f'--data {path}: line {number} is not an object with a "prompt".')
        file_prompts.append(TrainingPrompt(text, is_chat=False))
    if not file_prompts:
        raise UsageError(f"--data {path} has no prompts.")
    return iter(file_prompts)


def _generate(
    engine: Engine, training_prompts: Iterator[TrainingPrompt], first: int
) -> Iterator[None]:
    """Let the engine answer training prompts, several at once; yield after each answer.

    The first `first` prompts are skipped, because an earlier run has their answers.
    """
    waiting: deque[Generation] = deque()
    try:
        for number, prompt in enumerate(training_prompts):
            if number < first:
                continue
            params = answer_params(
                prompt, number, max_tokens=_ANSWER_TOKENS, temperatures=_TEMPERATURES
            )
            tokens = encode_prompt(engine.card, prompt)
            tokens = tokens[-min(_PROMPT_TOKENS, engine.card.context_length // 2) :]
            waiting.append(engine.client.generate(tokens, params))
            if len(waiting) > _STREAMS:
                waiting.popleft().wait()
                yield
        while waiting:
            waiting.popleft().wait()
            yield
    finally:
        for generation in waiting:
            generation.cancel()


def answer_params(
    prompt: TrainingPrompt, number: int, *, max_tokens: int, temperatures: Sequence[float]
) -> SamplingParams:
    """Return the sampling parameters of the answer to training prompt number `number`.

    Tokens are sampled from the whole distribution. Successive prompts get the temperatures in turn.
    """
    return replace(
        OPENAI_DEFAULTS,
        max_tokens=max_tokens,
        temperature=temperatures[number % len(temperatures)],
        seed=number,
        ignore_eos=not prompt.is_chat,
    )


def encode_prompt(card: ModelCard, prompt: TrainingPrompt) -> list[int]:
    """Return the token ids of a training prompt; a chat prompt is rendered as a user's message."""
    if prompt.is_chat:
        return encode_chat(card, [{"role": "user", "content": prompt.text}])
    return encode_text(card, prompt.text)
