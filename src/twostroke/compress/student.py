"""The model that distill trains: where it begins, and how it is written.

What begins as a GGUF file becomes one; what begins as a safetensors folder becomes a folder.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, ClassVar, Final

from twostroke.compress.folder import published_names
from twostroke.compress.hf_files import config_of, write_tokenizer
from twostroke.compress.quantize import stored
from twostroke.compress.unfinished import need, unfinished, unfinished_folder
from twostroke.core.files import write_json
from twostroke.core.frozen import Frozen
from twostroke.models import build_program
from twostroke.quant import FORMATS, QuantTensor
from twostroke.train.shorten import kept_names, shortened
from twostroke.weights import GgufTokenizer
from twostroke.weights.safetensors import write_safetensors
from twostroke.weights.write_gguf import write_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from twostroke.models import ModelSpec
    from twostroke.quant import Floats
    from twostroke.weights import LoadedModel
    from twostroke.weights.write_gguf import Value

_ARRAY, _BOOL = 9, 7  # types of GGUF values
_F16: Final = 1  # the file type of GGUF files
_WEIGHTS: Final = "model.safetensors"


class Student(Frozen):
    """A model to be trained: its facts, its first weights, and the form in which it is written."""

    spec: ModelSpec
    tensors: Mapping[str, QuantTensor]
    form: GgufForm | FolderForm

    @classmethod
    def of(cls, base: LoadedModel) -> Student:
        """Return a student that begins as `base`; TwostrokeError if it could not be written."""
        is_file = isinstance(base.tokenizer_source, GgufTokenizer)
        form = GgufForm(*stored(base)) if is_file else FolderForm.of(base)
        return cls(base.spec, base.tensors, form)

    def shortened(self, kept: list[int]) -> Student:
        """Return a student that begins with these layers alone."""
        spec = shortened(self.spec, kept)
        names = kept_names(list(build_program(spec).weight_shapes), kept)
        tensors = {own: self.tensors[name] for own, name in names}
        return Student(spec, tensors, self.form.shortened(spec, kept))


class GgufForm(Frozen):
    """A GGUF file: its metadata, and the tensors that are not trained. Matrices are F16."""

    metadata: dict[str, Value]
    fixed: dict[str, QuantTensor]
    file_name: ClassVar[str] = "student.gguf"

    def shortened(self, spec: ModelSpec, kept: list[int]) -> GgufForm:
        """Return the form of a model that has these layers, and the facts `spec`."""
        changed: dict[str, Value] = {f"{spec.architecture}.block_count": len(kept)}
        if spec.window is not None:
            slides = bytes(spec.window.slides)
            changed[f"{spec.architecture}.attention.sliding_window_pattern"] = (
                struct.pack("<IIQ", _ARRAY, _BOOL, len(slides)) + slides
            )
        return GgufForm(self.metadata | changed, self.fixed)

    def write(self, path: Path, weights: Mapping[str, Floats]) -> None:
        """Write weights, or replace those of before; TwostrokeError if the disk is full."""
        tensors = dict(self.fixed)
        for name, weight in weights.items():
            tensors[name] = QuantTensor.from_floats(
                weight, FORMATS["F32" if weight.ndim == 1 else "F16"]
            )
        with unfinished(path) as part:
            need(part, sum(tensor.num_bytes for tensor in tensors.values()))
            write_gguf(part, self.metadata | {"general.file_type": _F16}, tensors)


class FolderForm(Frozen):
    """A safetensors folder like that of `base`, with another configuration."""

    base: LoadedModel
    config: dict[str, Any]
    names: dict[str, str]  # of weights, by their canonical ones
    file_name: ClassVar[str] = "student"

    @classmethod
    def of(cls, base: LoadedModel) -> FolderForm:
        """Return the form of `base`; TwostrokeError if its family cannot be written."""
        config = config_of(base)
        config.pop("quantization_config", None)
        return cls(base, config, published_names(base))

    def shortened(self, spec: ModelSpec, kept: list[int]) -> FolderForm:
        """Return the form of a model that has these layers, and the facts `spec`."""
        changed: dict[str, Any] = {"num_hidden_layers": len(kept)}
        window = self.base.spec.window
        if "layer_types" in self.config:
            changed["layer_types"] = [self.config["layer_types"][layer] for layer in kept]
        elif window is not None and spec.window is not None and not all(window.slides):
            kinds = {True: "sliding_attention", False: "full_attention"}
            changed["layer_types"] = [kinds[slides] for slides in spec.window.slides]
        return FolderForm(self.base, self.config | changed, self.names)

    def write(self, path: Path, weights: Mapping[str, Floats]) -> None:
        """Write weights, or replace those of before; TwostrokeError if the disk is full."""
        given = self.config.get("torch_dtype", self.config.get("dtype"))
        fmt = FORMATS[{"float16": "F16", "float32": "F32"}.get(str(given), "BF16")]
        tensors = {
            self.names[name]: QuantTensor.from_floats(weight, fmt)
            for name, weight in weights.items()
        }
        num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        if path.exists():
            with unfinished(path / _WEIGHTS) as part:
                need(part, num_bytes)
                write_safetensors(part, tensors)
            return
        with unfinished_folder(path) as folder:
            need(folder, num_bytes)
            write_tokenizer(self.base, folder)
            write_json(folder / "config.json", self.config)
            write_safetensors(folder / _WEIGHTS, tensors)
