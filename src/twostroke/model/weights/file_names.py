"""Maps a file's tensor names to canonical names and back; tells which tensors are needed."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeVar

from msgspec import field

from twostroke.core.errors import MAX_NAME_LENGTH, ModelFormatError, first_names, notice
from twostroke.core.frozen import Frozen
from twostroke.model.weights.tensor_names import (
    canonical_name,
    is_adapter_weight,
    is_derived,
    is_mtp_name,
    is_text_weight,
    mtp_name,
    published_mtp_name,
    published_name,
    without_prefix,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twostroke.model.families import Family

    T = TypeVar("T")

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class FileNames(Frozen):
    """The names that a model's tensors have in its file, for error messages.

    Inside Twostroke, tensors have canonical names, which are GGUF's. `published` maps canonical
    names to the file's names; it is empty for a GGUF file, whose names are canonical. `layer_names`
    are the names that the model's family has for a layer's weights.
    """

    published: Mapping[str, str] = field(default_factory=dict)
    layer_names: Mapping[str, str] = field(default_factory=dict)

    def quoted(self, canonical: str) -> str:
        """Return the name that a tensor has, or would have, in the model's file, in quotes.

        `canonical` is the tensor's canonical name.
        """
        return repr(self._name(canonical)[:MAX_NAME_LENGTH])

    def _name(self, canonical: str) -> str:
        if not self.published or canonical in self.published:
            return self.published.get(canonical, canonical)
        is_mtp = self._is_of_qwen_mtp_layer(canonical)
        similar = None if is_mtp else self._similar(canonical)
        if similar:
            return similar
        try:
            name = published_name(canonical, self.layer_names)
        except (KeyError, ValueError):
            return canonical
        return published_mtp_name(name) if is_mtp else self._prefix() + name

    def _is_of_qwen_mtp_layer(self, canonical: str) -> bool:
        """Return whether the file has other weights of this tensor's layer under `mtp.`."""
        layer = canonical.partition(".")[2].partition(".")[0]
        return any(
            is_mtp_name(published)
            for other, published in self.published.items()
            if other.startswith(f"blk.{layer}.")
        )

    def _similar(self, canonical: str) -> str | None:
        """Derive a missing tensor's file name from the name of the same weight in another layer.

        Instead, the name of the same weight of another expert can be used. Returns None if the file
        has no such weight.
        """
        numbers = _NUMBER.findall(canonical)
        pattern = _NUMBER.sub("N", canonical)
        for other, published in self.published.items():
            parts = _NUMBER.split(published)
            if _NUMBER.sub("N", other) == pattern and len(parts) == len(numbers) + 1:
                return "".join(map("".join, zip(parts, [*numbers, ""], strict=True)))
        return None

    def _prefix(self) -> str:
        """Return the prefix that this file adds to transformers' tensor names; empty if none."""
        for published in self.published.values():
            name_without_prefix = without_prefix(published)
            if published.endswith(name_without_prefix):
                return published.removesuffix(name_without_prefix)
        return ""


def by_canonical_name(
    file: str, tensors: Mapping[str, T], family: Family, num_layers: int
) -> tuple[dict[str, T], FileNames]:
    """Return a file's tensors by canonical name, and the names that they have in the file.

    Tensors that the text model does not need are left out. `num_layers` is the number of the
    model's layers, without MTP layers (multi-token prediction).

    Raises:
        ModelFormatError: two tensors are the same weight, or a tensor belongs to an adapter.
    """
    by_name: dict[str, T] = {}
    published: dict[str, str] = {}
    for name_in_file, tensor in tensors.items():
        if is_adapter_weight(name_in_file):
            raise ModelFormatError(
                f"{file!r} has tensor {name_in_file[:MAX_NAME_LENGTH]!r} of an adapter (LoRA): "
                "merge the adapter into its model first, as peft's merge_and_unload does."
            )
        numbered = name_in_file if family.mtp is None else mtp_name(name_in_file, num_layers)
        name = canonical_name(numbered, family.layer_names)
        if name is None:
            continue
        if name in by_name and not _are_equal(by_name[name], tensor):
            raise ModelFormatError(
                f"{file!r} has the tensors {published[name][:MAX_NAME_LENGTH]!r} and "
                f"{name_in_file[:MAX_NAME_LENGTH]!r}, which differ and are the same weight."
            )
        if name not in by_name:
            by_name[name], published[name] = tensor, name_in_file
    return by_name, FileNames(published, family.layer_names)


def must_be_read(canonical: str) -> bool:
    """Return whether ignoring a tensor could make results wrong, if its model's family ignores it.

    It is false for tensors of other modalities, such as images, and for values that follow from the
    configuration. Loaders refuse a model that has other tensors which its family does not read.
    """
    return is_text_weight(canonical) and not is_derived(canonical)


def report_left_out(file: str, names: Iterable[str], family: str) -> None:
    """Log the names of a model file's tensors that are ignored."""
    left_out = sorted(names)
    if not left_out:
        return
    notice(f"{file!r} has {first_names(left_out)}, which {family!r} does not read: left out.")


def _are_equal(first: object, second: object) -> bool:
    """Return whether two tensors, whose names mean the same weight, have the same bytes.

    The arguments may also be the names of the tensors' types; then the names are compared.
    """
    first_data = getattr(first, "data", None)
    second_data = getattr(second, "data", None)
    if first_data is None or second_data is None:
        return first == second
    return (
        getattr(first, "shape", None) == getattr(second, "shape", None)
        and first_data.dtype == second_data.dtype
        and first_data.shape == second_data.shape
        and bool((first_data == second_data).all())
    )
