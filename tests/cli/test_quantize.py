"""`quantize` renames a file to its final name only after its checks; `report` prints its scores."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from twostroke.core.errors import TwostrokeError
from twostroke.core.files import atomic_output
from twostroke.lab.compress import choose
from twostroke.lab.compress import quantize as module
from twostroke.lab.compress.calibrate import generated_pieces
from twostroke.lab.compress.saved_work import SavedMatrices
from twostroke.lab.measure.compare import held_out_text
from twostroke.model.loader import load
from twostroke.model.weights.gguf import read_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Ran

LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
TEXT = "Water runs down hills, and stones stay. " * 200
NUM_TOKENS = 1024

pytestmark = pytest.mark.usefixtures("few_questions")


@pytest.fixture
def text(tmp_path: Path) -> tuple[str, ...]:
    """The options that name a calibration text."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return ("--text", str(path), "--tokens", str(NUM_TOKENS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for files that are written."""
    path = tmp_path / "out"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def small(
    tiny: str, shared_cache: Path, few_questions: int, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny model in 4 bits, calibrated on `TEXT`."""
    out = tmp_path_factory.mktemp("small") / "small.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWOSTROKE_CACHE", str(shared_cache))
        module.quantize(tiny, "q4_0", out, TEXT, NUM_TOKENS, lambda _: None)
    assert [path.name for path in out.parent.iterdir()] == ["small.gguf"]
    return out


def test_a_report_has_what_was_measured_and_from_what(
    cli: Callable[..., Ran], tiny: str, small: Path, few_questions: int
) -> None:
    report = json.loads(cli("report", str(small), "--json").out)
    assert report["source_sha256"] == hashlib.sha256(Path(tiny).read_bytes()).hexdigest()
    for name, content in (("calibration", TEXT), ("held_out", held_out_text())):
        assert report[name]["sha256"] == hashlib.sha256(content.encode()).hexdigest()
    assert (report["source_bits"], report["bits"]) == (32, 4.5)
    bits = {kind["name"]: kind["bits"] for kind in report["kinds"]}
    assert bits == {"token_embd": 8.5, **dict.fromkeys(LAYER, 4.5)}
    stored = sum(tensor.num_bytes for tensor in read_gguf(small).tensors.values())
    assert report["num_bytes"] == stored < report["memory_bytes"]
    scored = report["comparison"]
    assert 0 < scored["mean_kl"] < scored["high_kl"] < scored["max_kl"] < 1
    assert min(scored["perplexity"], report["rows_per_s"], report["tokens_per_s"]) > 1
    printed = cli("report", str(small)).out
    flips = report["flips"]
    assert 0 <= flips["num_flipped"] < flips["num_questions"] // 2
    flips_text = f"{flips['num_flipped']} of {few_questions}; right {flips['num_right']}, source "
    for text in (
        flips_text,
        "q4_0, 4.50 bits",
        report["source_sha256"],
        "ffn_down",
        f"{scored['max_kl']:.2e}",
    ):
        assert text in printed


def test_a_mix_is_chosen_for_a_goal_and_measured_once(
    cli: Callable[..., Ran], tiny: str, text: tuple[str, ...], folder: Path
) -> None:
    out = str(folder / "mix.gguf")

    def mixed(*goal: str) -> Ran:
        return cli("quantize", tiny, *goal, "--out", out, *text)

    first = mixed("--bits", "5.2")
    assert "parts of the model" in first.err
    report = json.loads(cli("report", out, "--json").out)
    assert 4.9 < report["bits"] <= 5.2
    assert report["target"] == "5.2 bits"
    assert len({tensor.format.name for tensor in read_gguf(Path(out)).tensors.values()}) > 3
    repeated_run = mixed("--size", "120K")
    assert "from an earlier measurement" in repeated_run.err
    assert 100_000 < Path(out).stat().st_size <= 120_000
    assert mixed("--kl", "0.001").code == 0
    report_body = json.loads(cli("report", out, "--json").out)
    assert report_body["comparison"]["mean_kl"] < 0.002

    for goal, sentence in (
        (("--bits", "2"), "the smallest has 4."),
        (("--size", "20K"), "the smallest takes"),
        (("--kl", "1e-9"), "embeddings and logits alone have a KL of"),
        ((), "Give one of --to, --bits, --size and --kl"),
        (("--bits", "5", "--to", "q4_0"), "Give one of --to, --bits, --size and --kl"),
    ):
        ran = mixed(*goal)
        assert (ran.code, ran.err.count("twostroke: ")) == (2, 1), ran.err
        assert sentence in ran.err
        assert (
            "--kl" in goal or "from an earlier measurement" not in ran.err
        )  # before any other work


def test_a_model_calibrates_itself_on_the_same_pieces_each_time(tiny: str) -> None:
    source = load(tiny)
    first, second_pieces = (generated_pieces(source, 2000) for _ in range(2))
    assert first == second_pieces
    assert 1500 < sum(map(len, first)) < 2200
    assert max(map(len, first)) <= source.spec.context_length


def test_a_source_of_as_few_bits_is_told_before_and_after(
    cli: Callable[..., Ran], small: Path, text: tuple[str, ...], folder: Path
) -> None:
    doubt, out = "say nothing about the original model", str(folder / "again.gguf")
    assert doubt not in cli("report", str(small)).out
    ran = cli("quantize", str(small), "--to", "q4_1", "--out", out, *text)
    assert doubt in ran.err
    before, after = ran.err.split("Scoring the written file")
    assert "it will be neither smaller nor better" in before
    assert "again.gguf has" in after
    assert "it did not get smaller" in after
    assert doubt in cli("report", out).out


def test_a_file_that_differs_from_its_report_is_refused(
    cli: Callable[..., Ran], small: Path, folder: Path
) -> None:
    path = folder / "broken.gguf"
    ask = ("generate", str(path), "hello", "--max-tokens", "1")
    path.write_bytes(small.read_bytes())
    assert cli(*ask).code == 0
    path.write_bytes(broken(small))
    ran = cli(*ask)
    assert ran.code == 4
    assert "nats from the scores in its report" in ran.err
    assert "--accept-quality uses it all the same" in ran.err
    assert cli(*ask, "--accept-quality").code == 0


def test_a_model_that_writes_garbage_is_not_rounded(
    cli: Callable[..., Ran], small: Path, text: tuple[str, ...], folder: Path
) -> None:
    path = folder.parent / "broken.gguf"
    path.write_bytes(broken(small))
    ran = cli("quantize", str(path), "--to", "q4_0", "--out", str(folder / "x.gguf"), *text)
    assert ran.code == 4
    assert "writes garbage" in ran.err
    assert "Rounded" not in ran.err
    assert not list(folder.iterdir())


def test_a_model_without_a_report_is_told_apart(cli: Callable[..., Ran], tiny: str) -> None:
    ran = cli("report", tiny)
    assert ran.code == 4
    assert "has no report" in ran.err


def test_nothing_is_named_that_cannot_pass(
    cli: Callable[..., Ran],
    tiny: str,
    text: tuple[str, ...],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (short := folder.parent / "short.txt").write_text("Too short. " * 20)
    (held_out := folder.parent / "held.txt").write_text(TEXT + held_out_text()[1000:2000])

    (directory := folder.parent / "folder.gguf").mkdir()

    def refused(sentence: str, code: int, *more_options: str, name: str = "x.gguf") -> None:
        out = str(folder / name)
        ran = cli("quantize", tiny, "--to", "q4_0", "--out", out, *text, *more_options)
        assert (ran.code, ran.err.count("twostroke: ")) == (code, 1), ran.err
        assert sentence in ran.err
        assert not list(folder.iterdir())

    refused("iq2_s can be read, not written: --to takes f32,", 2, "--to", "iq2_s")
    refused("for '--to': 'Q8_0' is not one of", 2, "--to", "Q8_0")
    refused("Did you mean 'q8_0'?", 2, "--to", "Q8_0")
    refused("tokens, 1024 are needed", 2, "--text", str(short))
    refused("has parts of the held-out text", 2, "--text", str(held_out))
    refused("must end with .gguf", 2, name="x.bin")
    refused("cannot be written: Is a directory", 1, "--out", str(directory))
    with pytest.raises(TwostrokeError, match="Is a directory"), atomic_output(directory):
        pytest.fail("the work was done all the same")
    with atomic_output(folder.parent / "x.gguf"):
        refused("Another command writes", 2, "--out", str(folder.parent / "x.gguf"))
    refused("must not be the source", 2, "--out", tiny)
    refused("cannot be written: No such file", 1, name="no/x.gguf")
    for name in ("--bits", "--kl", "--tune"):
        refused("'nan' is not a finite number", 2, name, "nan")
    refused("is not in the range 1024<=x<=1000000", 2, "--tokens", "2000000000")
    with file_limit(60_000):
        refused("cannot be written: File too large", 1)
    free = shutil.disk_usage("/")._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: free)
        refused(", and the disk has ", 1)
        for goal in (("--to", "w4a16"), ("--bits", "5"), ("--size", "1TB")):
            ran = cli("quantize", tiny, *goal, "--out", str(folder / "x.gguf"), *text)
            assert ", and the disk has " in ran.err
            assert "Rounded" not in ran.err
    for stage in ("round_matrices", "make_report"):  # while it rounds, and once the file is whole
        with monkeypatch.context() as patch:
            patch.setattr(module, stage, lambda *_: signal.raise_signal(signal.SIGINT))
            refused("x.gguf' was not written", 130)


@pytest.mark.parametrize("target", ["q4_0", "w4a16"])
def test_what_was_rounded_before_an_interruption_is_not_rounded_again(
    cli: Callable[..., Ran],
    tiny: str,
    text: tuple[str, ...],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    # A folder's channels are made even by what some outputs lose, so what is kept is counted.
    where, name = (choose, "round_matrix") if target == "q4_0" else (SavedMatrices, "add")
    rounding, calls = getattr(where, name), list[int]()

    def counting_function(*args: object) -> object:
        if str(args[1]).endswith(".factors"):
            return rounding(*args)
        calls.append(len(calls))
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return rounding(*args)

    monkeypatch.setattr(where, name, counting_function)
    out = folder / ("x.gguf" if target == "q4_0" else "x")
    ask = ("quantize", tiny, "--to", target, "--out", str(out), *text)
    ran = cli(*ask)
    assert ran.code == 130
    assert "was not written. Run the same command to continue." in ran.err
    assert not list(folder.iterdir())
    repeated_run = cli(*ask)
    assert repeated_run.code == 0, repeated_run.err
    num_matrices = len(LAYER) * load(tiny).spec.num_layers
    assert len(calls) == 5 + num_matrices - 4
    tensor_bytes = {key: tensor.data.tobytes() for key, tensor in load(str(out)).tensors.items()}
    out.rename(out.with_name(f"old {out.name}"))
    assert cli(*ask).code == 0
    assert len(calls) == 1 + 2 * num_matrices  # what was kept is gone
    assert tensor_bytes == {
        key: tensor.data.tobytes() for key, tensor in load(str(out)).tensors.items()
    }


def broken(small: Path) -> bytes:
    """The bytes of `small` with some codes changed."""
    file_bytes = small.read_bytes()
    for name, tensor in read_gguf(small).tensors.items():
        if "ffn" in name and tensor.format.name == "Q4_0":
            blocks = tensor.data.reshape(-1, 18).copy()
            blocks[:, 2:] ^= 0x88  # the codes' highest bits
            file_bytes = file_bytes.replace(tensor.data.tobytes(), blocks.tobytes())
    return file_bytes


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Limit the size of files to `num_bytes` during the block, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
