"""The load that a server reports to routers: its bytes, and reports of older servers."""

from __future__ import annotations

import msgspec

from twostroke.engine.status import Health
from twostroke.server.http.router_messages import SERVER_STATES, ServerLoad

_OLD = (
    b'{"status":"ok","epoch":"e-0","models":["m"],"version":"1","numerics":"n","work_s":0.5,'
    b'"prompt_tokens":7,"cached_tokens":3,"horizon_s":null}'
)
_NEW = (
    b'{"status":"ok","epoch":"e-0","models":["m"],"version":"1","numerics":"n",'
    b'"numerics_by_model":{"m":"n"},"running":2,"waiting":1,"work_s":0.5,"prompt_tokens":7,'
    b'"cached_tokens":3,"horizon_s":null,"context_length":64,"prefill_per_decode":null,'
    b'"keeps_files":true,"trusts_sender":false,"takes_any_name":true,"coalesces":false}'
)


def test_a_load_is_sent_in_these_bytes() -> None:
    load = ServerLoad(
        status="ok",
        epoch="e-0",
        models=("m",),
        version="1",
        numerics="n",
        numerics_by_model={"m": "n"},
        running=2,
        waiting=1,
        work_s=0.5,
        prompt_tokens=7,
        cached_tokens=3,
        horizon_s=None,
        context_length=64,
        prefill_per_decode=None,
        keeps_files=True,
        trusts_sender=False,
        takes_any_name=True,
        coalesces=False,
    )
    assert msgspec.json.encode(load) == _NEW
    assert msgspec.json.decode(_NEW, type=ServerLoad) == load


def test_the_load_of_an_older_server_can_be_read() -> None:
    load = msgspec.json.decode(_OLD, type=ServerLoad)
    assert load.work_s == 0.5
    assert msgspec.UNSET is load.keeps_files is load.trusts_sender is load.takes_any_name
    assert load.coalesces is msgspec.UNSET


def test_a_server_reports_each_state_of_its_engine() -> None:
    assert {"ok", "draining", *(health.value for health in Health)} - {"ready"} == set(
        SERVER_STATES
    )
