"""Which instruction-set level is chosen, and the errors for levels that cannot be used."""

from __future__ import annotations

import ctypes
import zlib

import numpy as np
import pytest

from support.native import NEEDS, native_dir, processor_flags
from twostroke.backends.cpu import records
from twostroke.backends.cpu.library import (
    INTERFACE_VERSION,
    choose_level,
    level_reports,
    load_library,
)
from twostroke.backends.sampling import rows
from twostroke.backends.sampling.rows import RESULT, ROW
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


def test_a_library_with_other_sampler_columns_is_refused(monkeypatch):
    """Libraries that were compiled before a sampling option was added are stale.

    Their sizes alone do not show it: a new column may fill padding.
    """
    columns = [(name, ROW[name]) for name in ROW.names]
    changed = {
        "a renamed column": [("other", columns[0][1]), *columns[1:]],
        "two columns in another order": [columns[1], columns[0], *columns[2:]],
        "another type of the same size": [(columns[0][0], np.dtype(np.int64)), *columns[1:]],
        "one more column": [*columns, ("new", np.dtype(np.int32))],
    }
    load_library.cache_clear()
    for change, fields in changed.items():
        changed_hash = rows.columns_hash(np.dtype(fields, align=True))
        assert changed_hash != rows.COLUMNS_HASH, change
        with monkeypatch.context() as patch:
            patch.setattr("twostroke.backends.cpu.library.COLUMNS_HASH", changed_hash)
            with pytest.raises(BackendError, match="built for another version"):
                load_library("portable")
    load_library("portable")


def test_a_changed_layout_has_a_new_interface_version():
    """A library that was compiled before a change is refused by its version.

    Its sizes alone do not show a change that keeps them, such as two fields in another order. If
    this test fails, raise `INTERFACE_VERSION` in `library.py` and `kInterfaceVersion` in
    `native/c_interface.cpp`, and write the new numbers here. The sampler's `ROW` has a hash.
    """
    layouts = [("RESULT", _layout(RESULT))]
    for name, value in vars(records).items():
        is_struct = isinstance(value, type) and issubclass(value, ctypes.Structure)
        if is_struct or (isinstance(value, np.dtype) and value is not ROW):
            layouts.append((name, _layout(value)))
    assert (INTERFACE_VERSION, zlib.crc32(repr(sorted(layouts)).encode())) == (36, 780304495)


def _layout(record):
    """Return the name, offset and size of each field of a record."""
    if isinstance(record, np.dtype):
        fields = record.fields.items()
        return [(name, offset, kind.itemsize) for name, (kind, offset, *_) in fields]
    members = [(name, getattr(record, name)) for name, *_ in record._fields_]
    return [(name, member.offset, member.size) for name, member in members]
