"""The jobs of a comparison, equal for every engine: given token ids, and the times of a run.

Only the standard library is imported: peers import this file in their own environments.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

Stamps = list[tuple[float, int]]  # when tokens of a stream came, and how many


@dataclass(frozen=True)
class Work:
    """A row of the tables: so many fresh prompts at once, each answered with `num_tokens`.

    With one token to write it measures prefill, else decode. The first `kept_length` tokens of each
    stream's prompt are its own and stay the same from round to round: an engine may keep what it
    computed of them, so that a long context costs its prefill once and not in every round.
    """

    name: str
    num_streams: int
    prompt_length: int
    num_tokens: int
    kept_length: int = 0

    @property
    def is_prefill(self) -> bool:
        """Whether the prompt is what counts."""
        return self.num_tokens == 1


@dataclass(frozen=True)
class Timing:
    """One run of a job, seen by the one who asked; `first_tokens` has one token a prompt.

    `prefill_s` ends with the last prompt's first token. `decode_s` runs from there until a stream
    has ended, so that all streams are at work in it; `decode_tokens` were written in it.
    `wall_s` is the whole job. `bytes` and `flops` are those of the stroke that the row is about,
    counted from the Program; 0 from an engine that does not count. `collective_s` is what of the
    stroke rank 0 spent in collectives, and `busy` the processor time of each of the engine's
    processes as a share of `wall_s`. `waiting` is what each rank waited, as a share of its decode
    steps.
    """

    prompt_tokens: int
    prefill_s: float
    decode_tokens: int
    decode_s: float
    wall_s: float
    first_tokens: list[int]
    bytes: int = 0
    flops: int = 0
    collective_s: float = 0.0
    busy: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)

    @classmethod
    def of_stamps(
        cls, prompts: list[list[int]], start_s: float, stamps: list[Stamps], first_tokens: list[int]
    ) -> Timing:
        """Derive the times of a job from its start and from when each stream's tokens came."""
        all_began = max(stream[0][0] for stream in stamps)
        first_ended = min(stream[-1][0] for stream in stamps)
        return cls(
            prompt_tokens=sum(map(len, prompts)),
            prefill_s=all_began - start_s,
            decode_tokens=sum(
                count for stream in stamps for at, count in stream if all_began < at <= first_ended
            ),
            decode_s=first_ended - all_began,
            wall_s=max(stream[-1][0] for stream in stamps) - start_s,
            first_tokens=first_tokens,
        )

    def tokens_per_s(self, work: Work) -> float:
        """Return the rate that the row is about."""
        if work.is_prefill:
            return self.prompt_tokens / self.prefill_s
        return self.decode_tokens / self.decode_s

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for `Timing(**fields)` in another process."""
        return asdict(self)


PROMPT_LENGTH = 32
WORKS = {
    "decode-1": Work("decode, 1 stream", 1, PROMPT_LENGTH, 128),
    **{
        f"decode-{n}": Work(f"decode, {n} streams together", n, PROMPT_LENGTH, 64)
        for n in (2, 4, 8, 16, 32)
    },
    **{
        f"decode-{n}-behind-8000": Work(f"{name} after 8,000 tokens", n, 8000, 48, 7968)
        for n, name in ((1, "decode, 1 stream"), (8, "decode, 8 streams"))
    },
    "prefill-512": Work("prefill, 512 tokens", 1, 512, 1),
    "prefill-2048": Work("prefill, 2,048 tokens", 1, 2048, 1),
    "prefill-4096": Work("prefill, 4,096 tokens", 1, 4096, 1),
}
