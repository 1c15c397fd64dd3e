"""Plans of fleets, which devices to buy and where to place models, compared with hand counts."""

from __future__ import annotations

import re
from itertools import product

import pytest

from support.configs import write_config
from twostroke.core.errors import ModelNotFoundError, UsageError
from twostroke.lab.planner import find_device, load_planned_model
from twostroke.lab.planner.fleet import make_fleet
from twostroke.lab.planner.fleet_file import at_line, read_fleet, read_fleet_with_lines
from twostroke.lab.planner.planner import Planner
from twostroke.lab.planner.replicas import DeviceGroup, Replicas

pytest.importorskip("highspy", reason="the extra [plan] is not installed")
yaml = pytest.importorskip("yaml", reason="the extra [plan] is not installed")


@pytest.fixture
def fleet(tmp_path):
    """Return a function that writes a fleet's file about models named by size, and reads it."""

    def plan_request(models, **fields):
        for model in models:
            size = model["model"]
            tied = size == "13B"
            path = tmp_path / f"{size}.json"
            model["model"] = write_config(path, size, tie_word_embeddings=tied)
        path = tmp_path / "fleet.yaml"
        path.write_text(yaml.safe_dump({"models": models, **fields}))
        return read_fleet(path)

    return plan_request


def test_three_small_models_or_one_large_one_fill_a_device(fleet):
    """40 GB hold three models of 13B in int8, or one of 34B; the objective decides."""
    load = {"weights": "int8", "requests_per_s": 0.05, "prompt": 128, "output": 32}
    small = [{"model": "13B", "name": name, **load} for name in "abc"]
    for value, expected in ((2, {"a", "b", "c"}), (4, {"d"})):
        large = {"model": "34B", "name": "d", "value": value, **load}
        fields = {"objective": "performance", "stock": {"A100-40GB": 1}, "memory_share": 1.0}
        result = make_fleet(fleet([*map(dict, small), large], **fields))
        (group,) = result.groups
        assert {replica.model for replica in group.replicas} == expected
        assert group.memory_share <= 1
        assert {model.model for model in result.models if model.carried > 0} == expected


def test_performance_prices_only_what_others_would_lose(fleet):
    load = {"weights": "int8", "requests_per_s": 0.05, "prompt": 128, "output": 32}
    models = [{"model": "13B", "name": name, **load} for name in "ab"]
    fields = {"objective": "performance", "stock": {"A100-40GB": 3}, "memory_share": 1.0}
    assert {
        model.next_usd for model in make_fleet(fleet(list(map(dict, models)), **fields)).models
    } == {0}
    models = [{**model, "requests_per_s": 500} for model in models]
    assert all(model.next_usd > 0.01 for model in make_fleet(fleet(models, **fields)).models)


def test_a_fleet_carries_its_loads_within_every_limit(fleet):
    models = [
        {"model": "70B", "requests_per_s": 8, "weights": ["bf16", "fp8"], "tpot": 40, "ttft": 500},
        {"model": "8B", "requests_per_s": 3, "weights": "fp8", "tpot": 30},
        {"model": "13B", "requests_per_s": 0.2, "weights": "int8"},
    ]
    stock = {"H100-SXM": 6, "A100-80GB": 8, "L40S": 4}
    question = fleet(models, stock=stock, mfu=0.5, mbu=0.7)
    result = make_fleet(question)
    assert all(model.carried == pytest.approx(model.load, rel=1e-4) for model in result.models)
    assert result.least_usd <= result.usd_per_hour < 1.5 * result.least_usd
    used = dict.fromkeys(stock, 0)
    for group in result.groups:
        used[group.device] += group.count * group.times
        assert group.memory_share <= 1
        assert group.time_share <= 1
        assert len({replica.model for replica in group.replicas}) == len(group.replicas)
        for replica in group.replicas:
            if replica.model == "70B":
                assert replica.tpot_s <= 0.040
                assert replica.ttft_s <= 0.5
    assert all(used[name] <= count for name, count in stock.items())
    price = sum(count * find_device(name).usd_per_hour for name, count in used.items())
    assert result.usd_per_hour == pytest.approx(price)
    for other in result.alternatives:  # nothing cheaper was passed over
        assert other.missing_share > 0 or other.usd_per_hour >= result.usd_per_hour - 1e-9


def test_the_cheapest_fleet_is_that_of_a_count_by_hand(fleet):
    kinds = ("L40S", "A100-80GB", "H100-SXM")
    question = fleet([{"model": "8B", "requests_per_s": 30, "tpot": 50}], devices=list(kinds),
                     most_devices=1)  # fmt: skip
    model = question.models[0]
    planner = Planner(
        load_planned_model(model.model),
        find_device("L4"),
        model.question(1, 1, question.token_budget),
    )
    replicas, rates, usd = Replicas(0, planner, 30, 0.8), [], []
    for name in kinds:
        device = find_device(name)
        group = DeviceGroup(device, 1, device.memory_bytes * 0.9, device.usd_per_hour, name)
        rates.append(max(replica.requests_per_s for replica in replicas.on_group(group)))
        usd.append(device.usd_per_hour)
    counts = product(range(40), repeat=3)
    carrying = (n for n in counts if sum(c * r for c, r in zip(n, rates, strict=True)) >= 30)
    min_usd = min(sum(c * u for c, u in zip(n, usd, strict=True)) for n in carrying)
    assert make_fleet(question).usd_per_hour == pytest.approx(min_usd, rel=0.002)


def test_an_impossible_fleet_says_by_how_much_and_what_helps(fleet):
    load = {"requests_per_s": 20, "prompt": 2048}
    for models, fields, words in (
        ([{"model": "70B", **load}], {"stock": {"H100-SXM": 2}}, r"missing.*70B.*Enough would be"),
        ([{"model": "8B", **load}], {"budget": 0.5}, "times the budget"),
        (
            [{"model": "8B", **load}],
            {"stock": {"H100-SXM": 64}, "budget": 0.5},
            "The budget is too small: the cheapest fleet costs .* times the budget",
        ),
        ([{"model": "8B", **load, "tpot": 0.1}], {}, r"TPOT is at least .* times the objective"),
        ([{"model": "8B", **load, "ttft": 0.1}], {}, r"TTFT is at least .* times the objective"),
        ([{"model": "70B", **load}], {"devices": ["T4"]}, "fits nowhere.*T4 offers"),
        ([{"model": "70B", "requests_per_s": 1e7}], {}, "plans have at most 100,000"),
    ):
        result = make_fleet(fleet(models, **fields))
        assert result.groups == ()
        assert re.search(words, result.verdict)
    with pytest.raises(UsageError, match="no price for MI325X"):
        make_fleet(fleet([{"model": "8B", **load}], stock={"MI325X": 1}))


def test_a_wrong_file_names_the_line_and_the_nearest_word(tmp_path):
    path = tmp_path / "fleet.yaml"
    model = "models:\n- model: smollm2\n  requests_per_s: 1\n"
    for text, words in (
        (model + "  promt: 3\n", r"line 4: there is no field 'promt'\. Did you mean 'prompt'"),
        (model + "stok: {L4: 1}\n", r"line 4: there is no field 'stok'\. Did you mean 'stock'"),
        (
            model + "  prompt: many\n",
            r"line 4: must be a whole number such as 2048, got a text \(mod",
        ),
        (model + "  prompt: 2.5\n", "line 4: must be a whole number such as 2048, got a fraction"),
        (model + "  prompt: 010\n", "line 4: must be a whole number"),
        (model + "  cached: 10%\n", "line 4: must be a number such as 2.5 or 1e3, got a text"),
        (
            model + "stock: {L4: 1000000000}\n",
            "stock must be greater than 0 and less than 1,000,000,000, got 1000000000 L4",
        ),
        (model + "  tpot: .inf\n", r"line 4: models\[0\].tpot must be a finite number, got inf"),
        (model + "mfu: .nan\n", "line 4: mfu must be from 0.001 to 1, got nan"),
        (model + "  ttft: -1\n", "line 4: ttft must be greater than 0 and at most .*, got -1"),
        (model + "  weights: int9\n", "line 4: weights .*Did you mean 'int8'"),
        (model + "mfu: 2\n", "line 4: mfu must be from 0.001 to 1, got 2"),
        (model + "stock:\n  L4: 1\n  H100-SXN: 2\n", "line 6: .*Did you mean 'H100-SXM'"),
        (
            model + "objective: fast\n",
            "line 4: objective must be one of cost, performance",
        ),
        ("models: []\n", "line 1: models must name at least one"),
        ("models: [\n", "line 2: this is not YAML"),
        ("[" * 3000, "fleet.yaml: this is not YAML"),
        (model + "  requests_per_s: 2\n", "line 4: .*'requests_per_s' stands there twice"),
        ("", r"line 1: must be fields \(name: value\), got nothing"),
        ("models:\n- requests_per_s: 1\n", r"line 2: models\[0\].model is missing"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_fleet(path)


def test_numbers_are_read_as_yaml_has_them_now(tmp_path):
    path = tmp_path / "fleet.yaml"
    for text, value in (("1e1", 10), ("1E+1", 10), ("2.5e-1", 0.25), (".5", 0.5), ("10", 10)):
        path.write_text(f"models:\n- model: smollm2\n  prompt: 2e3\n  requests_per_s: {text}\n")
        (model,) = read_fleet(path).models
        assert (model.prompt, model.requests_per_s) == (2000, value)


def test_a_model_is_called_by_the_last_part_of_its_path(tmp_path):
    path = tmp_path / "fleet.yaml"
    for model, label in (
        ("qwen2.5-coder-1.5b", "qwen2.5-coder-1.5b"), ("hf:Qwen/Qwen2.5-7B", "Qwen2.5-7B"),
        ("./a.b.gguf", "a.b"), ("/m/llama-3.1/config.json", "llama-3.1"), ("./c.json", "c"),
    ):  # fmt: skip
        path.write_text(f"models:\n- model: {model}\n  requests_per_s: 1\n")
        assert read_fleet(path).models[0].label == label


def test_a_model_that_is_not_there_is_named_with_its_line(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text("mfu: 0.5\nmodels:\n- requests_per_s: 1\n  model: ./nothing.gguf\n")
    question, lines = read_fleet_with_lines(path)
    with pytest.raises(ModelNotFoundError) as caught:
        make_fleet(question)
    error = at_line(lines, caught.value)
    assert isinstance(error, ModelNotFoundError)
    assert str(error).startswith("fleet.yaml, line 4: ")
