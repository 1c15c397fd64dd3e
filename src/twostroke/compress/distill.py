"""Makes a smaller model that answers like a larger one, and writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twostroke.backends.torch import TorchModel
from twostroke.compress.student import Student
from twostroke.core.errors import TwostrokeError, UsageError
from twostroke.core.files import read_json, write_json
from twostroke.core.frozen import Frozen
from twostroke.engine.build import build
from twostroke.engine.guessers import has_same_tokens
from twostroke.engine.loading import build_tokenizer, load
from twostroke.models import build_program
from twostroke.tokenize.translation import Translation
from twostroke.train.answers import collect
from twostroke.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from twostroke.train.descent import Descent, train
from twostroke.train.imitate import Imitator
from twostroke.train.shorten import choose_layers
from twostroke.train.teach import Teacher, other_tokens, same_tokens
from twostroke.weights import target_identity

if TYPE_CHECKING:
    from pathlib import Path

    from twostroke.train.descent import Report
    from twostroke.train.imitate import Likeness
    from twostroke.train.options import DistillOptions
    from twostroke.train.record import Answer
    from twostroke.train.teach import Example
    from twostroke.weights import LoadedModel

_ABOUT_FILE, _LAYERS_FILE = "about.json", "layers.json"
_CHOOSING_ANSWERS, _CHOOSING_TOKENS = 4, 128  # of each, by which layers are chosen


def distill(
    teacher: str,
    student: str | None,
    num_layers: int | None,
    folder: Path,
    options: DistillOptions,
    report: Report,
) -> Path:
    """Train `student`, or else `num_layers` layers of the teacher, on the teacher's answers.

    Answers, weights and the optimizer's state are kept in `folder`, and the student as it is by
    then; the same call continues. Returns the student's file, or its folder if it begins as one.

    Raises:
        UsageError: the student is no smaller than its teacher or has another text, the folder
            holds other training, or the prompts cannot be read.
        QualityError: the student writes garbage.
        TwostrokeError: a model cannot be loaded, the student cannot be written, or the disk is
            full.
    """
    loaded = load(teacher)
    base = loaded if student is None else load(student)
    _check_smaller(base, loaded, num_layers)
    begun = Student.of(base)
    translation = _translation(loaded, base)
    about = {
        "teacher": target_identity(loaded.tensors),
        "student": target_identity(base.tensors),
        "layers": num_layers,
        "length": options.length,
        "data": options.data,
        "seed": options.seed,
    }
    _claim(folder, about)
    saved = load_checkpoint(folder, about)
    answers = collect(teacher, loaded.spec, folder / "answers", options, report)
    if num_layers is not None:
        begun = begun.shortened(_layers(loaded, answers, num_layers, folder, report))
    examples = list(
        other_tokens(answers, translation, options.length)
        if translation
        else same_tokens(answers, options.length)
    )
    del answers
    run = _Run.begin(
        begun, folder, about, None if translation else Teacher(loaded), examples, options
    )
    if saved is None:
        report(f"before: {_told(run.imitator.test(), is_same=translation is None)}")
    else:
        run.imitator.descent.restore(saved.arrays, saved.seconds, saved.num_steps)
    what = f"student so far is in {run.path}"
    train(run.imitator.descent, run.imitator.stepper(), run.save, what, report)
    with build(str(run.path)):  # refuses a model that writes garbage
        return run.path


class _Run(Frozen):
    """A student in training, and the folder in which it is saved."""

    student: Student
    folder: Path
    about: dict[str, Any]
    imitator: Imitator

    @classmethod
    def begin(
        cls,
        student: Student,
        folder: Path,
        about: dict[str, Any],
        teacher: Teacher | None,
        examples: list[Example],
        options: DistillOptions,
    ) -> _Run:
        """Make the student's weights ready to be trained."""
        model = TorchModel(build_program(student.spec), student.tensors)
        for weight in model.weights.values():
            weight.requires_grad_()
        descent = Descent(model.weights, options.learning_rate, 60 * options.minutes)
        imitator = Imitator(model, lambda: model.weights, descent, teacher, examples, options.seed)
        return cls(student, folder, about, imitator)

    @property
    def path(self) -> Path:
        """The student's file or folder."""
        return self.folder / self.student.form.file_name

    def save(self) -> str:
        """Write the student and a checkpoint; return how well it does."""
        imitator = self.imitator
        told = _told(imitator.test(), is_same=imitator.teacher is not None)
        weights = {name: one.detach().numpy() for name, one in imitator.model.weights.items()}
        self.student.form.write(self.path, weights)
        descent = imitator.descent
        arrays = descent.arrays()
        save_checkpoint(
            self.folder, Checkpoint(self.about, (), descent.seconds, descent.num_steps, arrays)
        )
        return told


def _check_smaller(base: LoadedModel, teacher: LoadedModel, num_layers: int | None) -> None:
    if num_layers is not None:
        if not 1 <= num_layers < base.spec.num_layers:
            raise UsageError(
                f"must be from 1 to {base.spec.num_layers - 1}: {base.name} has "
                f"{base.spec.num_layers} layers.",
                field="num_layers",
            )
        return
    sizes = [sum(t.num_values for t in one.tensors.values()) for one in (base, teacher)]
    if sizes[0] >= sizes[1]:
        raise UsageError(
            f"{base.name} has {sizes[0] / 1e6:,.0f} million weights, its teacher {teacher.name} "
            f"{sizes[1] / 1e6:,.0f}: a student must have fewer.",
            field="student",
        )


def _claim(folder: Path, about: dict[str, Any]) -> None:
    """Note what a folder is for; refuse one that is for something else."""
    path = folder / _ABOUT_FILE
    if path.is_file() and read_json(path) != about:
        raise UsageError(
            f"{folder} holds training for another model or with other options: use the same "
            "options, or another --output."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, about)
    except OSError as error:
        raise TwostrokeError(f"{str(folder)!r} cannot be written: {error.strerror}.") from None


def _translation(teacher: LoadedModel, student: LoadedModel) -> Translation | None:
    """Return how the teacher's tokens become the student's, None if they are the same."""
    theirs, own = build_tokenizer(teacher), build_tokenizer(student)
    if has_same_tokens(own, theirs):
        return None
    found = Translation(theirs, own)
    if not found.is_able():
        raise UsageError(
            f"the vocabulary of {student.name} cannot express the text of {teacher.name}.",
            field="student",
        )
    return found


def _layers(
    teacher: LoadedModel, answers: list[Answer], count: int, folder: Path, report: Report
) -> list[int]:
    """Return the layers that the student keeps; they are chosen once, with what was measured."""
    path = folder / _LAYERS_FILE
    found = read_json(path) if path.is_file() else {}
    if "kept" in found:
        return [int(layer) for layer in found["kept"]]
    texts = [
        [*answer.prompt, *map(int, answer.tokens)][-_CHOOSING_TOKENS:]
        for answer in answers[:_CHOOSING_ANSWERS]
    ]
    losses: dict[str, float] = found.get("losses", {})

    def keep() -> None:
        write_json(path, {"losses": losses})

    kept = choose_layers(
        teacher.spec, teacher.tensors, texts, count, report, losses=losses, keep=keep
    )
    write_json(path, {"kept": kept})
    return kept


def _told(likeness: Likeness, *, is_same: bool) -> str:
    figure = "KL from the teacher" if is_same else "loss"
    share = "same top token" if is_same else "right tokens"
    return f"held out: {figure} {likeness.loss:.3f}, {share} {likeness.right:.1%}"
