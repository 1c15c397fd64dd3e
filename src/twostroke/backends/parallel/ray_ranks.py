"""`RayRanks`: starts ranks on the machines of a Ray cluster; this module alone imports Ray here."""

from __future__ import annotations

import secrets
from importlib.util import find_spec
from typing import Any, Final

from twostroke.backends.parallel.launcher import RemoteRank, RemoteRanks, serve_rank
from twostroke.backends.parallel.rank_messages import RankArrival
from twostroke.core.env import install_command
from twostroke.core.errors import BackendError, RanksLostError
from twostroke.core.message_text import counted_noun

_PLACEMENT_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 5.0


class RayRanks:
    """Starts each rank as a Ray actor; rank 0 stays in this process. A `Launcher`."""

    def __init__(self, num_ranks: int) -> None:
        """Join the Ray cluster at `RAY_ADDRESS`, or start one here; reserve a core for each rank.

        Raises:
            BackendError: Ray is not installed.
            RanksLostError: the cluster has too few free cores.
        """
        if find_spec("ray") is None:
            raise BackendError(f"--ray needs Ray: {install_command('cluster')}.")
        import ray
        from ray.util.placement_group import placement_group

        self._joined = not ray.is_initialized()
        if self._joined:
            ray.init(log_to_driver=False, include_dashboard=False, logging_level="error")
        self._ray, self._num_ranks = ray, num_ranks
        self._secret = secrets.token_bytes(16)
        self._actors: list[Any] = []
        self._tasks: list[Any] = []
        self._remote = RemoteRanks(ray.util.get_node_ip_address(), 0, self._secret, num_ranks)
        self._group = placement_group([{"CPU": 1}] * (num_ranks - 1), strategy="SPREAD")
        if not self._group.wait(_PLACEMENT_TIMEOUT_S):
            resources = ray.cluster_resources().get("CPU", 0)
            self.close()
            raise RanksLostError(
                f"Ray has no room for {counted_noun(num_ranks - 1, 'more rank')}: its cluster has "
                f"{resources:.0f} cores in all."
            )
        for rank in range(1, num_ranks):
            self._start(rank)

    @property
    def host(self) -> str:
        """Return the address of rank 0."""
        return self._remote.host

    def __call__(self, rank: int) -> RemoteRank:
        """Wait until rank number `rank` has connected to rank 0, and return its process."""
        return self._remote(rank)

    def close(self) -> None:
        """End the Ray actors of the ranks, free the reserved cores, and leave the cluster."""
        from ray.util.placement_group import remove_placement_group

        self._remote.close()
        if self._tasks:  # tasks end when rank 0's connections are closed
            self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=_END_TIMEOUT_S)
        for actor in self._actors:
            self._ray.kill(actor)
        remove_placement_group(self._group)
        if self._joined:
            self._ray.shutdown()

    def _start(self, rank: int) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, rank - 1)
        # If its machine is lost, Ray starts the actor elsewhere.
        kind = self._ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)(_RankActor)
        actor = kind.options(scheduling_strategy=strategy).remote()
        task = actor.serve.remote(
            self._remote.host,
            self._remote.port,
            secret=self._secret,
            rank=rank,
            num_ranks=self._num_ranks,
        )
        self._tasks.append(task)
        self._actors.append(actor)


class _RankActor:
    """A Ray actor, in whose process a rank runs."""

    def serve(self, host: str, port: int, secret: bytes, rank: int, num_ranks: int) -> None:
        """Run a rank in the actor's process until rank 0 ends."""
        serve_rank(host, port, secret, RankArrival(rank, num_ranks))
