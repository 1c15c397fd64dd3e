"""The rows of the GPU benchmark, in the order of measurement. Used by campaign.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from twostroke.core.frozen import Frozen
from twostroke.lab.measure.single_step import StepShape
from twostroke.model.program import BatchShape
from twostroke.model.program.kv_layout import PageGroups

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twostroke.model.program import Program

PAGE: Final = 16
KV: Final = ("int8", "fp8")
_FP8_ROWS: Final = 64
_FP8_LIBRARY_ROWS: Final = 1024
_LEAST_ROWS: Final = 256  # of an engine's steps


class Row(Frozen):
    """One measurement: a model's shape and formats, the step, and whether rows have one tile.

    With `less` its figures are those of the step less `times` those of another row: what attention
    takes. `drafts` follow the newest token, and each is right with the chance `accepted`. With
    `is_restarted` the engine is started a second time, when its kernels are in the cache. With
    `is_sequential` launches never overlap; else they do where the engine finds that faster.
    """

    model: str
    fmt: str
    step: StepShape
    kv: str = "f16"
    same_tokens: bool = False
    has_graphs: bool = True
    drafts: int = 0
    accepted: float = 0.0
    less: str = ""
    times: int = 1
    is_restarted: bool = False
    is_sequential: bool = False

    @property
    def batch(self) -> BatchShape:
        """The shape of the step, with its drafts."""
        if self.drafts:
            rows = 1 + self.drafts
            return BatchShape((self.step.context,), (rows,), rows)
        return self.step.batch

    @property
    def is_fp8(self) -> bool:
        """Whether products with the matrices have twice the matrix rate."""
        is_known = self.fmt.startswith("FP8") and not self.same_tokens
        return is_known and self.batch.num_rows > _FP8_ROWS

    @property
    def is_written_out(self) -> bool:
        """Whether E4M3 codes of the matrices are written out for the library."""
        return self.is_fp8 and self.fmt == "FP8" and self.batch.num_rows >= _FP8_LIBRARY_ROWS

    @property
    def tokens(self) -> float:
        """How many tokens a step of one stream gives: those before the first wrong draft."""
        return sum(self.accepted**i for i in range(1 + self.drafts))

    @property
    def engine(self) -> tuple[str, str, str, bool, bool, bool]:
        """What rows have in common that one engine can measure."""
        return (
            self.model,
            self.fmt,
            self.kv,
            self.same_tokens,
            self.is_restarted,
            self.is_sequential,
        )


class Room(Frozen):
    """What an engine needs: pages, and rows of a step."""

    num_pages: int
    max_rows: int

    def holds(self, other: Room) -> bool:
        """Whether there is as much as the other needs."""
        return self.num_pages >= other.num_pages and self.max_rows >= other.max_rows

    @classmethod
    def of(cls, rows: Iterable[Row], program: Program) -> Room:
        """Return what the largest of some rows need."""
        groups = PageGroups(PAGE, tuple(group.window for group in program.cache_groups))
        every = list(rows)
        num_pages = max(row.step.num_pages(groups) for row in every)
        return cls(num_pages, max(_LEAST_ROWS, *(row.batch.num_rows for row in every)))


def _decode(model: str, fmt: str, streams: int = 1, context: int = 256, **options: Any) -> Row:
    return Row(model, fmt, StepShape.decode(streams, context), **options)


def _prefill(model: str, fmt: str, tokens: int = 4096, **options: Any) -> Row:
    return Row(model, fmt, StepShape.prefill(tokens), **options)


def _of_8b(fmt: str, *, rows: Iterable[int] = (8, 64, 128, 256, 512)) -> dict[str, Row]:
    name = fmt.lower()
    results = {f"decode-8b-{name}": _decode("8b", fmt), f"prefill-8b-{name}": _prefill("8b", fmt)}
    return results | {f"rows-{n}-8b-{name}": _decode("8b", fmt, n) for n in rows}


_BF16: Final = {
    "decode-8b-bf16": _decode("8b", "BF16"),
    "decode-8b-bf16-apart": _decode("8b", "BF16", is_sequential=True),
    "prefill-8b-bf16": _prefill("8b", "BF16"),
    "prefill-1k-8b-bf16": _prefill("8b", "BF16", 1024),
    "streams-256-8b-bf16": _decode("8b", "BF16", 256, 1024),
    "decode-8b-bf16-32k": _decode("8b", "BF16", 1, 32_768),
    "attention-decode-32k": _decode("8b", "BF16", 1, 32_768, less="decode-8b-bf16"),
    "attention-prefill-8k": _prefill("8b", "BF16", 8192, less="prefill-8b-bf16", times=2),
    "streams-16-8b-bf16": _decode("8b", "BF16", 16, 1024),
    "streams-32-8b-bf16": _decode("8b", "BF16", 32, 1024),
    **{f"rows-{n}-8b-bf16": _decode("8b", "BF16", n) for n in (8, 64, 128, 256, 512)},
}
_LADDER: Final = {
    "ladder-eager": _decode("7b", "BF16", has_graphs=False),
    "ladder-graph": _decode("7b", "BF16"),
    "ladder-int8": _decode("7b", "Q8_0"),
    "ladder-int4": _decode("7b", "Q4_0"),
    "ladder-drafts": _decode("7b", "Q4_0", drafts=5, accepted=0.7),
}
_SAME: Final = {
    "same-1-8b-bf16": _decode("8b", "BF16", same_tokens=True),
    "same-32-8b-bf16": _decode("8b", "BF16", 32, 1024, same_tokens=True),
    "same-256-8b-bf16": _decode("8b", "BF16", 256, 1024, same_tokens=True),
    "same-prefill-8b-bf16": _prefill("8b", "BF16", same_tokens=True),
    "same-1-8b-q4_k": _decode("8b", "Q4_K", same_tokens=True),
}
_MIXTURES: Final = {
    "decode-30b-a3b-q4_k": _decode("30b-a3b", "Q4_K"),
    "decode-30b-a3b-bf16": _decode("30b-a3b", "BF16"),
    "streams-32-30b-a3b-bf16": _decode("30b-a3b", "BF16", 32, 1024),
    "prefill-30b-a3b-bf16": _prefill("30b-a3b", "BF16"),
}
ROWS: Final = {
    **_BF16,
    **_of_8b("Q4_K"),
    **_LADDER,
    **_of_8b("FP8"),
    "decode-1.5b-bf16": _decode("1.5b", "BF16"),
    "decode-1.5b-bf16-apart": _decode("1.5b", "BF16", is_sequential=True),
    "ready-8b-bf16": _decode("8b", "BF16", is_restarted=True),
    **_SAME,
    "decode-70b-q4_k": _decode("70b", "Q4_K"),
    **_MIXTURES,
    **{f"decode-8b-bf16-32k-{kv}": _decode("8b", "BF16", 1, 32_768, kv=kv) for kv in KV},
    "streams-256-8b-bf16-int8": _decode("8b", "BF16", 256, 1024, kv="int8"),
    **_of_8b("Q8_0"),
    "prefill-8b-fp8-blocks": _prefill("8b", "FP8 blocks"),
}
# What is checked, and before which row: a fault in the kernels would make its speed worthless.
CHECKED_BEFORE: Final = {
    "decode-8b-bf16": ("correct-bf16",),
    "decode-8b-q4_k": ("correct-q4_k",),
    "ladder-eager": ("products", "sampler"),
    "ladder-int8": ("correct-q8_0", "correct-q4_0"),
    "decode-8b-fp8": ("correct-fp8",),
    "same-1-8b-bf16": ("same-tokens",),
    "prefill-8b-fp8-blocks": ("correct-fp8_blocks", "correct-q6_k", "correct-f16"),
}
ORDER: Final = tuple(name for row in ROWS for name in (*CHECKED_BEFORE.get(row, ()), row))
