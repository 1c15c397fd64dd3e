"""Which instruction-set level is chosen, and the errors for levels that cannot be used."""

from __future__ import annotations

import pytest

from support.native import NEEDS, native_dir, processor_flags
from twostroke.backends.cpu.library import choose_level, level_reports, load_library
from twostroke.core.errors import BackendError, UsageError


@pytest.fixture(autouse=True)
def built(monkeypatch):
    monkeypatch.setenv("TWOSTROKE_NATIVE_DIR", str(native_dir()))
    monkeypatch.delenv("TWOSTROKE_CPU_LEVEL", raising=False)


def test_the_best_level_that_the_processor_has_is_chosen():
    choice = choose_level(None)
    if choice.level != "portable":
        assert processor_flags() >= NEEDS[choice.level]
    assert level_reports()[choice.level].startswith("runs")
    assert load_library(choice.level).ts_level().decode() == choice.level


def test_the_probe_agrees_with_the_system(monkeypatch):
    flags = processor_flags()
    if not flags:
        pytest.skip("the system does not list the processor's flags")
    for level, report in level_reports().items():
        if level != "amx":  # may be refused although the processor has it
            assert report.startswith("runs") == (flags >= NEEDS[level])


def test_the_environment_forces_a_level(monkeypatch):
    monkeypatch.setenv("TWOSTROKE_CPU_LEVEL", "portable")
    assert choose_level(None).level == "portable"
    assert "TWOSTROKE_CPU_LEVEL" in choose_level(None).reason


def test_an_unknown_level_names_the_nearest_and_what_runs_here():
    with pytest.raises(UsageError, match=r"'portabel'.*portable.*Did you mean 'portable'"):
        choose_level("portabel")


def test_a_level_that_cannot_run_names_what_is_missing():
    missing = [name for name, report in level_reports().items() if not report.startswith("runs")]
    if not missing:
        pytest.skip("this machine runs every level")
    with pytest.raises(BackendError, match=r"Usable here: .*portable"):
        choose_level(missing[0])


def test_a_missing_library_error_says_how_to_fix_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TWOSTROKE_NATIVE_DIR", str(tmp_path))
    load_library.cache_clear()
    with pytest.raises(BackendError, match="unset TWOSTROKE_NATIVE_DIR"):
        load_library("portable")
    load_library.cache_clear()
