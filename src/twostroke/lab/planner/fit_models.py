"""The models that `fit` considers: their files, from headers and listings, without downloads."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from twostroke.core.errors import TwostrokeError
from twostroke.core.frozen import Frozen
from twostroke.lab.planner.models import PlannedModel, load_planned_model, planned_hub_model
from twostroke.model.hub.catalogue import CATALOGUE, HubFile, PackagedModel
from twostroke.model.hub.file_selection import QUANTIZATION_PREFERENCE, quantization
from twostroke.model.hub.hub import HubUnreachableError
from twostroke.model.hub.hub_headers import list_gguf_models
from twostroke.model.hub.inventory import find_record
from twostroke.model.hub.names import HubName, look_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from twostroke.model.hub.file_selection import FileSelection

    # Returns the mean KL in the quality report of a file; None if it has none.
    ReadKl = Callable[[Path], float | None]

_PUBLISHED_FORMATS: Final = {"F32", "F16", "BF16", "bf16", "fp8", "safetensors"}
_NO_HUB: Final = (
    "The Hugging Face hub could not be reached: check the network, the proxy settings or "
    "HF_ENDPOINT."
)
_WEIGHTS, _KV = "weights", "kv"  # kinds of the table


class KlEstimate(Frozen):
    """A mean KL divergence that a number format causes, in nats, and where it was measured."""

    mean_kl: float
    source: str


class FitFile(Frozen):
    """One file, or folder, of a model that could be run.

    Attributes:
        name: the name that `pull` and `serve` accept.
        label: its number format, such as Q4_K_M.
        model: the model with the weights of this file.
        kl: the divergence from the published weights; None if it is unknown.
        draft: the name of a draft model; empty without.
        draft_model: the draft model; None without.
        is_here: whether it is on this machine.
    """

    name: str
    label: str
    model: PlannedModel
    kl: KlEstimate | None
    draft: str = ""
    draft_model: PlannedModel | None = None
    is_here: bool = False


class UnreadModel(Frozen):
    """A model that could not be considered, and why."""

    name: str
    reason: str


def fit_files(
    names: Sequence[str],
    read_kl: ReadKl = lambda _path: None,
    notice: Callable[[str], None] = lambda _name: None,
) -> tuple[list[FitFile], list[UnreadModel]]:
    """Return the files of models, and the models whose headers could not be read.

    Args:
        names: models, as `plan` takes them; none for the catalogue.
        read_kl: reads the KL in the report of a file on this machine.
        notice: gets the name of each model before it is read.
    """
    files: list[FitFile] = []
    unread: list[UnreadModel] = []
    has_hub = True
    for name in names or CATALOGUE:
        if not has_hub and _needs_hub(name):
            unread.append(UnreadModel(name, _NO_HUB))
            continue
        notice(name)
        try:
            files += _files_of(name, read_kl)
        except HubUnreachableError:  # further models would wait for it as long
            has_hub = False
            unread.append(UnreadModel(name, _NO_HUB))
        except TwostrokeError as error:
            unread.append(UnreadModel(name, str(error)))
    return files, unread


def _needs_hub(name: str) -> bool:
    """Return whether a model's header is on the hub only."""
    try:
        source = look_up(name)
    except TwostrokeError:
        return False
    if isinstance(source, Path):
        return False
    record = find_record(source)
    is_here = record is not None and record.is_here
    return not is_here and (isinstance(source, HubName) or source.hub is not None)


def _files_of(name: str, read_kl: ReadKl) -> Iterator[FitFile]:
    source = look_up(name)
    if isinstance(source, PackagedModel):
        yield _catalogue_file(source, read_kl)
        return
    if isinstance(source, Path):
        yield _local_file(name, source, read_kl)
        return
    record = find_record(source)
    if record is not None and record.is_here:
        yield _local_file(name, record.path, read_kl)
        return
    yield from _hub_files(source)


def _catalogue_file(entry: PackagedModel, read_kl: ReadKl) -> FitFile:
    record = find_record(entry)
    is_here = record is not None and record.is_here
    file = _planned_entry(entry, is_here=is_here)
    kl = _kl_of(entry.number_format or "")
    if record is not None and is_here:
        kl = _measured_kl(record.path, read_kl) or kl
    draft = CATALOGUE[entry.draft] if entry.draft else None
    draft_model = None
    if draft is not None:
        draft_record = find_record(draft)
        draft_is_here = draft_record is not None and draft_record.is_here
        draft_model = _planned_entry(draft, is_here=draft_is_here)
    return FitFile(
        name=entry.name,
        label=entry.number_format or file.stored,
        model=file,
        kl=kl,
        draft=draft.name if draft is not None else "",
        draft_model=draft_model,
        is_here=is_here,
    )


def _planned_entry(entry: PackagedModel, *, is_here: bool) -> PlannedModel:
    """Return a model of the catalogue from its file here, or from its header on the hub."""
    if is_here or entry.hub is None:
        return load_planned_model(entry.name)
    return replace(planned_hub_model(_hub_name(entry.hub)), name=entry.name)


def _hub_name(file: HubFile) -> HubName:
    return HubName(file.repository, file.path, file.revision)


def _hub_files(name: HubName) -> Iterator[FitFile]:
    """Yield the files of a hub repository; of several GGUF files, the header of only one is read.

    The other files are taken to have the same model, and weights in proportion to their sizes.
    """
    selections = list_gguf_models(name)
    if not selections:
        model = planned_hub_model(name)
        yield FitFile(str(name), model.stored, model, _kl_of(model.stored))
        return
    read_selection = min(selections, key=_preference)
    model = planned_hub_model(replace(name, file=read_selection.entry))
    for selection in selections:
        label = selection.number_format or "GGUF"
        ratio = selection.num_bytes / read_selection.num_bytes
        weight_bytes = {key: round(size * ratio) for key, size in model.weight_bytes.items()}
        yield FitFile(
            name=str(replace(name, file=selection.entry)),
            label=label,
            model=replace(model, weight_bytes=weight_bytes, stored=label, identity=""),
            kl=_kl_of(label),
        )


def _preference(selection: FileSelection) -> int:
    label = selection.number_format
    order = QUANTIZATION_PREFERENCE
    return order.index(label) if label in order else len(order)


def _local_file(name: str, path: Path, read_kl: ReadKl) -> FitFile:
    model = load_planned_model(name)
    label = quantization(path.name) or model.stored
    kl = _measured_kl(path, read_kl) or _kl_of(label)
    return FitFile(name, label, model, kl, is_here=True)


def _measured_kl(path: Path, read_kl: ReadKl) -> KlEstimate | None:
    mean_kl = read_kl(path)
    return None if mean_kl is None else KlEstimate(mean_kl, "the file's own report")


def _kl_of(label: str) -> KlEstimate | None:
    """Return the divergence that a number format of weights causes; None if it is unknown.

    It is zero for formats in which weights are published.
    """
    if set(label.split(", ")) <= _PUBLISHED_FORMATS:
        return KlEstimate(0.0, "weights as published")
    return _kl_table().get((_WEIGHTS, label.upper()))


def kv_kl(kv_format: str) -> KlEstimate | None:
    """Return the divergence that a number format of keys and values causes; None if unknown."""
    return _kl_table().get((_KV, kv_format.upper()))


@cache
def _kl_table() -> dict[tuple[str, str], KlEstimate]:
    text = resources.files("twostroke.lab.planner").joinpath("kl_by_format.csv").read_text("utf-8")
    return {
        (row["kind"], row["format"].upper()): KlEstimate(float(row["mean_kl"]), row["source"])
        for row in csv.DictReader(text.splitlines())
    }
