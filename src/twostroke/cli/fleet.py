"""`twostroke fleet`: starts, shows and stops servers and their router on a Ray cluster."""

from __future__ import annotations

import importlib
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from twostroke.cli.help import CommandGroup, TextFileParam, option
from twostroke.cli.terminal import printable, show_table
from twostroke.core import env
from twostroke.core.env import install_command
from twostroke.core.errors import TwostrokeError, UnreachableError, UsageError, nearest
from twostroke.core.foreign_options import foreign_hint
from twostroke.core.json_io import encode_json
from twostroke.core.message_text import counted_noun

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from twostroke.core.yaml_file import YamlFile
    from twostroke.fleet.cluster.manager import FleetStatus
    from twostroke.fleet.cluster.own_ray import OwnRay
    from twostroke.fleet.cluster.spec import FleetSpec

_POLL_INTERVAL_S: Final = 0.25
_HEADINGS: Final = ("MODEL", "REPLICA", "STATE", "REQUESTS", "STARTS", "URL")
_FLEET_OPTIONS: Final = {
    "serve": {"host", "port", "name", "role", "peer-address", "prefill-peer"},
    "route": {"host", "port", "replica", "replicas-file", "models-file", "scale-from-zero"},
}
_as_json = option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@click.group("fleet", cls=CommandGroup)
def command() -> None:
    """Start, show and stop servers and their router on the machines of a Ray cluster.

    RAY_ADDRESS names the cluster. Without it, a cluster on this machine is started for the first
    fleet and stopped after the last one.
    """


@command.command("up")
@click.argument("file", type=click.Path(path_type=Path))
@option(
    "--may-grow",
    is_flag=True,
    help="Ray can add machines: wait for resources that no machine has now, instead of failing.",
)
@option(
    "--timeout", "timeout_s", type=float, default=600.0, help="Seconds to wait for all replicas."
)
@_as_json
def up_command(file: Path, may_grow: bool, timeout_s: float, as_json: bool) -> None:
    """Start or update the fleet that a YAML FILE describes.

    Replicas whose options changed are replaced one after another. The command ends when all
    replicas answer. See docs/operations/ray.md for the file.
    """
    from twostroke.fleet.cluster.spec import read_spec

    spec, source = read_spec(file)
    _check_options(spec, source)
    with _joined_cluster(starts=True) as ray:
        lack = None if may_grow else ray.check_room(spec)
        if lack is not None:
            index, text = lack
            raise source.error_at(["models", index], text[0].upper() + text[1:])
        is_new = spec.name not in ray.names()
        ray.up(spec)
        try:
            status = _wait(ray, spec, timeout_s)
        except (TwostrokeError, KeyboardInterrupt):
            if is_new:
                ray.down(spec.name)
            raise
    if as_json:
        click.echo(encode_json(status).decode())
    else:
        click.echo(f"The fleet {status.name} answers at {status.url}.")


@command.command("status")
@click.argument("name", required=False)
@_as_json
def status_command(name: str | None, as_json: bool) -> None:
    """Show the fleet NAME and its replicas; NAME may be left out if there is one fleet."""
    with _joined_cluster() as ray:
        status = ray.status(_resolve_name(ray, name))
    if as_json:
        click.echo(encode_json(status).decode())
        return
    answers = "answers" if status.router.is_ready else "does not answer"
    click.echo(f"{status.name}: the router {answers} at {status.url or 'no address yet'}.\n")
    rows = [
        (
            pool.label,
            replica.name.rsplit("/", 1)[1],
            _state(replica.phase, replica.is_current, replica.state.url),
            f"{replica.num_running:,}",
            f"{replica.state.num_starts:,}",
            replica.state.url or "-",
        )
        for pool in status.pools
        for replica in pool.replicas
    ]
    show_table([_HEADINGS, *rows], {1, 3, 4})
    for pool in status.pools:
        if not pool.num_wanted and not pool.replicas:
            click.echo(f"\n{pool.label}: no replica; the next request starts one.")
        if pool.num_ready < pool.num_wanted:
            verb = "is" if pool.num_ready == 1 else "are"
            replicas = counted_noun(pool.num_wanted, "replica")
            click.echo(f"\n{pool.label}: {pool.num_ready} of {replicas} {verb} ready.")
    ready = {pool.label: pool.num_ready for pool in status.pools}
    for pool in status.pools:
        if pool.num_prefill_wanted is not None:
            have = f"{ready.get(pool.prefill, 0)} ready"
            text = f"{pool.label} can use {pool.num_prefill_wanted:.1f} replicas of {pool.prefill}"
            click.echo(f"\nBy the measured rates, {text}; {have}.")
    if status.trouble:
        click.echo(printable(f"\nA server ended: {status.trouble}"))


@command.command("down")
@click.argument("name", required=False)
def down_command(name: str | None) -> None:
    """Stop the fleet NAME after its running answers; NAME may be left out if there is one fleet."""
    with _joined_cluster() as ray:
        name = _resolve_name(ray, name)
        ray.down(name)
    click.echo(f"The fleet {name} has ended.", err=True)


def _check_options(spec: FleetSpec, source: YamlFile) -> None:
    """Check the options of `serve` and `route` in a fleet's YAML file, by name and value.

    Raises:
        UsageError: an option is unknown, or its value is wrong; with the line of the file.
    """
    for index, pool in enumerate(spec.models):
        _check_program_options("serve", pool.options, ["models", index, "options"], source)
    _check_program_options("route", spec.router.options, ["router", "options"], source)


def _check_program_options(
    program: str, options: dict[str, Any], path: list[str | int], source: YamlFile
) -> None:
    command = importlib.import_module(f"twostroke.cli.{program}").command
    param_by_name = {
        flag.removeprefix("--"): param
        for param in command.params
        for flag in (*param.opts, *param.secondary_opts)
        if flag.startswith("--")
    }
    names = sorted(param_by_name)
    for name, value in options.items():
        if name in _FLEET_OPTIONS[program]:
            raise source.error_at([*path, name], f"the fleet sets --{name} itself.")
        if name not in param_by_name:
            hint = foreign_hint(name, [f"--{name}" for name in names]) or nearest(name, names)
            text = f"`twostroke {program}` has no option --{name}.{hint}"
            raise source.error_at([*path, name], text)
        fault = _value_fault(name, param_by_name[name], value)
        if fault is not None:
            raise source.error_at([*path, name], fault)


def _value_fault(name: str, param: click.Option, value: Any) -> str | None:
    """Return a sentence that says why an option's value in a fleet's file is wrong, or None.

    Whether files exist is not checked, since they are on the machines of the replicas.
    """
    if isinstance(value, bool):
        has_value = param.is_flag or value is False  # false leaves the option out
        return None if has_value else f"--{name} needs a value."
    if param.is_flag:
        return f"--{name} takes no value: write true or false."
    if isinstance(param.type, TextFileParam | click.Path):
        return None
    declaration = getattr(param, "declaration", None)
    for item in value if isinstance(value, list) else [value]:
        try:
            converted = param.type.convert(str(item), param, None)
            if declaration is not None and not param.multiple:
                declaration.check(converted)
        except click.BadParameter as error:
            return f"--{name}: {error.message.removesuffix('.')}."
        except UsageError as error:
            return error.sentence(lambda _: f"--{name}")
    return None


@contextmanager
def _joined_cluster(*, starts: bool = False) -> Iterator[ModuleType]:
    """Connect to the Ray cluster during the `with` block; yield the module with its functions.

    With `starts`, a cluster is started on this machine if there is none. Afterwards, a cluster that
    Twostroke started on this machine is stopped if it has no fleet left.
    """
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise UsageError(f"Fleets need Ray: run {install_command('cluster')}.")
    from twostroke.fleet.cluster.own_ray import OwnRay

    own_ray: OwnRay | None = None
    address = env.ray_address()
    if address is None:
        own_ray = OwnRay()
        address = own_ray.find() or (own_ray.start() if starts else None)
    if address is None:
        raise UnreachableError("No fleet runs here. RAY_ADDRESS names the cluster of another.")
    ray = importlib.import_module("twostroke.fleet.cluster.ray_cluster")  # after its token is known
    is_empty = True
    try:
        ray.connect(address)
        try:
            yield ray
        finally:
            is_empty = not ray.names()
            ray.leave()
    finally:
        if own_ray is not None and is_empty:
            own_ray.stop()


def _resolve_name(ray: ModuleType, name: str | None) -> str:
    """Return the name of the fleet that the user means.

    This is `name`; without a name, the only fleet's name.
    """
    names = ray.names()
    if name is None and len(names) == 1:
        return str(names[0])
    if name is None:
        reason = f"Which fleet? There are {', '.join(names)}." if names else "No fleet runs here."
        raise UnreachableError(reason)
    if name not in names:
        raise UnreachableError(f"There is no fleet '{name}'.{nearest(name, names)}")
    return name


def _wait(ray: ModuleType, spec: FleetSpec, timeout_s: float) -> FleetStatus:
    """Wait until all replicas of a fleet are ready; print the progress, and return the status."""
    deadline_s, shown_text = time.monotonic() + timeout_s, ""
    while True:
        status: FleetStatus = ray.status(spec.name)
        if status.is_up:
            return status
        if status.trouble:
            raise UnreachableError(f"A server of the fleet ended: {status.trouble}")
        parts = [
            f"{pool.label}: {pool.num_ready} of {pool.num_wanted} ready" for pool in status.pools
        ]
        text = "; ".join(parts)
        if text and text != shown_text:
            shown_text = text
            click.echo(printable(text), err=True)
        if time.monotonic() > deadline_s:
            raise UnreachableError(f"The fleet is not up after {timeout_s:g} s: {shown_text}.")
        time.sleep(_POLL_INTERVAL_S)


def _state(phase: str, is_current: bool, url: str) -> str:
    if phase == "starting" and not url:
        return "waits for a place"
    return phase if is_current else f"{phase}, to be replaced"
