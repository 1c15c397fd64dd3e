"""KV pages in Redis cannot be read, found or changed without the secret; faults are misses."""

from __future__ import annotations

import logging
import random
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from support.stored_pages import DAMAGES, OTHER_KINDS, PAGE_BYTES, PAGE_VALUE, content_of, kind
from support.stores import SECRET, Store, missing, store
from twostroke.core.errors import UsageError
from twostroke.engine.kv_offload.redis import RedisTier, check_store
from twostroke.engine.kv_offload.tier import PageValue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twostroke.engine.kv_offload.tier import KvCacheSpec

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

KEYS = [(0, bytes([number]) * 32) for number in range(8)]


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_STORE_KEY", SECRET)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Store]:
    with store(tmp_path) as running:
        yield running


def put(
    tier: RedisTier, number: int, of: KvCacheSpec | None = None, worth: PageValue = PAGE_VALUE
) -> bool:
    return tier.offer((of or kind()).name(KEYS[number]), memoryview(content_of(number)), worth)


def get(tier: RedisTier, number: int, of: KvCacheSpec | None = None) -> bytes | None:
    page = bytearray(PAGE_BYTES)
    result = tier.fetch((of or kind()).name(KEYS[number]), memoryview(page))
    return bytes(page) if result else None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_page_is_found_by_another_machine_with_the_secret(
    server: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = RedisTier(server.url, kind()), RedisTier(server.url, kind())
    names = [kind().name(key) for key in KEYS[:3]]
    assert put(first, 1)
    assert not put(second, 1), "it was written twice"
    assert second.find(names) == {names[1]}
    assert get(second, 1) == content_of(1)
    assert get(second, 2) is None
    assert first.probe() > 0
    monkeypatch.setenv("TWOSTROKE_STORE_KEY", SECRET[::-1])
    stranger = RedisTier(server.url, kind())
    assert not stranger.find(names)
    assert get(stranger, 1) is None
    for tier in (first, second, stranger):
        tier.close()


def test_the_store_learns_neither_pages_nor_names(server: Store) -> None:
    tier, client = RedisTier(server.url, kind()), server.client()
    put(tier, 1)
    put(tier, 2)
    entries = {key: client.get(key) for key in client.scan_iter()}
    for key, entry in entries.items():
        assert kind().name(KEYS[1]).hex().encode() not in key
        assert not any(content_of(number)[:16] in entry for number in (1, 2))
    assert len({entry[:12] for entry in entries.values()}) == 2, "a nonce was used twice"


def test_damaged_pages_and_pages_of_another_spec_are_misses(
    server: Store, caplog: pytest.LogCaptureFixture
) -> None:
    tier, client, rng = RedisTier(server.url, kind()), server.client(), random.Random(1)
    for number in range(4):
        put(tier, number)
    key = tier._key(kind().name(KEYS[0]))
    page_bytes, *others = (client.get(tier._key(kind().name(k))) for k in KEYS[:4])
    for damage in DAMAGES.values():
        client.set(key, damage(rng, page_bytes, others))
        assert get(tier, 0) is None
        assert not client.exists(key)
    assert "A damaged page was removed from the page store" in caplog.text
    for other in OTHER_KINDS:  # sealed with the same secret, put under the right name
        elsewhere = RedisTier(server.url, other)
        put(elsewhere, 0, other)
        client.set(key, client.get(tier._key(other.name(KEYS[0]))))
        assert get(tier, 0) is None
    assert put(tier, 0), "it is not written again"
    assert get(tier, 0) == content_of(0)


def test_entries_stay_for_a_week_after_their_use_or_as_long_as_they_are_kept(
    server: Store,
) -> None:
    tier, client, now_s = RedisTier(server.url, kind()), server.client(), time.time()
    put(tier, 1, worth=PageValue(0.1, 0, now_s))
    put(tier, 2, worth=PageValue(0.1, 0, now_s, 30 * 86_400.0))
    keys = [tier._key(kind().name(KEYS[number])) for number in (1, 2)]
    assert client.ttl(keys[0]) == pytest.approx(7 * 86_400, abs=60)
    client.expire(keys[0], 100)
    for number in (1, 2):
        put(tier, number, worth=PageValue(0.1, 0, now_s))
    assert client.ttl(keys[0]) == pytest.approx(7 * 86_400, abs=60)
    assert client.ttl(keys[1]) == pytest.approx(30 * 86_400, abs=60)


def test_a_store_that_is_gone_costs_a_miss_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with store(tmp_path) as server:
        tier = RedisTier(server.url, kind())
        put(tier, 1)
    for _ in range(3):
        assert not tier.find([kind().name(KEYS[1])])
        assert get(tier, 1) is None
        assert not put(tier, 2)
    assert len(warnings(caplog)) == 1
    assert f"127.0.0.1:{server.port} does not answer" in warnings(caplog)[0]
    with store(tmp_path, port=server.port):
        assert not put(tier, 2), "it was tried again at once"
        tier._retry_s = 0.0
        assert put(tier, 2)
        assert get(tier, 2) == content_of(2)
    assert "answers again" in caplog.text


def test_a_store_that_hangs_is_waited_for_once(
    server: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = RedisTier(server.url, kind())
    put(tier, 1)
    failures: list[Exception] = []
    fail = tier._fail

    def note_failure(error: Exception, *, writes: bool) -> None:
        failures.append(error)
        fail(error, writes=writes)
        tier._retry_s += 600  # the test may take longer than the tier leaves the store alone

    monkeypatch.setattr(tier, "_fail", note_failure)
    with server.frozen():
        for _ in range(5):
            assert get(tier, 1) is None
        assert len(failures) == 1
        tier.close()
        assert RedisTier(server.url, kind()).probe() == 0.0
    assert len(warnings(caplog)) == 2, "one of each tier"


def test_a_full_store_is_still_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with store(tmp_path) as server:
        tier = RedisTier(server.url, kind())
        put(tier, 1)
        server.client().config_set("maxmemory", "1mb")
        for number in (2, 3):
            assert not put(tier, number)
        assert get(tier, 1) == content_of(1)
    assert len(warnings(caplog)) == 1
    assert "cannot be written" in warnings(caplog)[0]


def test_the_password_is_checked_at_the_start_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with store(tmp_path, "--requirepass", "p@ss/word") as server:
        host = server.url.removeprefix("redis://")
        for wrong in (server.url, f"redis://:hunter2@{host}"):
            with pytest.raises(UsageError, match=host) as error_info:
                RedisTier(wrong, kind())
            assert "hunter2" not in str(error_info.value)
            assert str(error_info.value).endswith(".")
        assert put(RedisTier(f"redis://:p%40ss%2Fword@{host}", kind()), 1)
        monkeypatch.setenv("TWOSTROKE_STORE_PASSWORD", "p@ss/word")
        tier = RedisTier(server.url, kind())
        assert get(tier, 1) == content_of(1)
    assert get(tier, 1) is None
    assert "p@ss" not in caplog.text


def test_a_password_for_a_server_without_one_is_reported_in_sentences(tmp_path: Path) -> None:
    with store(tmp_path) as server, pytest.raises(UsageError) as error_info:
        RedisTier(server.url.replace("//", "//:secret@"), kind())
    assert "without any password" in str(error_info.value)
    assert not str(error_info.value).endswith("?.")


def test_a_store_is_reached_by_tls(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    files = ("--tls-cert-file", certificate, "--tls-key-file", key)
    with store(tmp_path, tls=(*files, "--tls-auth-clients", "no")) as server:
        trusting = RedisTier(f"{server.url}?ssl_ca_certs={certificate}", kind())
        assert put(trusting, 1)
        assert get(trusting, 1) == content_of(1)
        assert not put(RedisTier(server.url, kind()), 2), "a stranger's certificate was accepted"


@pytest.mark.parametrize("secret", [None, "", "short", "g" * 64, SECRET + "00"])
def test_a_secret_that_is_not_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, secret: str | None
) -> None:
    monkeypatch.delenv("TWOSTROKE_STORE_KEY")
    if secret is not None:
        monkeypatch.setenv("TWOSTROKE_STORE_KEY", secret)
    with pytest.raises(UsageError, match=r"TWOSTROKE_STORE_KEY is not .* openssl rand -hex 32"):
        check_store("redis://localhost")


@pytest.mark.parametrize("url", ["redis://:pass/word@h", "redis://h:abc", "redis://h?colour=red"])
def test_a_url_that_is_not_one_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="must be a URL such as") as error_info:
        check_store(url)
    assert "pass" not in str(error_info.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(UsageError, match=r"pip install '.+\[store\]'"):
        check_store("redis://localhost")


def _certificate(folder: Path) -> tuple[str, str]:
    """Return the files of a new certificate for 127.0.0.1, and of its key."""
    from ipaddress import ip_address

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    address: Any = x509.IPAddress(ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.PKCS8
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return str(files[0]), str(files[1])
