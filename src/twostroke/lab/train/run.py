"""Trains draft heads for a model in a folder; an interrupted training can continue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict, replace

from twostroke.core.errors import UsageError
from twostroke.core.frozen import Frozen
from twostroke.lab.train.answers import collect
from twostroke.lab.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from twostroke.lab.train.descent import Descent, train
from twostroke.lab.train.learn import HeadTrainer
from twostroke.lab.train.lesson import HeadTrainingData, Target, frequent_tokens
from twostroke.lab.train.start import first_weights
from twostroke.model.families.heads import build_heads, heads_for
from twostroke.model.loader import load
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.weights import HeadsFacts, target_identity
from twostroke.model.weights.heads import save_heads, stored_shapes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twostroke.lab.train.learn import HeadScore
    from twostroke.lab.train.options import TrainOptions
    from twostroke.lab.train.record import RecordedAnswer
    from twostroke.model.weights import LoadedModel

    Report = Callable[[str], None]

_LOGITS_RATE_FACTOR = 0.3  # of the learning rate: these weights begin as the target's
_MATRIX, _VECTOR = FORMATS["F16"], FORMATS["F32"]


def train_heads(model: str, output: Path, options: TrainOptions, report: Report) -> None:
    """Train draft heads for `model` in the folder `output`; `report` gets lines of progress.

    Answers, weights and the optimizer's state are saved in the folder. After Ctrl-C it has the
    heads trained so far, and the same call continues.

    Raises:
        UsageError: the folder has heads of another model or with other options, or the data
            cannot be read.
        TwostrokeError: the model cannot be loaded, or the disk is full.
    """
    loaded = load(model)
    about = _about(target_identity(loaded.tensors), options)
    saved = load_checkpoint(output, about)
    answers = collect(model, loaded.spec, output / "answers", options, report)
    lesson = HeadTrainingData(answers, options.window)
    if not lesson.pieces or not lesson.held_out:
        raise UsageError("There are too few answers to learn from: raise --tokens.")
    training_answers = lesson.training_answers()
    if saved is None:
        token_ids = frequent_tokens(training_answers, loaded.spec.vocab_size, options.vocab_size)
        learner = _learner(loaded, options, lesson, token_ids, training_answers)
    else:
        token_ids = saved.token_ids
        learner = _learner(loaded, options, lesson, token_ids, [])
        learner.descent.restore(saved.arrays, saved.seconds, saved.num_steps)
    run = _HeadTraining(output, about, token_ids, learner)
    note = f"heads so far are in {output}"
    train(learner.descent, learner.stepper(), run.save, note, report)


class _HeadTraining(Frozen):
    """The training of draft heads, and the folder with its heads and checkpoints."""

    folder: Path
    about: dict[str, Any]
    token_ids: tuple[int, ...]
    learner: HeadTrainer

    def save(self) -> str:
        """Write the draft heads and a checkpoint; return a line about their accuracy."""
        learner = self.learner
        score = learner.test()
        facts = HeadsFacts.of(
            learner.spec,
            target_id=self.about["target_id"],
            token_ids=self.token_ids,
            accepted=score.accepted,
            right_if_sure=score.right_if_sure,
        )
        tensors = {}
        for name, shape in stored_shapes(learner.spec).items():
            values = learner.descent.weights[name].detach().numpy()
            tensors[name] = QuantTensor.from_floats(values, _VECTOR if len(shape) == 1 else _MATRIX)
        save_heads(self.folder, facts, tensors)
        checkpoint = Checkpoint(
            self.about,
            self.token_ids,
            learner.descent.seconds,
            learner.descent.num_steps,
            learner.descent.arrays(),
        )
        save_checkpoint(self.folder, checkpoint)
        return _describe(score)


def _learner(
    loaded: LoadedModel,
    options: TrainOptions,
    lesson: HeadTrainingData,
    token_ids: tuple[int, ...],
    answers: list[RecordedAnswer],
) -> HeadTrainer:
    """Return the trainer of new draft heads for a model, with their first weights.

    Without `answers`, the first weights are not fitted, since a checkpoint replaces them.
    """
    ffn_size = options.ffn_size or max(32, loaded.spec.ffn_size * 2 // 3 // 32 * 32)
    spec = heads_for(
        loaded.spec,
        options.kind,
        num_tokens=len(token_ids),
        depth=options.depth,
        ffn_size=ffn_size,
        window=options.window,
    )
    program = build_heads(spec)
    target = Target(loaded.spec, loaded.tensors, token_ids)
    weights = first_weights(
        spec,
        program,
        target=target,
        tensors=loaded.tensors,
        answers=answers,
        seed=options.seed,
    )
    descent = Descent(
        weights,
        options.learning_rate,
        budget_s=60 * options.minutes,
        rate_factors={"output.weight": _LOGITS_RATE_FACTOR},
    )
    return HeadTrainer(
        spec,
        program,
        descent=descent,
        target=target,
        lesson=lesson,
        seed=options.seed,
    )


def _about(identity: str, options: TrainOptions) -> dict[str, Any]:
    """Return a description of a training of draft heads, which is stored with its checkpoint.

    A training is continued from a folder only if the description there is equal.
    """
    free = replace(options, data="self", num_tokens=1, minutes=1.0, learning_rate=1.0)
    return {"target_id": identity, **asdict(free)}


def _describe(score: HeadScore) -> str:
    shares = ", ".join(f"{share:.0%}" for share in score.accepted)
    return f"held out: {shares} right by depth, {score.per_pass:.2f} tokens a pass"
