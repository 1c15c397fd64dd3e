"""Options in a fleet's file are checked, by name and by value, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from twostroke.cli.fleet import _check_options
from twostroke.core.errors import UsageError
from twostroke.fleet.cluster.spec import read_spec

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("yaml")


def check(tmp_path: Path, options: str, router: str = "{}") -> None:
    """Check a fleet of one model with these options of `serve` and `route`."""
    path = tmp_path / "fleet.yaml"
    path.write_text(
        f"router:\n  options: {router}\nmodels:\n- model: a\n  options:\n    {options}\n"
    )
    spec, source = read_spec(path)
    _check_options(spec, source)


@pytest.mark.parametrize(
    "options",
    [
        "kv-memory: 2GB",
        "context-length: 8192",
        "no-prefix-cache: true",
        "strict: true",
        "in-process: false",
        "cors-origin: ['https://a.example', 'https://b.example']",
        "activation-bits: auto",
        "shares: '3,2'",
        "records: /var/lib/records",
    ],
)
def test_right_options_are_accepted(tmp_path: Path, options: str) -> None:
    check(tmp_path, options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            "contxt-length: 1",
            "`twostroke serve` has no option --contxt-length. Did you mean 'context-length'?",
        ),
        ("max-model-len: 1", "has no option --max-model-len. Use '--context-length' instead."),
        ("port: 1", "the fleet sets --port itself."),
        ("context-length: 1", "--context-length must be at least 2, got 1."),
        ("kv-memory: 12x", "--kv-memory: '12x' is not a size: write 512M, 2GB or 1GiB."),
        ("backend: cp", "--backend: 'cp' is not one of auto, cpu, gpu, reference, torch."),
        ("token-budget: true", "--token-budget needs a value."),
        ("strict: 1", "--strict takes no value: write true or false."),
    ],
)
def test_a_wrong_option_is_refused_with_its_line(tmp_path: Path, options: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(tmp_path, options)
    assert str(caught.value).startswith("fleet.yaml, line 6: ")
    assert reason in str(caught.value)


def test_options_of_the_router_are_checked_as_well(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 2: --wait must be from 0 to 3600, got -1"):
        check(tmp_path, "strict: true", router="{wait: -1}")
