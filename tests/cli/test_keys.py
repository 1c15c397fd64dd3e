"""`twostroke keys`: makes, lists, limits and revokes API keys in a folder of records."""

from __future__ import annotations

import json
import time
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from twostroke.server.auth.keys import ApiKeys
from twostroke.server.batch.stored_batches import Batch, insert
from twostroke.server.storage import Records, RecordsError, open_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Ran

    Cli = Callable[..., Ran]


@pytest.fixture
def keys(cli: Cli, tmp_path: Path) -> Callable[..., Ran]:
    """Return a function that runs `twostroke keys` on one folder of records."""
    return lambda *words: cli("keys", *words, "--records", str(tmp_path / "records"))


def test_key_is_printed_once_and_never_listed(keys: Callable[..., Ran], tmp_path: Path) -> None:
    with closing(Records(tmp_path / "records")):  # as a server holds it
        ran = keys("add", "app", "--tenant", "anna", "--requests-per-minute", "60")
    text = ran.out.strip()
    assert (ran.code, ran.out) == (0, f"{text}\n")
    id_ = text.split("-")[1]
    assert ran.err.startswith(f"Key {id_} of the tenant anna.")
    api_keys = ApiKeys.read(None, None, tmp_path / "records")
    assert api_keys is not None
    result = api_keys.find(text.encode())
    assert result is not None
    assert (result.id, result.tenant, result.limits.requests_per_minute) == (id_, "anna", 60)
    for words in (("list",), ("list", "--json"), ("list", "--all")):
        ran = keys(*words)
        assert id_ in ran.out
        assert text.rpartition("-")[2] not in ran.out
    [listed] = json.loads(keys("list", "--json").out)
    assert listed["name"] == "app"
    assert listed["limits"]["tokens_per_minute"] is None
    assert "digest" not in listed
    added_key = json.loads(keys("add", "other", "--json").out)
    assert (added_key["tenant"], added_key["key"][:12]) == ("other", f"ts-{added_key['id']}-")


def test_key_that_was_not_kept_leaves_no_mark(
    keys: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def full(*args: Any, **options: Any) -> Iterator[Any]:
        with open_database(*args, **options) as db:
            yield db
            raise RecordsError("The database cannot be written: the disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr("twostroke.cli.keys.open_database", full)
        assert keys("add", "app").code == 1
    mark = tmp_path / "records" / "has-keys"
    assert not mark.exists()
    assert keys("add", "app").code == 0
    with monkeypatch.context() as patch:
        patch.setattr("twostroke.cli.keys.open_database", full)
        assert keys("add", "other").code == 1
    assert mark.exists()


def test_first_key_says_which_batches_end(keys: Callable[..., Ran], tmp_path: Path) -> None:
    with closing(Records(tmp_path / "records")) as records:
        for number in range(2):
            batch = Batch(
                id=f"batch_{number}",
                tenant="",
                protocol="openai",
                endpoint="/v1/completions",
                input_file="file-1",
                window="24h",
                expires_at=2e9,
            )
            records.post(partial(insert, batch=batch)).result(20)
    output = keys("add", "app").err
    assert "2 open batches were made without a key." in output
    assert "they are cancelled" in output
    assert "open batch" not in keys("add", "other").err


def test_limits_are_changed_one_by_one(keys: Callable[..., Ran]) -> None:
    keys("add", "app", "--parallel", "4", "--expires", "30d")
    ran = keys("limit", "app", "--tokens-per-minute", "9000", "--weight", "2.5")
    assert "9,000" in ran.out
    changed = json.loads(
        keys("limit", "app", "--parallel", "none", "--expires", "none", "--json").out
    )
    assert changed["limits"] == {
        "requests_per_minute": None,
        "tokens_per_minute": 9000,
        "parallel": None,
    }
    assert (changed["weight"], changed["expires_at"]) == (2.5, None)
    expires = json.loads(keys("limit", "app", "--expires", "12h", "--json").out)["expires_at"]
    assert abs(expires - time.time() - 12 * 3600) < 60


def test_classes_are_changed_and_listed(keys: Callable[..., Ran]) -> None:
    keys("add", "app", "--classes", "flex,default,flex")
    assert json.loads(keys("list", "--json").out)[0]["classes"] == ["flex", "default"]
    assert "flex,default" in keys("list").out
    assert json.loads(keys("limit", "app", "--classes", "all", "--json").out)["classes"] is None


def test_revoked_key_is_only_listed_on_request(keys: Callable[..., Ran], tmp_path: Path) -> None:
    assert keys("add", "app").err.endswith(f"The folder {tmp_path}/records is new.\n")
    assert keys("add", "second").err.endswith("only its digest is kept.\n")
    keys("revoke", "second")
    ran = keys("revoke", "app")
    assert (ran.code, ran.err) == (0, "")
    assert "within a second" in ran.out
    assert keys("list").out == "All keys are revoked: servers refuse everybody.\n"
    assert json.loads(keys("list", "--json").out) == []
    listed = json.loads(keys("list", "--json", "--all").out)
    assert [key["state"] for key in listed] == ["revoked"] * 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("revoke", "ap"), "There is no key 'ap'."),
        (("add", "app"), "There is a key 'app'"),
        (("add", "two words"), "printable ASCII characters without spaces"),
        (("limit", "app"), "Give at least one limit"),
        (("limit", "app", "--weight", "nan"), "--weight must be from 0.01 to 1,000, got nan"),
        (
            ("limit", "app", "--parallel", "0"),
            "--parallel must be at least 1, or none for no limit",
        ),
        (("limit", "app", "--parallel", "-1"), "--parallel must be from 1 to"),
        (("limit", "app", "--parallel", "many"), "'many' is not a valid integer"),
        (("limit", "app", "--expires", "soon"), "is not a time"),
        (("limit", "app", "--expires", "2020-01-31"), "'2020-01-31' is over"),
        (("limit", "app", "--classes", "flexx"), "--classes must be classes of default, flex,"),
        (("add", "b", "--classes", "batch"), "got 'batch'"),
        (("add", "b", "--classes", ""), "got ''"),
        (("delete", "app"), "There is no command 'delete'"),
    ],
)
def test_wrong_words_are_one_sentence(
    keys: Callable[..., Ran], words: tuple[str, ...], sentence: str
) -> None:
    keys("add", "app")
    ran = keys(*words)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err


def test_folder_without_a_database_is_named(keys: Callable[..., Ran], tmp_path: Path) -> None:
    for words in (("list",), ("revoke", "app")):
        ran = keys(*words)
        assert (ran.code, ran.out) == (1, "")
        assert f"There is no database {tmp_path}/records/records.db" in ran.err


def test_a_key_may_forbid_that_its_requests_leave(keys: Callable[..., Ran], tmp_path: Path) -> None:
    def overflows() -> list[bool]:
        return [key["overflow"] for key in json.loads(keys("list", "--json").out)]

    keys("add", "app", "--no-overflow")
    keys("add", "other")
    assert overflows() == [False, True]
    keys("limit", "other", "--no-overflow")
    keys("limit", "app", "--overflow")
    assert overflows() == [True, False]
    keys("limit", "other", "--parallel", "2")  # leaves it as it is
    assert overflows() == [True, False]
    assert "OVERFLOW" in keys("list").out
