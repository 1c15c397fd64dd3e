"""`RankGroup`: starts the ranks of an engine, sizes its cache, and builds the backend of all."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Self, cast

from msgspec.structs import replace

from twostroke.backends.cpu.library import choose_level, load_library
from twostroke.backends.cpu.shared import shared_bytes
from twostroke.backends.create import (
    FLOAT32_BACKENDS,
    create_backend,
    splits_sums,
    torch_device,
)
from twostroke.backends.interface import WeightShard, block_sizes
from twostroke.backends.parallel.backend import ParallelBackend
from twostroke.backends.parallel.launcher import (
    LocalRanks,
    assigned_rank,
    describe_command,
    follow_if_launched,
    wait_for_ranks,
)
from twostroke.backends.parallel.links.link_type import choose_link_type, open_link
from twostroke.backends.parallel.rank_messages import RankJob
from twostroke.backends.parallel.ranks import Ranks
from twostroke.backends.parallel.ray_ranks import RayRanks
from twostroke.backends.parallel.shared import SharedLink
from twostroke.core import env
from twostroke.core.errors import RanksLostError
from twostroke.core.hardware import memory_available, resolve_num_threads, scarcest_memory
from twostroke.model.families.heads import last_hidden
from twostroke.model.program.shard import shard
from twostroke.model.weights import weights_identity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from twostroke.backends.kv_size import CacheSize
    from twostroke.backends.parallel.backend import RankBackend
    from twostroke.backends.parallel.launcher import Launcher, RemoteRanks
    from twostroke.backends.parallel.link import Link
    from twostroke.backends.recipe import EngineRecipe
    from twostroke.core.options import ComputeOptions
    from twostroke.model.program.shard import RankProgram
    from twostroke.model.quant import QuantTensor

_EVALUATED_ROWS = 512  # rows of a step in which a sequence is evaluated
_CAUSE_TIMEOUT_S = 2.0  # to learn why ranks did not connect


class RankGroup:
    """Starts the ranks of an engine, and builds the backend of all ranks.

    It exists from the start of the processes until the ranks have loaded their parts of the model.
    """

    def __init__(self, recipe: EngineRecipe) -> None:
        """Divide the recipe's model over its mesh, and start the processes of the other ranks.

        Raises:
            UsageError: the model cannot be divided in this way.
            BackendError: ranks cannot be started.
        """
        self._recipe = recipe = recipe.without_tokenizer()
        compute, batch = recipe.options.compute, recipe.options.batch
        program, tensors = recipe.program, recipe.loaded.tensors
        self._model_id = weights_identity(tensors)
        self._splits_sums = splits_sums(compute, recipe.options.parallel)
        sizes = block_sizes(tensors) if self._splits_sums else None
        self._parts = shard(program, recipe.mesh, [last_hidden(program)], sizes)
        self._weight_bytes = [_weight_bytes(part, tensors, compute) for part in self._parts]
        self._max_rows = max(batch.token_budget, batch.effective_max_running, _EVALUATED_ROWS)
        self._level = choose_level(compute.level).level
        self._one_arithmetic = compute.backend in FLOAT32_BACKENDS or bool(
            load_library(self._level).ts_one_arithmetic()
        )
        with ExitStack() as if_it_fails:
            self._link, launcher = self._start(if_it_fails)
            self._ranks = Ranks(recipe.mesh.num_ranks, launcher, self._link)
            self._undo = if_it_fails.pop_all()
        self._hosts = {0: socket.gethostname()}

    def size_kv_cache(self) -> CacheSize:
        """Return the KV cache size of all ranks: the largest that fits on each host.

        Raises:
            BackendError: a rank ended, or has another version.
            UsageError: the requested context is longer than the model supports.
            MemoryLimitError: the model or its KV pages do not fit into a host's memory.
        """
        hellos = self._ranks.wait_for_hellos()
        for rank, hello in hellos.items():
            self._hosts[rank] = hello.host
        sizes = []
        for host in set(self._hosts.values()):
            ranks_of_host = [rank for rank, other in self._hosts.items() if other == host]
            free = (
                memory_available() if 0 in ranks_of_host else hellos[ranks_of_host[0]].memory_bytes
            )
            sizes.append(
                self._recipe.size_part_of_kv_cache(
                    sum(self._weight_bytes[rank] for rank in ranks_of_host),
                    free,
                    parts=[self._parts[rank].program for rank in ranks_of_host],
                    group_limit=scarcest_memory() if 0 in ranks_of_host else None,
                )
            )
        smallest = min(sizes, key=lambda size: size.num_pages)
        return replace(smallest, num_states=min(size.num_states for size in sizes))

    def create_backend(
        self,
        size: CacheSize,
        *,
        progress: Callable[[int, int], None] | None = None,
        tapped_value: str | None = None,
        embeds: bool = False,
    ) -> ParallelBackend:
        """Load each rank's part of the model, and return the backend of all ranks.

        The arguments are documented at the function `create_backend`.
        """
        jobs = partial(self._jobs, size)
        link = self._link.renew()
        self._ranks.assign(jobs(link))
        try:
            self._link.join(link)
        except RanksLostError as error:
            raise self._ranks.cause(_CAUSE_TIMEOUT_S) from error
        recipe = self._recipe
        tensors = recipe.loaded.tensors
        sizes = block_sizes(tensors) if self._splits_sums else None
        compute = options_for_rank(recipe.options.compute, *self._host_slot(0))
        with self.own_cores():
            rank0_backend = create_backend(
                tensors,
                recipe.program,
                compute,
                size,
                release=recipe.loaded.release,
                progress=progress,
                tapped_value=tapped_value,
                embeds=embeds,
                weight_shard=WeightShard(0, recipe.mesh, self._max_rows, self._link.record, sizes),
                packed_source=recipe.loaded.file_stamp,
            )
        rank0_backend = cast("RankBackend", rank0_backend)  # true for a backend with a share
        return ParallelBackend(rank0_backend, self._ranks, self._link, jobs, recipe.mesh)

    def own_cores(self) -> AbstractContextManager[None]:
        """Return a context in which new threads run only on the CPU cores of rank 0."""
        return on_cores(*self._host_slot(0))

    def close(self) -> None:
        """End the processes of the ranks; does nothing after the backend was closed."""
        self._link.abort()
        self._ranks.close()
        self._undo.close()

    def __enter__(self) -> Self:
        """Return the group of ranks; if the `with` block fails, the ranks end."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """End the processes of the ranks if the `with` block failed."""
        if kind is not None:
            self.close()

    def _start(self, undo: ExitStack) -> tuple[Link, Launcher]:
        """Return rank 0's end of the link, and the launcher of the other ranks.

        If torchrun or mpirun started this process as another rank, this call runs that rank and
        then exits the process.
        """
        count = self._recipe.mesh.num_ranks
        remote: RayRanks | RemoteRanks
        if self._recipe.options.parallel.launcher == "ray":
            remote = RayRanks(count)
        else:
            follow_if_launched(self._recipe.model, self._recipe.options.parallel)
            launcher_env = assigned_rank(count)
            if launcher_env is None:
                link = self._new_link(None)
                undo.callback(link.close)
                return link, LocalRanks(*link.files)
            remote = wait_for_ranks(
                launcher_env, describe_command(self._recipe.model, self._recipe.options.parallel)
            )
        undo.callback(remote.close)
        link = self._new_link(remote.host)
        undo.callback(link.close)
        return link, remote

    def _new_link(self, host: str | None) -> Link:
        """Create rank 0's end of the link.

        `host`: rank 0's address, for ranks on other machines.
        """
        count = self._recipe.mesh.num_ranks
        if self._recipe.options.compute.backend == "torch":
            from twostroke.backends.torch.link import TorchLink

            return TorchLink(0, count, host) if host else TorchLink(0, count)
        if host:
            return open_link(choose_link_type(env.forced_link()), 0, count, self._level, host)
        # Untouched memory costs nothing, so there is room for all values that `compare` may trace.
        program = self._recipe.program
        traced = shard(program, self._recipe.mesh, [*program.layer_outputs, last_hidden(program)])
        num_bytes = [shared_bytes(parts, self._max_rows) for parts in (self._parts, traced)]
        return SharedLink.create(count, self._level, max(num_bytes))

    def _host_slot(self, rank: int) -> tuple[int, int]:
        """Return a rank's index among the ranks of its machine, and the number of these ranks."""
        ranks_of_host = [other for other, host in self._hosts.items() if host == self._hosts[rank]]
        return sorted(ranks_of_host).index(rank), len(ranks_of_host)

    def _jobs(self, size: CacheSize, link: str) -> dict[int, RankJob]:
        return {
            rank: RankJob(
                rank=rank,
                mesh=self._recipe.mesh,
                model=self._recipe.model,
                model_id=self._model_id,
                compute=self._recipe.options.compute,
                host_slot=self._host_slot(rank),
                level=self._level,
                one_arithmetic=self._one_arithmetic,
                num_pages=size.num_pages,
                page_size=size.page_size,
                num_states=size.num_states,
                kv_format=size.kv_format,
                max_rows=self._max_rows,
                tapped_value=last_hidden(self._recipe.program),
                splits_sums=self._splits_sums,
                link_kind=self._link.kind,
                link=link,
            )
            for rank in range(1, self._recipe.mesh.num_ranks)
        }


def _weight_bytes(
    part: RankProgram, tensors: Mapping[str, QuantTensor], compute: ComputeOptions
) -> int:
    if compute.backend in FLOAT32_BACKENDS:
        return sum(4 * prod(shape) for shape in part.program.weight_shapes.values())
    return sum(tensors[name].part(*rows).packed_bytes for name, rows in part.weight_rows.items())


def options_for_rank(compute: ComputeOptions, index: int, count: int) -> ComputeOptions:
    """Return the compute options of one rank on a machine: its threads and its GPU.

    `index`, `count`: the rank's index among the `count` ranks of the machine. Must be called before
    the rank is limited to its cores (`on_cores`), because this function counts the cores.
    """
    total = resolve_num_threads(compute.num_threads)
    num_threads = max(1, (index + 1) * total // count - index * total // count)
    device = torch_device(compute, index) if compute.backend == "torch" else compute.device
    return replace(compute, num_threads=num_threads, device=device)


@contextmanager
def on_cores(index: int, count: int) -> Iterator[None]:
    """Limit this thread, and threads that it starts, to a rank's CPU cores within the block.

    `index`, `count`: the rank's index among the `count` ranks of the machine. Without this limit,
    two ranks that spin on the same core would take turns of milliseconds.
    """
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    allowed = sorted(os.sched_getaffinity(0))
    first, end = index * len(allowed) // count, (index + 1) * len(allowed) // count
    os.sched_setaffinity(0, allowed[first:end] or allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
