"""Write an off-grid twin of a model, the source of quantizer comparisons.

Run it with `python -m benchmarks.lab.twin MODEL OUT`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from twostroke.lab.compress.twin import twin_of
from twostroke.model.families import build_program
from twostroke.model.loader import load
from twostroke.model.weights.gguf import Metadata, read_gguf
from twostroke.model.weights.write_gguf import Value, write_gguf


def main(model: str, out: str) -> None:
    """Write the twin of `model`, a GGUF file, in F32."""
    source = load(model)
    metadata = read_gguf(source.path).metadata
    assert isinstance(metadata, Metadata)
    twin_metadata: dict[str, Value] = {
        key: metadata.raw(key) for key in metadata if key != "general.alignment"
    }
    twin = twin_of(build_program(source.spec), source.tensors)
    write_gguf(Path(out), twin_metadata | {"general.file_type": 0}, twin)


if __name__ == "__main__":
    main(*sys.argv[1:])
