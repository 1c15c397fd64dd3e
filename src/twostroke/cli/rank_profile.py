"""`twostroke profile` on several ranks: the times of each rank, and the time in collectives."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click
import msgspec

from twostroke.cli.terminal import printable, show_table
from twostroke.lab.measure.rank_profile import profile_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from twostroke.backends.parallel.predicted_speed import CollectiveShares, LinkSpeed
    from twostroke.core.distributed_options import ParallelOptions
    from twostroke.lab.measure.profile import ProfileOptions
    from twostroke.lab.measure.rank_profile import RanksProfile, RankTime


def show_ranks(
    model: str,
    options: ProfileOptions,
    parallel: ParallelOptions,
    notice: Callable[[str], None],
    *,
    as_json: bool,
) -> None:
    """Profile the steps on all ranks; print a table for each step, or one JSON object."""
    profiles: list[RanksProfile] = []
    for profile in profile_ranks(model, options, parallel, notice):
        if not as_json:
            if not profiles:
                click.echo(printable(f"{model} · {profile.detail}"))
                click.echo(_link(profile.link))
            _show(profile)
        profiles.append(profile)
    if as_json:
        steps = [_as_json(profile) for profile in profiles]
        click.echo(json.dumps({"model": model, "backend": profiles[0].detail, "steps": steps}))


def _link(link: LinkSpeed) -> str:
    moving = "" if math.isinf(link.bandwidth) else f" and {link.bandwidth / 1e9:.2g} GB/s"
    return (
        f"A collective takes {link.latency_s * 1e6:.1f} µs{moving}; ranks begin a step "
        f"{link.start_s * 1e6:.0f} µs after rank 0; each loses {link.noise:.1%} to the noise of "
        "the machine."
    )


def _show(profile: RanksProfile) -> None:
    ranks = range(profile.num_ranks)
    headings = ["OPERATION", "CALLS"]
    for rank in ranks:
        headings += [f"RANK {rank} MS", "WAITING"]
    lines = [tuple(headings)]
    for label, times in profile.operations.items():
        calls = str(max(rank_time.calls for rank_time in times.values()))
        cells = [cell for rank in ranks for cell in _cells(times.get(rank))]
        lines.append((str(label), calls, *cells))
    start = f"{profile.start_s * 1e3:.3f}"
    lines.append(("start of the step", "", start, start, *["–"] * (2 * len(ranks) - 2)))
    click.echo()
    click.secho(profile.shape.name, bold=True)
    click.echo(f"{profile.run_s.median * 1e3:.3f} ms a step (median of {profile.num_steps})\n")
    show_table(lines)
    click.echo(
        f"\nRank 0 spends in collectives {_shares(profile.measured)} of a step. "
        f"Predicted: {_shares(profile.predicted)}."
    )


def _cells(rank_time: RankTime | None) -> tuple[str, str]:
    if rank_time is None:
        return "–", "–"
    return f"{rank_time.time_s * 1e3:.3f}", f"{rank_time.waiting_s * 1e3:.3f}"


def _shares(shares: CollectiveShares) -> str:
    both = shares.waiting + shares.moving
    return f"{both:.1%} ({shares.waiting:.1%} waiting, {shares.moving:.1%} moving)"


def _as_json(profile: RanksProfile) -> dict[str, Any]:
    """Return a step's profile on several ranks as --json prints it, times in seconds.

    `bytes_per_s` is None if the ranks share one memory.
    """
    link = msgspec.to_builtins(profile.link)
    bandwidth = link.pop("bandwidth")
    return {
        "name": profile.shape.name,
        **msgspec.to_builtins(profile.shape),
        "num_measured": profile.num_steps,
        "run_s": msgspec.to_builtins(profile.run_s),
        "start_s": profile.start_s,
        "link": {**link, "bytes_per_s": None if math.isinf(bandwidth) else bandwidth},
        "collectives": msgspec.to_builtins(profile.measured),
        "predicted": msgspec.to_builtins(profile.predicted),
        "operations": [
            {
                "name": label.name,
                "layer": label.layer,
                "ranks": {
                    str(rank): msgspec.to_builtins(rank_time) for rank, rank_time in times.items()
                },
            }
            for label, times in profile.operations.items()
        ],
    }
