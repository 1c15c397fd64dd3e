"""Environment variables: the cache folder, and homes that a user does not have."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from twostroke.core import env
from twostroke.core.errors import UsageError
from twostroke.lab.planner.models import load_planned_model
from twostroke.lab.simulator.traces import read_trace
from twostroke.model.hub.names import look_up

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a home folder: no variable, no entry, as in containers with any user id."""

    def no_entry(user: object) -> None:
        raise KeyError(user)

    for name in ("HOME", "TWOSTROKE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setattr(pwd, "getpwnam", no_entry)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_is_told_which_variable_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="set TWOSTROKE_CACHE to a folder"):
        env.cache_dir()
    monkeypatch.setenv("TWOSTROKE_CACHE", "/a")
    assert env.cache_dir() == Path("/a")
    monkeypatch.setenv("TWOSTROKE_CACHE", "~/a")
    with pytest.raises(UsageError, match="no home folder '~'"):
        env.cache_dir()


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("read", [look_up, load_planned_model, read_trace, env.expand_home])
@pytest.mark.parametrize("path", ["~/a.gguf", "~nobody-here/a.gguf"])
def test_a_path_in_an_unknown_home_is_refused(read: Callable[[str], object], path: str) -> None:
    with pytest.raises(UsageError, match=r"There is no home folder '~.*write the whole path"):
        read(path)
