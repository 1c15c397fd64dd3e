"""Puts tiers behind an engine's pages, as its options say."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twostroke.core import env
from twostroke.core.errors import Field, ModelFormatError, UsageError
from twostroke.core.json_io import read_checked_json, write_checked_json
from twostroke.engine.kv_offload.disk import DiskTier
from twostroke.engine.kv_offload.manager import OffloadManager
from twostroke.engine.kv_offload.redis import RedisTier, check_store
from twostroke.model.program import BatchShape
from twostroke.model.program.stored_form import stored_form

if TYPE_CHECKING:
    from twostroke.core.distributed_options import OffloadOptions
    from twostroke.engine.client import Client
    from twostroke.engine.kv_offload.tier import KvCacheSpec, OffloadTier
    from twostroke.model.weights import LoadedModel


def begin_paging(client: Client, kind: KvCacheSpec, digest: str, tiers: OffloadOptions) -> None:
    """Let an engine's requests find pages in tiers; its loop ends that.

    `digest` covers every byte of the weights, unlike the model's identity.

    Raises:
        UsageError: a tier cannot be used, or the engine has no pages to spare.
    """
    loop, program = client.loop, client.card.cost.program
    time, budget = loop.speculator.step_time, loop.config.step_budget
    loop.speculator.times_steps = True
    model = hashlib.sha256(f"{digest} {stored_form(program.ops)}".encode()).hexdigest()
    kind = replace(kind, model=model)
    if not loop.pages.most_held:
        raise UsageError(
            "needs more pages than those of the longest request: raise {other}, or lower {more}.",
            field=tiers.field,
            other=Field("memory_bytes"),
            more=Field("context_length"),
        )

    def seconds(start: int, end: int) -> float:
        """Return how long computing tokens[start:end] takes, a step after the other."""
        starts = range(start, end, budget)
        shapes = [BatchShape.prefill(min(budget, end - at), at) for at in starts]
        return sum(map(time.seconds, shapes))

    found: list[OffloadTier] = []
    if tiers.page_cache is not None:
        folder = env.expand_home(tiers.page_cache)
        found.append(DiskTier(folder, kind, tiers.max_page_cache_bytes, client.card.name))
    if tiers.page_store is not None:
        found.append(RedisTier(tiers.page_store, kind))
    OffloadManager(loop.pages, kind, found, seconds, lambda: time.num_steps > 0)


def check_tiers(tiers: OffloadOptions) -> None:
    """Refuse, before a model is loaded, what no tier could be opened with.

    Raises:
        UsageError: as `begin_paging`.
    """
    if tiers.page_store is not None:
        check_store(tiers.page_store)


def weights_digest(loaded: LoadedModel) -> str:
    """Return the SHA-256 of all weights, kept for files that have not changed since.

    Unlike `weights_identity` it covers every byte.
    """
    stamps = [(str(m.path), m.size, m.path.stat().st_mtime_ns) for m in loaded.mappings]
    key = hashlib.sha256(repr(stamps).encode()).hexdigest()
    path = env.cache_dir() / "digests" / f"{key[:16]}.json"
    with suppress(ModelFormatError):
        values = read_checked_json(path)
        if values.get("files") == key and isinstance(values.get("sha256"), str):
            return str(values["sha256"])
    digest = hashlib.sha256()
    for name, tensor in sorted(loaded.tensors.items()):
        digest.update(f"{name} {tensor.format.name} {tensor.shape}\n".encode())
        digest.update(b"" if tensor.order is None else tensor.order.tobytes())
        digest.update(tensor.data.data)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_checked_json(path, {"files": key, "sha256": digest.hexdigest()})
    return digest.hexdigest()
