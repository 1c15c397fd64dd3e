"""The plan in a browser: sliders ask the server, and what it answers is drawn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Visiting = Callable[..., Any]

VALUE = ".plan-results .tile:has-text('{}') .value"


def _plan_requests(visit: Any) -> list[dict[str, Any]]:
    """Note the bodies of plans that are asked for from now on."""
    bodies: list[dict[str, Any]] = []
    visit.page.on(
        "request",
        lambda sent: bodies.append(json.loads(sent.post_data)) if sent.method == "POST" else None,
    )
    return bodies


def _settle(visit: Any) -> None:
    visit.page.wait_for_timeout(600)


def _text(visit: Any, name: str) -> str:
    return str(visit.page.inner_text(VALUE.format(name)))


def test_sliders_and_lists_change_the_plan(visit: Visiting, server: Any) -> None:
    visit = visit(server, "#plan")
    visit.page.wait_for_selector(VALUE.format("TTFT"))
    assert "smollm2" in visit.page.inner_text("#view-plan .about")
    assert "no price is known" in visit.page.inner_text(".plan-results .tiles")
    before = _text(visit, "TTFT")
    plan_requests = _plan_requests(visit)
    visit.page.focus("#plan-prompt")
    for _ in range(4):
        visit.page.keyboard.press("ArrowLeft")
    _settle(visit)
    assert plan_requests[-1]["prompt"] == 512
    assert len(plan_requests) <= 4
    assert visit.page.get_attribute("#plan-prompt", "aria-valuetext").startswith("512")
    assert _text(visit, "TTFT") != before
    visit.page.select_option("#plan-device", "H100-SXM")
    visit.page.select_option("#plan-weights", "w4a16")
    visit.page.focus("#plan-streams")
    visit.page.keyboard.press("ArrowRight")
    _settle(visit)
    assert (
        plan_requests[-1] | {"device": "H100-SXM", "weights": "w4a16", "streams": 1}
        == plan_requests[-1]
    )
    assert _text(visit, "Streams") == "1"
    assert _text(visit, "Cost").startswith("$")
    assert "RunPod" in visit.page.inner_text("#view-plan .about")


def test_plots_say_what_they_show(visit: Visiting, server: Any) -> None:
    visit = visit(server, "#plan")
    visit.page.wait_for_selector(VALUE.format("TTFT"))
    roofline, latency = (
        visit.page.get_attribute(f"#view-plan section[aria-label='{name}'] svg", "aria-label")
        for name in ("Roofline", "Latency and throughput")
    )
    assert "prefill of 1" in roofline
    assert "decode of" in roofline
    assert "1\u202fstream " in latency
    assert visit.page.locator(".share.warm, .share.cool").count() >= 4
    visit.page.fill("#plan-tpot_s", "90")
    visit.page.wait_for_selector("text=objective of TPOT: 90")
    assert visit.page.locator(".ttft-line, .tpot-line").count() == 2
    rows = visit.page.locator("section[aria-label='By number of streams'] tbody tr")
    assert visit.page.locator("tr.chosen").count() == 1
    assert rows.count() >= 3  # how many streams meet 90 ms depends on the machine
    visit.page.click("summary:has-text('Each formula')")
    assert "knee = " in visit.page.inner_text(".formulas")


def test_what_cannot_be_is_said_with_what_would_do(visit: Visiting, server: Any) -> None:
    visit = visit(server, "#plan", allowed=("429",))
    visit.page.wait_for_selector(VALUE.format("TTFT"))
    visit.page.fill("#plan-ttft_s", "0.001")
    visit.page.wait_for_selector(".plan-answer[data-kind=wrong]:has-text('times the objective')")
    plan_requests = _plan_requests(visit)
    visit.page.fill("#plan-ttft_s", "-3")
    _settle(visit)
    assert not plan_requests
    assert visit.page.get_attribute("#plan-ttft_s", "aria-invalid") == "true"
    error = {"error": {"message": "16 plans are waiting."}}
    visit.page.route("**/api/plan", lambda route: route.fulfill(status=429, json=error))
    visit.page.fill("#plan-ttft_s", "")
    visit.page.wait_for_selector("#view-plan .trouble:has-text('16 plans are waiting.')")
    visit.page.unroute("**/api/plan")
    visit.page.fill("#plan-tpot_s", "50")
    visit.page.wait_for_selector(".plan-answer[data-kind=right]:has-text('limited by')")
    assert visit.page.locator("#view-plan .trouble").is_hidden()


def test_a_server_without_the_dashboard_says_why(visit: Visiting, server: Any) -> None:
    visit = visit(server, allowed=("404",))
    error = {
        "error": {"message": "The dashboard is off: start `twostroke serve` with --dashboard."}
    }
    visit.page.route("**/api/plan", lambda route: route.fulfill(status=404, json=error))
    visit.page.click("#tab-plan")
    visit.page.wait_for_selector("#view-plan .trouble:has-text('--dashboard')")
    assert visit.page.title() == "Plan – Twostroke"
    visit.page.unroute("**/api/plan")
    visit.page.click("#tab-dashboard")
    visit.page.click("#tab-plan")
    visit.page.wait_for_selector(VALUE.format("TTFT"))
    assert visit.page.locator("#view-plan .trouble").is_hidden()
