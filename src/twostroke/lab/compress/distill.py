"""Trains a smaller model on a larger model's answers, and writes it as a GGUF file."""

from __future__ import annotations

import struct
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from twostroke.backends.torch import TorchModel
from twostroke.core.errors import ModelFormatError, QualityError, TwostrokeError, UsageError
from twostroke.core.files import atomic_output, exclusive_output, require_disk_space
from twostroke.core.frozen import Frozen
from twostroke.core.json_io import read_checked_json, write_checked_json
from twostroke.core.message_text import counted_noun
from twostroke.engine.drafters import has_same_tokens
from twostroke.lab.compress.quantize import gguf_contents
from twostroke.lab.compress.report import check_canary, scoring_backend
from twostroke.lab.train.answers import collect
from twostroke.lab.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from twostroke.lab.train.descent import Descent, train
from twostroke.lab.train.imitate import StudentTrainer, training_examples
from twostroke.lab.train.narrow import Widths, choose_widths
from twostroke.lab.train.options import StudentShape, check_trainable
from twostroke.lab.train.shorten import choose_layers, names_in_full_model, shortened
from twostroke.lab.train.teach import Teacher, translated_examples, untranslated_examples
from twostroke.model.families import build_program
from twostroke.model.loader import build_tokenizer, load
from twostroke.model.quant import FORMATS, QuantTensor
from twostroke.model.tokenizer.translation import Translation
from twostroke.model.weights import target_identity
from twostroke.model.weights.write_gguf import write_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from twostroke.lab.train.descent import Report
    from twostroke.lab.train.imitate import StudentScore
    from twostroke.lab.train.options import DistillOptions
    from twostroke.lab.train.teach import TrainingExample
    from twostroke.model.families import ModelSpec
    from twostroke.model.weights import LoadedModel
    from twostroke.model.weights.write_gguf import Value

FILE_NAME: Final = "student.gguf"
_ABOUT_FILE, _LAYERS_FILE, _WIDTHS_FILE = "about.json", "layers.json", "widths.json"
_MATRIX, _VECTOR = FORMATS["F16"], FORMATS["F32"]
_NUM_SELECTION_ANSWERS = 4  # answers by which layers and widths are selected
_SELECTION_TOKENS = 128  # of each of these answers
T = TypeVar("T")
_GGUF_ARRAY, _GGUF_BOOL = 9, 7  # types of GGUF values


class _KeptLayers(msgspec.Struct, frozen=True):
    layers: list[int] = msgspec.field(name="kept")


class Student(Frozen):
    """A smaller model before its training by distillation, with its first weights.

    `metadata` and the `fixed` tensors are written to its GGUF file unchanged.
    """

    metadata: dict[str, Value]
    fixed: dict[str, QuantTensor]
    spec: ModelSpec
    tensors: Mapping[str, QuantTensor]


def distill(
    teacher: str,
    student: str | StudentShape,
    folder: Path,
    options: DistillOptions,
    report: Report,
) -> Path:
    """Train `student` on the teacher's answers, and return the path of its GGUF file.

    `student` is a model, or the shape of a part of the teacher. Answers, weights and the state of
    the optimizer are saved in `folder`. The student's file is written at each checkpoint, unless
    the student writes garbage. After an interruption, the same call continues.

    Raises:
        UsageError: the student is not smaller than its teacher, cannot express its text, or has
            recurrent layers; the folder belongs to other training or is in use; or the prompts
            cannot be read.
        QualityError: the student writes garbage.
        TwostrokeError: a model cannot be loaded or is not a GGUF file, or the disk is full.
    """
    loaded = load(teacher)
    shape = student if isinstance(student, StudentShape) else None
    base = load(student) if isinstance(student, str) else loaded
    if shape is None:
        _check_smaller(base, loaded)
    else:
        shape.check(base.spec)
    check_trainable(base.spec, "take a student without such layers")
    metadata, fixed = gguf_contents(base)
    translation = _translation(loaded, base)
    about = {
        "teacher": target_identity(loaded.tensors),
        "student": target_identity(base.tensors),
        "layers": None if shape is None else shape.layers,
        "length": options.length,
        "data": options.data,
        "seed": options.seed,
    }
    if shape is not None and shape.is_narrower:
        about |= {"kv_heads": shape.kv_heads, "feed_forward": shape.feed_forward}
    with _locked_folder(folder, about):
        saved = load_checkpoint(folder, about)
        answers = collect(teacher, loaded.spec, folder / "answers", options, report)
        examples = list(
            translated_examples(answers, translation, options.length)
            if translation
            else untranslated_examples(answers, options.length)
        )
        del answers
        first = Student(metadata, fixed, base.spec, base.tensors)
        if shape is not None:
            first = _cut_student(first, shape, examples, folder, report)
        run = _DistillRun.begin(
            first,
            folder,
            about=about,
            teacher=None if translation else Teacher(loaded),
            examples=examples,
            options=options,
        )
        if saved is None:
            report(f"before: {_describe(run.imitator.test(), is_same=translation is None)}")
        else:
            run.imitator.descent.restore(saved.arrays, saved.seconds, saved.num_steps)
        train(
            run.imitator.descent,
            run.imitator.stepper(),
            run.save,
            "training so far was kept",
            report,
        )
        run.write()
        return run.path


class _DistillRun(Frozen):
    """One distillation: a student in training, and the folder with its files and checkpoints."""

    student: Student
    folder: Path
    about: dict[str, Any]
    imitator: StudentTrainer

    @classmethod
    def begin(
        cls,
        student: Student,
        folder: Path,
        about: dict[str, Any],
        teacher: Teacher | None,
        examples: list[TrainingExample],
        options: DistillOptions,
    ) -> _DistillRun:
        """Prepare the training of a student: its weights, their optimizer and its batches.

        `about` identifies the training in its folder.
        """
        model = TorchModel(build_program(student.spec), student.tensors)
        for weight in model.weights.values():
            weight.requires_grad_()
        descent = Descent(model.weights, options.learning_rate, 60 * options.minutes)
        imitator = StudentTrainer(
            model,
            lambda: model.weights,
            descent=descent,
            teacher=teacher,
            examples=examples,
            seed=options.seed,
        )
        return cls(student, folder, about, imitator)

    @property
    def path(self) -> Path:
        """The path of the student's GGUF file."""
        return self.folder / FILE_NAME

    def save(self) -> str:
        """Write a checkpoint, and the student's GGUF file if the student writes no garbage.

        Returns a line of progress.
        """
        imitator, descent = self.imitator, self.imitator.descent
        text = _describe(imitator.test(), is_same=imitator.teacher is not None)
        arrays = descent.arrays()
        save_checkpoint(
            self.folder, Checkpoint(self.about, (), descent.seconds, descent.num_steps, arrays)
        )
        try:
            self.write()
        except QualityError as error:
            return f"{text}; no student yet: {error}"
        return f"{text}; the student so far is in {self.path}"

    def write(self) -> None:
        """Write the student's GGUF file.

        Raises:
            QualityError: the student writes garbage; then no file is written.
        """
        student = self.student
        tensors = dict(student.fixed)
        for name, weight in self.imitator.model.weights.items():
            fmt = _VECTOR if weight.ndim == 1 else _MATRIX
            tensors[name] = QuantTensor.from_floats(weight.detach().numpy(), fmt)
        with atomic_output(self.path) as part:
            require_disk_space(part, sum(tensor.num_bytes for tensor in tensors.values()))
            write_gguf(part, student.metadata | {"general.file_type": 1}, tensors)
            written = load(str(part))
            with closing(scoring_backend(written)) as backend:
                check_canary(written, backend)


def _check_smaller(base: LoadedModel, teacher: LoadedModel) -> None:
    sizes = [sum(t.num_values for t in model.tensors.values()) for model in (base, teacher)]
    if sizes[0] >= sizes[1]:
        raise UsageError(
            f"{base.name} has {sizes[0] / 1e6:,.0f} million weights, its teacher {teacher.name} "
            f"{sizes[1] / 1e6:,.0f}: a student must have fewer.",
            field="student",
        )


@contextmanager
def _locked_folder(folder: Path, about: dict[str, Any]) -> Iterator[None]:
    """Lock the folder of a distillation during the block, and record its purpose there.

    `about` identifies the training. Raises UsageError if the folder belongs to other training.
    """
    path, lock = folder / _ABOUT_FILE, folder / ".lock"
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_output(lock, folder))
            has_work = path.is_file() and any(file not in {path, lock} for file in folder.iterdir())
            if has_work and _read_selection(path, dict, folder) != about:
                raise UsageError(
                    f"{folder} holds training for another model or with other options: use the "
                    "same options, or another --output."
                )
            write_checked_json(path, about)
        except OSError as error:
            raise TwostrokeError(f"{str(folder)!r} cannot be written: {error.strerror}.") from None
        yield


def _translation(teacher: LoadedModel, student: LoadedModel) -> Translation | None:
    """Return a translation from a teacher's tokens to its student's tokens.

    Returns None if both have the same vocabulary.

    Raises:
        UsageError: the student's vocabulary cannot express the teacher's text.
    """
    teacher_tokenizer, student_tokenizer = build_tokenizer(teacher), build_tokenizer(student)
    if has_same_tokens(student_tokenizer, teacher_tokenizer):
        return None
    translation = Translation(teacher_tokenizer, student_tokenizer)
    if not translation.preserves_text():
        raise UsageError(
            f"the vocabulary of {student.name} cannot express the text of {teacher.name}.",
            field="student",
        )
    return translation


def _cut_student(
    student: Student,
    shape: StudentShape,
    examples: list[TrainingExample],
    folder: Path,
    report: Report,
) -> Student:
    """Cut a student out of its teacher: some of its layers, heads and channels.

    `shape` says how many, and `examples` decide which. The selection is saved in `folder`.
    """
    texts = [
        [int(token) for token in example.tokens[-_SELECTION_TOKENS:]]
        for example in training_examples(examples)[:_NUM_SELECTION_ANSWERS]
    ]
    spec = student.spec
    if shape.layers is not None and shape.layers < spec.num_layers:
        _check_layers_can_go(student)
        path = folder / _LAYERS_FILE
        if path.is_file():
            layers = _read_selection(path, _KeptLayers, folder).layers
        else:
            layers = choose_layers(spec, student.tensors, texts, shape.layers, report)
            write_checked_json(path, {"kept": layers})
        student = _with_layers(student, layers)
    if not shape.is_narrower:
        return student
    path = folder / _WIDTHS_FILE
    if path.is_file():
        widths = _read_selection(path, Widths, folder)
    else:
        kv_heads = shape.kv_heads or spec.num_kv_heads
        feed_forward = shape.feed_forward or spec.ffn_size
        widths = choose_widths(student.spec, student.tensors, texts, kv_heads, feed_forward)
        write_checked_json(path, msgspec.to_builtins(widths))
        report(
            f"widths: {kv_heads} of {counted_noun(spec.num_kv_heads, 'head')} of keys and values, "
            f"{feed_forward:,} of {counted_noun(spec.ffn_size, 'channel', form=',')} of each "
            "feed-forward remain"
        )
    return _with_widths(student, widths)


def _check_layers_can_go(student: Student) -> None:
    """Raise UsageError if layers cannot be removed, because some layers have no RoPE.

    In a family whose file readers derive from a layer's number whether it has a RoPE, a file of
    fewer layers would be read wrong. In other families it depends on the layer's sliding window.
    """
    spec = student.spec
    if spec.rotates is not None and (spec.window is None or spec.rotates != spec.window.slides):
        raise UsageError(
            f"models of the family {spec.architecture} have layers without RoPE at fixed places, "
            "so that no layer can be removed: remove heads and channels instead.",
            field="layers",
        )


def _read_selection(path: Path, kind: type[T], folder: Path) -> T:
    """Read the saved selection of the teacher's layers, or of its heads and channels.

    An earlier run of the same distillation has saved which of them the student keeps.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        return msgspec.convert(read_checked_json(path), kind)
    except (ModelFormatError, msgspec.ValidationError) as error:
        raise UsageError(f"{path} is damaged ({error}): delete {folder} to start again.") from None


def _with_layers(student: Student, kept_layers: list[int]) -> Student:
    spec = shortened(student.spec, kept_layers)
    names = names_in_full_model(list(build_program(spec).weight_shapes), kept_layers)
    tensors = {new_name: student.tensors[name] for new_name, name in names}
    prefix = student.spec.architecture
    changed: dict[str, Value] = {f"{prefix}.block_count": len(kept_layers)}
    if spec.window is not None:
        slides = bytes(spec.window.slides)
        changed[f"{prefix}.attention.sliding_window_pattern"] = (
            struct.pack("<IIQ", _GGUF_ARRAY, _GGUF_BOOL, len(slides)) + slides
        )
    return Student(student.metadata | changed, student.fixed, spec, tensors)


def _with_widths(student: Student, widths: Widths) -> Student:
    spec = widths.narrowed(student.spec)
    prefix = student.spec.architecture
    changed: dict[str, Value] = {
        f"{prefix}.attention.head_count": spec.num_heads,
        f"{prefix}.attention.head_count_kv": spec.num_kv_heads,
        f"{prefix}.attention.key_length": spec.head_dim,  # the default is width / heads
        f"{prefix}.attention.value_length": spec.head_dim,
        f"{prefix}.rope.dimension_count": spec.rope.dim,
        f"{prefix}.feed_forward_length": spec.ffn_size,
    }
    tensors = widths.cut(student.spec, student.tensors)
    return Student(student.metadata | changed, student.fixed, spec, tensors)


def _describe(likeness: StudentScore, *, is_same: bool) -> str:
    figure = "KL from the teacher" if is_same else "loss"
    share = "same top token" if is_same else "right tokens"
    return f"held out: {figure} {likeness.loss:.3f}, {share} {likeness.right:.1%}"
