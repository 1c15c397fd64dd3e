"""The dashboard in a browser, while a model really works."""

from __future__ import annotations

import json
import threading
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Visiting = Callable[..., Any]

PROMPT = "You know everything about boats, and you say it in long and friendly sentences. " * 6
SHARES = r"/, [1-9]\d* of these/.test(document.querySelector('#pages-summary').textContent)"
VALUE = ".tile:has-text('{}') .value"


@contextmanager
def _load(server: Any, num_clients: int = 3) -> Iterator[None]:
    """Have clients ask for long answers to prompts that begin alike."""
    done = threading.Event()

    def send_request(client: int) -> None:
        messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": f"{client}"}]
        body = {"messages": messages, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        headers = {"content-type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{server.url}v1/chat/completions", data, headers)
        with urllib.request.urlopen(request) as answer:
            while not done.is_set() and answer.readline():
                pass

    clients = [
        threading.Thread(target=send_request, args=(client,)) for client in range(num_clients)
    ]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        done.set()
        for client in clients:
            client.join(30)


def _text(visit: Any, selector: str) -> str:
    return visit.page.inner_text(selector)


def test_figures_follow_the_load(visit: Visiting, server: Any) -> None:
    visit = visit(server, "#dashboard")
    running = VALUE.format("Running requests")
    visit.page.wait_for_selector(f"{running}:has-text('0')")
    assert "No running requests" in _text(visit, "section[aria-label='Running requests']")
    with _load(server):
        visit.page.wait_for_selector(f"{running}:has-text('3')", timeout=30_000)
        visit.page.wait_for_selector(f"{VALUE.format('TTFT')}:has-text('s')", timeout=30_000)
        visit.page.wait_for_selector("tr[data-place] >> nth=2")
        assert visit.page.locator("tr[data-place]").count() == 3
        rate = _text(visit, VALUE.format("Output tokens"))
        assert float(rate.removesuffix("/s")) > 0
        assert "running: now 3" in visit.page.get_attribute("svg.chart >> nth=0", "aria-label")
        assert "of the roofline" in visit.page.get_attribute(".roofline", "aria-label")
        visit.page.wait_for_selector(".roofline .point.warm")  # drawn after the first decode step
        visit.page.click("label:has-text('60 s')")
        assert "ITL" in _text(visit, "section[aria-label=Latency]")
    visit.page.wait_for_selector(f"{running}:has-text('0')", timeout=30_000)


def test_map_shows_shared_prefixes(visit: Visiting, server: Any) -> None:
    visit = visit(server, "#dashboard")
    with _load(server):
        visit.wait_for(SHARES)
        colours = visit.page.evaluate("""{
          const canvas = document.querySelector("canvas.map");
          const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const found = new Set();
          for (let at = 0; at < data.length; at += 4) {
            if (data[at + 3] === 255) found.add(data.slice(at, at + 3).join());
          }
          found.size;
        }""")
        assert colours >= 3
        visit.page.focus("canvas.map")
        visit.page.keyboard.press("ArrowRight")
        readout = _text(visit, ".readout")
        assert readout.startswith("Page 0: ")
        visit.page.keyboard.press("ArrowRight")
        assert _text(visit, ".readout").startswith("Page 1: ")
    visit.page.mouse.move(0, 0)


def test_one_of_several_models_is_chosen(models_server: Any, visit: Visiting) -> None:
    visit = visit(models_server, "#dashboard")
    table = "section[aria-label=Models]"
    visit.page.wait_for_selector(f"{table} tr:has-text('second'):has-text('unloaded')")
    assert visit.page.inner_text(f"{table} [aria-pressed=true]") == "first"
    body = {"model": "second", "prompt": "A", "max_tokens": 1}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"{models_server.url}v1/completions", json.dumps(body).encode(), headers
    )
    urllib.request.urlopen(request).close()
    loaded = f"{table} tr:has-text('second'):not(:has-text('unloaded'))"
    visit.page.wait_for_selector(f"{loaded}:has-text('loaded')")
    visit.page.click(f"{table} button:has-text('first')")
    visit.page.wait_for_selector(".about:has-text('first: llama'):has-text('not loaded')")
    assert visit.page.inner_text(f"{table} [aria-pressed=true]") == "first"


def test_prompts_that_part_are_shown_with_their_text(doctor_server: Any, visit: Visiting) -> None:
    visit = visit(doctor_server, "#dashboard")
    section = "section[aria-label='Prompts that part']"
    visit.page.wait_for_selector(f"{section}:has-text('No prompt parts from an earlier one')")
    for name in ("Ada", "Grace", "Edsger"):
        text = f"You talk with {name}. {PROMPT}"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        headers = {"content-type": "application/json"}
        data = json.dumps(body).encode()
        url = f"{doctor_server.url}v1/chat/completions"
        urllib.request.urlopen(urllib.request.Request(url, data, headers)).close()
    visit.page.wait_for_selector(f"{section}:has-text('put the changing part')", timeout=30_000)
    assert visit.page.locator(f"{section} .excerpt").count() == 0
    visit.page.check("#prompts-text")
    visit.page.wait_for_selector(f"{section} .excerpt mark:has-text('.')")
    assert "You talk with" in _text(visit, f"{section} .excerpt >> nth=0")
    visit.page.uncheck("#prompts-text")
    visit.page.wait_for_selector(f"{section} .excerpt", state="detached")


def test_a_server_without_the_doctor_shows_no_prompts(visit: Visiting, server: Any) -> None:
    visit = visit(server, "#dashboard")
    visit.page.wait_for_selector(VALUE.format("Running requests"))
    assert not visit.page.is_visible("section[aria-label='Prompts that part']")


def test_charts_begin_with_what_was_before(visit: Visiting, server: Any) -> None:
    with _load(server):
        visit = visit(server)
        visit.page.wait_for_timeout(6000)
        urls = []
        visit.page.on("request", lambda request: urls.append(request.url))
        visit.page.click("#tab-dashboard")
        line = "document.querySelector('svg.chart .line').getAttribute('d') ?? ''"
        visit.wait_for(f"({line}).split('L').length >= 3")
        states = [url for url in urls if "/api/state" in url]
        assert len(states) <= 2
        assert states[0].endswith("?past=")


def test_nothing_is_asked_while_nobody_looks(visit: Visiting, server: Any) -> None:
    visit = visit(server)
    urls = []
    visit.page.on("request", lambda request: urls.append(request.url))
    visit.page.wait_for_timeout(1500)
    assert not [url for url in urls if "/api/state" in url]
    visit.page.click("#tab-dashboard")
    visit.page.wait_for_timeout(2500)
    assert 2 <= len([url for url in urls if "/api/state" in url]) <= 4
    visit.page.click("#tab-playground")
    visit.page.wait_for_timeout(300)
    urls.clear()
    visit.page.wait_for_timeout(1500)
    assert not [url for url in urls if "/api/state" in url]


def test_dashboard_recovers_from_a_restart(visit: Visiting, own_server: Any) -> None:
    allowed = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE", "503")
    visit = visit(own_server, "#dashboard", allowed=allowed)
    visit.page.wait_for_selector(".tile .value:has-text('0')")
    own_server.stop()
    visit.page.wait_for_selector(".trouble:has-text('cannot be reached')", timeout=15_000)
    own_server.start()
    visit.page.wait_for_selector(".dashboard .trouble", state="hidden", timeout=15_000)
    visit.wait_for("/up [0-9. ]+.?s ·/.test(document.querySelector('.about').textContent)")


def test_dashboard_says_that_it_is_off(visit: Visiting, server: Any) -> None:
    visit = visit(server, allowed=("404",))
    error = {
        "error": {"message": "The dashboard is off: start `twostroke serve` with --dashboard."}
    }
    visit.page.route("**/api/state*", lambda route: route.fulfill(status=404, json=error))
    visit.page.click("#tab-dashboard")
    visit.page.wait_for_selector(".trouble:has-text('--dashboard')")
