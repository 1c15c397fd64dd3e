"""Starts KV offload for an engine, as its options say."""

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
from twostroke.model.program.program import stored_form

if TYPE_CHECKING:
    from twostroke.core.distributed_options import OffloadOptions
    from twostroke.engine.client import Client
    from twostroke.engine.kv_offload.tier import KvCacheSpec, OffloadTier
    from twostroke.model.weights import LoadedModel


def start_offload(
    client: Client, spec: KvCacheSpec, model_digest: str, options: OffloadOptions
) -> None:
    """Start KV offload: an engine's requests load KV pages from disk or Redis, and store them.

    It runs until the engine's loop ends. `spec` describes the format of this engine's pages.
    `model_digest` is a hash of every byte of the weights.

    Raises:
        UsageError: a tier cannot be used, or the engine has no pages to spare.
    """
    loop, program = client.loop, client.card.cost.program
    step_time, budget = loop.speculator.step_time, loop.config.step_budget
    loop.speculator.times_steps = True
    model = hashlib.sha256(f"{model_digest} {stored_form(program.ops)}".encode()).hexdigest()
    spec = replace(spec, model=model)
    if not loop.pages.max_held_pages:
        raise UsageError(
            "needs more pages than those of the longest request: raise {other}, or lower {more}.",
            field=options.field,
            other=Field("memory_bytes"),
            more=Field("context_length"),
        )

    def prefill_s(start: int, end: int) -> float:
        """Return the predicted seconds to prefill tokens[start:end] of a prompt."""
        chunks = [
            BatchShape.prefill(min(budget, end - chunk_start), chunk_start)
            for chunk_start in range(start, end, budget)
        ]
        return sum(step_time.seconds(chunk) for chunk in chunks)

    tiers: list[OffloadTier] = []
    if options.page_cache is not None:
        folder = env.expand_home(options.page_cache)
        tiers.append(DiskTier(folder, spec, options.max_page_cache_bytes, client.card.name))
    if options.page_store is not None:
        tiers.append(RedisTier(options.page_store, spec))
    OffloadManager(
        loop.pages, spec, tiers, prefill_s=prefill_s, is_measured=lambda: step_time.num_steps > 0
    )


def check_tiers(options: OffloadOptions) -> None:
    """Check, before a model is loaded, that the tiers of the offload options could be opened.

    Raises:
        UsageError: a tier cannot be used.
    """
    if options.page_store is not None:
        check_store(options.page_store)


def weights_digest(loaded: LoadedModel) -> str:
    """Return the SHA-256 of all weights of a model.

    Every byte of the weights is hashed, while the faster `weights_identity` covers only a part. The
    digest is read from a cache file if the model's files have not changed.
    """
    stamps = [
        (str(mapping.path), mapping.size, mapping.path.stat().st_mtime_ns)
        for mapping in loaded.mappings
    ]
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
