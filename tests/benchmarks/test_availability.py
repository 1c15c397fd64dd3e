"""What the benchmark of availability reads from the clients' answers and the router's log."""

from __future__ import annotations

from benchmarks.lab.availability import _bad_requests, _logs, _pauses_s
from twostroke.lab.measure.requests import COMPLETED, FAILED, REFUSED, Objectives
from twostroke.lab.simulator import RequestArrival, Workload
from twostroke.lab.simulator.failing_fleet import LOST_STREAM, NO_REPLICA


def answer(id_="", *, first_s=1.0, last_s=2.0, gaps=(), error=""):
    """Return the answer of a client."""
    return {
        "id": id_,
        "sent_s": 0.5,
        "first_s": first_s,
        "last_s": last_s,
        "gaps": list(gaps),
        "error": error,
    }


def test_pauses_end_when_the_router_lets_a_stream_continue():
    log = (
        "1970-01-01T00:01:43.520Z info Request req-1 continues at http://b after 3.0 s.\n"
        "1970-01-01T00:01:50.000Z info Replica http://a is ready.\n"
        "1970-01-01T00:01:49.000Z info Request req-3 continues at http://b after 0.1 s.\n"
    )
    answers = [
        answer("req-1", gaps=[(0.2, 3.5), (5.0, 5.2)]),
        answer("req-2", gaps=[(0.2, 3.5)]),  # the same gap, in a stream that was not lost
        answer("req-3", gaps=[(2.0, 2.3)]),  # a gap at another time
    ]
    assert _pauses_s(answers, log, started_at_s=100.0) == [3.3]


def test_answers_become_logs_with_their_causes():
    load = Workload("four", tuple(RequestArrival(0.5, 4, 9) for _ in range(4)))
    answers = [
        answer(),
        answer(error="503", first_s=0.0, last_s=0.0),
        answer(error="event: The server that wrote this answer was lost."),
        answer(first_s=3.0, last_s=4.0),
    ]
    logs, causes = _logs(load, answers)
    assert [log.outcome for log in logs] == [COMPLETED, REFUSED, FAILED, COMPLETED]
    assert causes == {1: NO_REPLICA, 2: LOST_STREAM}
    assert _bad_requests(logs, causes, Objectives(ttft_s=1.0)) == {1, 2, 3}
    assert _bad_requests(logs, causes, Objectives()) == {1, 2}
