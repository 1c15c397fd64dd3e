"""Questions without a solution: no part of `twostroke plan` gives a verdict or a price for them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from support.configs import write_config
from support.plan_checks import check_refused, is_kept

_TOO_LONG = "cannot answer these requests"
_WILD_NUMBERS = ("0", "-1", "nan", "inf", "-inf", "1e400", "1e18", "x", "")


@pytest.fixture
def wide(tmp_path):
    """The configuration of a model with 500 layers, which no single device holds."""
    folder = tmp_path / "wide"
    write_config(folder / "config.json", "8B", num_hidden_layers=500)
    return str(folder)


# What is asked, and a part of the reason. CONFIG is a model of 8B with a context of 8,192 tokens,
# WIDE one that no single device holds, TOML a file, and FLEET a file with these lines at the end.
PLANS = [
    ("plan CONFIG --on L40S --prompt 8000 --output 193", "Shorten them by 1 token,"),
    ("plan CONFIG --on L40S --output 9000", _TOO_LONG),
    ("plan CONFIG --on L40S --streams 100000", "100000 streams do not fit: at most"),
    ("plan CONFIG --on L40S --token-budget 16 --streams 20", "can decode at once"),
    ("plan CONFIG --on L40S --tpot 0.001", "times the objective"),
    ("plan CONFIG --on L40S --ttft 0.001 --tpot 1000", "times the objective"),
    ("plan CONFIG --on L40S --tpot 0.001 --ttft 1000", "times the objective"),
    ("plan CONFIG --on L40S --users 10 --ttft 0.001", "times the objective"),
    ("plan CONFIG --on L40S --think 5", "--think has no effect without --users"),
    ("plan WIDE --on L40S", "It does not fit: weights take"),
    ("plan WIDE --on L40S --users 5", "It does not fit: weights take"),
    ("plan CONFIG --on L40S --on H100-SXM --prompt 8000", _TOO_LONG),
    ("plan CONFIG --on all --prompt 8000", "Shorten them by 64 tokens"),
    ("plan CONFIG --on L40S --on L4 --streams 5000", "streams do not fit"),
    ("plan CONFIG --on L40S --on L4 --tpot 0.001", "times the objective"),
    ("plan CONFIG --on L40S --on L4 --users 9 --tpot 0.001", "times the objective"),
    ("plan WIDE --on L4 --on T4", "It does not fit"),
    ("plan buy CONFIG --on L40S --requests-per-day 9 --prompt 8000", _TOO_LONG),
    ("plan buy CONFIG --on L40S --requests-per-day 9 --tpot 0.001", "times the objective"),
    ("plan buy CONFIG --on L40S --requests-per-day 9 --ttft 0.001", "times the objective"),
    ("plan buy WIDE --on L4 --requests-per-day 9", "fit"),
    ("simulate CONFIG --on L40S --rate 1 --requests 9 --prompt 8000 --output 500", "8192 tokens"),
    ("simulate CONFIG --on L40S --rate 1 --requests 9 --prompt 9000", "8192 tokens"),
    ("simulate WIDE --on L4 --rate 1 --requests 9", "weights"),
    ("simulate CONFIG --on L40S --rate 1 --requests 9 --sweep --tpot 0.001", "times the objective"),
    ("simulate CONFIG --on L40S --rate 1 --requests 9 --kv-memory 1KB", "no context would fit"),
]
FLEETS = [
    ("  prompt: 8000", _TOO_LONG),
    ("  ttft: 0.001", "times the objective"),
    ("  tpot: 0.001", "times the objective"),
    ("budget: 0.001", "times the budget"),
    ("stock: {T4: 1}", "it fits nowhere"),
    ("stock: {T4: 1}\nobjective: performance", "it fits nowhere"),
    ("stock: {L4: 1}\nbudget: 0.001", "cannot carry the load"),
    ("stock: {L4: 1}\nbudget: 0.001\nobjective: performance", "times the budget"),
    ("budget: 0.001\nobjective: performance", "times the budget"),
    ("  requests_per_s: 1e9", "plans have at most 100,000"),
    ("devices: [L4]\nmemory_share: 0.01\nmost_devices: 1", "it fits nowhere"),
    ("devices: [MI325X]", "no price"),
]
# Options that take a number, and none of the values above.
NUMBERS = {
    "plan CONFIG --on L40S": (
        *("--prompt", "--output", "--cached", "--streams", "--users", "--token-budget", "--ttft"),
        *("--tpot", "--mfu", "--mbu", "--price", "--devices"),
    ),
    "plan CONFIG --on L40S --users 5": ("--think",),
    "plan CONFIG --on L40S --on L4": ("--prompt", "--streams", "--users", "--ttft", "--tpot"),
    "plan buy CONFIG --on L40S --requests-per-day 9": (
        *("--requests-per-day", "--growth", "--batch", "--prompt", "--output", "--cached"),
        *("--ttft", "--tpot", "--mfu", "--mbu", "--price", "--token-budget", "--utilization"),
        *("--spare", "--engineering", "--setup", "--availability", "--hours"),
    ),
    "simulate CONFIG --on L40S --rate 1 --requests 5": (
        *("--rate", "--prompt", "--output", "--spread", "--shared", "--speed", "--scale"),
        *("--acceptance", "--replicas", "--prefill-replicas", "--mfu", "--mbu", "--price"),
        *("--kv-memory", "--overhead", "--burstiness"),
    ),
}
# Values among the wild ones that these options take.
ALLOWED = {
    *(("--cached", "0"), ("--think", "0"), ("--growth", "0"), ("--batch", "0"), ("--spare", "0")),
    *(("--engineering", "0"), ("--setup", "0"), ("--spread", "0"), ("--shared", "0")),
    *(("--overhead", "0"), ("--prefill-replicas", "0")),
}


def words_of(text, names):
    return [names.get(word, word) for word in text.split()]


@pytest.mark.parametrize(
    ("is_json", "text", "reason"),
    [
        (is_json, text, reason)
        for is_json in (False, True)
        for text, reason in PLANS
        if is_json or "--on all" not in text  # which takes long, and prints what others print
    ],
)
def test_what_cannot_be_is_refused_with_the_limit(cli, config, wide, text, reason, is_json):
    words = words_of(text, {"CONFIG": config, "WIDE": wide})
    ran = cli(*words, *(["--json"] if is_json else []))
    assert ran.code != 0
    assert reason in ran.err
    if ran.out and not is_json:
        assert ran.out.startswith("No")
    elif ran.out:
        body = json.loads(ran.out)
        for plan in body.get("plans", [body]):
            check_refused(plan)


@pytest.mark.parametrize(("text", "reason"), FLEETS)
def test_what_no_fleet_can_do_is_refused_with_the_limit(cli, config, tmp_path, text, reason):
    pytest.importorskip("highspy", reason="the extra [plan] is not installed")
    path = tmp_path / "fleet.yaml"
    rate = "" if "requests_per_s" in text else "  requests_per_s: 2\n"
    path.write_text(f"models:\n- model: {config}\n{rate}{text}\n")
    ran = cli("plan", "fleet", str(path))
    assert ran.code != 0
    assert reason in ran.err
    assert ran.out == ""


@pytest.mark.parametrize("number", ["0", "-1", ".nan", ".inf", "1e400", "word"])
@pytest.mark.parametrize(
    "field",
    [
        *("  requests_per_s", "  prompt", "  output", "  ttft", "  tpot", "  value"),
        *("budget", "most_devices", "mfu", "mbu", "token_budget", "utilization", "memory_share"),
        *("stock: {L4", "prices: {L4"),
    ],
)
def test_numbers_that_no_fleet_can_have_are_refused_by_line(cli, config, tmp_path, field, number):
    pytest.importorskip("highspy", reason="the extra [plan] is not installed")
    path = tmp_path / "fleet.yaml"
    rate = "" if "requests_per_s" in field else "  requests_per_s: 2\n"
    ending = "}" if "{" in field else ""
    path.write_text(f"models:\n- model: {config}\n{rate}{field}: {number}{ending}\n")
    ran = cli("plan", "fleet", str(path))
    assert ran.code == 2
    assert "fleet.yaml, line " in ran.err
    assert field.strip().partition(":")[0] in ran.err
    assert ran.out == ""


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_that_nothing_can_have_are_refused_by_name(cli, config, text):
    for option in NUMBERS[text]:
        for number in _WILD_NUMBERS:
            if (option, number) in ALLOWED:
                continue
            ran = cli(*words_of(text, {"CONFIG": config}), option, number)
            assert ran.code != 0, (option, number, ran.out[:200])
            assert option in ran.err, (option, number, ran.err)
            assert ran.out == ""


@pytest.mark.parametrize("seed", range(2))
def test_every_yes_keeps_to_what_was_asked(cli, config, seed):
    """Of random questions, many without a solution, each chosen plan keeps all limits."""
    draw, num_chosen = random.Random(seed), 0
    for _ in range(20):
        body = {
            name: draw.choice(values)
            for name, values in _QUESTION_VALUES.items()
            if draw.random() < 0.5
        }
        options = [word for name, value in body.items() for word in (f"--{name}", str(value))]
        device = draw.choice(["L4", "L40S", "H100-SXM", "T4"])
        ran = cli("plan", config, "--on", device, "--json", *options)
        if ran.code == 2:
            continue
        plan = json.loads(ran.out)
        if plan["chosen"] is None:
            assert ran.code == 9
            check_refused(plan)
            continue
        num_chosen += 1
        assert ran.code == (0 if is_kept(plan) else 9), (options, device, plan["user_load"])
    assert num_chosen


_QUESTION_VALUES: dict[str, tuple[Any, ...]] = {
    "prompt": (1, 100, 4000, 8000, 10**6),
    "output": (1, 200, 4192, 10**6),
    "cached": (0, 0.5, 0.999),
    "streams": (1, 8, 100, 10_000),
    "users": (1, 20, 1000, 100_000),
    "ttft": (0.01, 100, 1e4),
    "tpot": (0.01, 10, 100),
    "devices": (1, 2, 64),
    "weights": ("fp8", "w4a16"),
    "token-budget": (1, 64, 8192),
    "mbu": (0.001, 0.7),
    "price": (0.001, 5),
}
