"""Options are declared once: checks, calls by name, the command line and the page follow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest

from twostroke.cli.help import WordParam
from twostroke.cli.options import click_params
from twostroke.cli.simulate import command as simulate
from twostroke.core.distributed_options import DISAGGREGATE
from twostroke.core.errors import UsageError
from twostroke.core.foreign_options import foreign_hint
from twostroke.core.option_schema import Option, OptionStruct, check, from_mapping, option_fields
from twostroke.core.options import CacheOptions, EngineOptions
from twostroke.core.sampling import SamplingParams
from twostroke.fleet.router.options import POLICY_NAMES, RouteOptions
from twostroke.fleet.routing.policy import POLICIES
from twostroke.lab.simulator.load import ARRIVALS
from twostroke.server.options import ServeOptions

ROOT = Path(__file__).parents[2]


class Example(OptionStruct):
    """An options struct with one option of each kind."""

    SECTION: ClassVar[str] = "Examples"

    count: Annotated[int | None, Option("--count", low=1, high=9, help="A count.")] = None
    share: Annotated[
        float, Option("--share", low=0, excludes_low=True, help="A share of the whole.")
    ] = 0.5
    color: Annotated[str, Option("--color", choices=("red", "green"), help="A color.")] = "red"
    size: Annotated[int | None, Option("--size", form="size", low=5_000_000, help="A size.")] = None
    is_on: Annotated[bool, Option("--on/--off", help="On or off.")] = True
    words: Annotated[tuple[str, ...], Option("--word", help="Words.")] = ()
    inner: int = 0

    def __post_init__(self) -> None:
        """Check each value."""
        check(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count must be from 1 to 9, got 0."),
        ({"count": 1.5}, "count must be an integer, got 1.5."),
        ({"count": True}, "count must be an integer, got True."),
        ({"share": 0}, "share must be greater than 0, got 0."),
        ({"share": float("inf")}, "share must be a finite number, got inf."),
        ({"share": float("nan")}, "share must be greater than 0, got nan."),
        ({"share": "half"}, "share must be a number, got 'half'."),
        ({"color": "gren"}, "color must be one of red, green, got 'gren'. Did you mean 'green'?"),
        ({"size": 10}, "size must be at least 5MB, got 10."),
        ({"is_on": "yes"}, "is_on must be true or false, got 'yes'."),
    ],
)
def test_a_value_is_checked_against_its_declaration(values: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Example(**values)
    assert str(caught.value) == message


def test_values_within_their_ranges_are_accepted() -> None:
    assert Example(count=9, share=1, color="green", size=5_000_000, is_on=False).count == 9


def test_a_misspelt_keyword_names_the_nearest_field() -> None:
    with pytest.raises(UsageError, match=r"'cont' of Example. Did you mean 'count'\?"):
        Example(cont=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'temprature' of SamplingParams.* 'temperature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_model_len", "Use 'context_length' instead."),
        ("tensor_parallel_size", "Use 'tensor' instead."),
        ("gpu_memory_utilization", "Use 'memory_bytes' instead."),
        ("n_gpu_layers", "Use 'backend' instead."),
        ("dtype", "Weights keep the format of the model's file"),
    ],
)
def test_an_option_of_another_engine_gets_a_hint_to_our_option(name: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        from_mapping(EngineOptions, {name: 1})


def test_every_hint_names_an_option_that_exists() -> None:
    from twostroke.cli import generate, serve
    from twostroke.core import foreign_options

    engine_fields = {name for part in (EngineOptions(),) for name in _all_fields(part)} | set(
        ServeOptions.__struct_fields__
    )
    fields = engine_fields | set(SamplingParams.__struct_fields__) | {"log_level"}
    params = [*serve.command.params, *generate.command.params]
    flags = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    for name, ours in foreign_options._SAME_OPTION.items():
        for candidate in ours:
            assert candidate.partition(" ")[0] in fields | flags, name


def _all_fields(options: EngineOptions) -> set[str]:
    names = set(options.__struct_fields__)
    for name in options.__struct_fields__:
        names |= set(getattr(getattr(options, name), "__struct_fields__", ()))
    return names


def test_a_hint_is_only_given_where_our_option_exists() -> None:
    assert foreign_hint("--max-model-len", ["--context-length"])
    assert not foreign_hint("--max-model-len", ["--threads"])
    assert not foreign_hint("--no-such-option", ["--threads"])


def test_options_are_built_from_names_of_all_parts() -> None:
    options = from_mapping(EngineOptions, {"context_length": 64, "accept_quality": True})
    assert options == EngineOptions(cache=CacheOptions(context_length=64), accept_quality=True)


def test_the_command_line_has_every_declared_option() -> None:
    params = {param.name: param for param in click_params(Example)}
    assert set(params) == set(option_fields(Example)) == {*Example.__struct_fields__} - {"inner"}
    assert params["is_on"].secondary_opts == ["--off"]
    assert {param.section for param in params.values()} == {"Examples"}


def test_server_and_router_share_the_options_of_http() -> None:
    shared = option_fields(ServeOptions).keys() & option_fields(RouteOptions).keys()
    assert {"host", "port", "api_keys", "drain_s", "dashboard"} <= shared


def test_router_and_simulation_offer_every_routing_function() -> None:
    assert tuple(POLICIES) == POLICY_NAMES
    assert option_fields(RouteOptions)["policy"].option.choices == POLICY_NAMES
    words = {p.name: p.type.choices for p in simulate.params if isinstance(p.type, WordParam)}
    assert tuple(words["routing"]) == POLICY_NAMES
    assert tuple(words["disaggregate"]) == DISAGGREGATE
    assert tuple(words["arrivals"]) == ARRIVALS


def test_the_reference_of_options_is_current() -> None:
    command = [sys.executable, ROOT / "tools" / "options_page.py", "--check"]
    run = subprocess.run(command, check=False)
    assert run.returncode == 0, "run `make tables` to write docs/reference/options.md"
