"""Plans of models that have only a configuration, compared with figures computed by hand."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from support.configs import write_config
from support.tiny import Tiny, write_tiny_gguf
from twostroke.core.errors import ModelFormatError, UsageError
from twostroke.lab.planner import (
    Device,
    Question,
    find_device,
    known_devices,
    load_planned_model,
    make_plan,
)
from twostroke.lab.planner.planner import Planner
from twostroke.lab.planner.queueing import loads, user_load
from twostroke.lab.planner.roofline import kv_bytes
from twostroke.lab.planner.words import answer_sentences, plan_facts
from twostroke.model.program.batch import BatchShape


@pytest.fixture
def model(tmp_path):
    def make(name, **changes):
        return load_planned_model(write_config(tmp_path / f"{name}.json", name, **changes))

    return make


def test_bytes_of_keys_and_values(model):
    for name, expected in (
        ("13B", 819_200),
        ("8B", 131_072),
        ("70B", 327_680),
        ("405B", 516_096),
    ):
        assert kv_bytes(model(name), Question(), 1) == expected
    batch = 32 * kv_bytes(model("13B"), Question(), 2048)
    assert batch == pytest.approx(53.687e9, rel=1e-5)
    eight = kv_bytes(model("70B"), Question(), 8192)
    assert eight == pytest.approx(2.684e9, rel=1e-3)
    # 16 devices, 8 heads: two devices hold each head.
    assert kv_bytes(model("8B"), Question(count=16), 1) == 2 * 131_072


def test_requests_take_the_bytes_of_their_recurrent_states(tmp_path):
    large = Tiny(family="qwen3.5", num_layers=8, context_length=4096)
    hybrid = load_planned_model(str(write_tiny_gguf(tmp_path / "hybrid.gguf", large)))
    state_bytes = hybrid.program.state_bytes
    assert state_bytes > 50_000
    question = Question(prompt=1000, output=24)
    memory = Planner(hybrid, find_device("H100-SXM"), question).memory()
    assert memory.kv_per_request == kv_bytes(hybrid, question, 1024) + 2 * state_bytes
    free = memory.usable - memory.weights
    assert memory.most_streams == int(free // memory.kv_per_request)


def test_a_stream_reads_all_weights_once_for_each_token(model):
    large = model("70B")
    plan = make_plan(large, find_device("H100-SXM"), Question(prompt=1, output=1, count=2))
    assert large.num_weights == pytest.approx(70.55e9, rel=1e-3)
    embedding = 128256 * 8192 * 2  # a token reads one row of it
    read = large.all_bytes - embedding
    assert plan.rows[0].tpot_s == pytest.approx(read / (2 * 3.35e12), rel=1e-3)
    assert plan.rows[0].mbu == pytest.approx(1, abs=0.01)
    assert plan.knee == pytest.approx(295, abs=1)
    prefill = make_plan(large, find_device("H100-SXM"), Question(prompt=1024, count=2))
    linear = 2 * (large.num_weights - 2 * 128256 * 8192) * 1024
    assert prefill.ttft_s == pytest.approx(linear / (2 * 989e12), rel=0.15)  # attention, links


def test_a_model_that_does_not_fit_says_what_would_help(model):
    plan = make_plan(model("70B"), find_device("H100-SXM"), Question())
    assert plan.chosen_row is None
    assert "does not fit" in plan.verdict
    assert "2 of them are enough; weights in w4a16 take" in plan.verdict
    small = model("8B")
    long = make_plan(small, find_device("L4"), Question(prompt=100_000))
    count = int(long.verdict.split("output of ")[1].split(" ")[0].replace(",", ""))
    for prompt, fits in ((count - 256, True), (count - 255, False)):
        plan = make_plan(small, find_device("L4"), Question(prompt=prompt))
        assert ("does not fit" not in plan.verdict) is fits
    two = make_plan(model("70B"), find_device("H100-SXM"), Question(count=2))
    assert two.chosen_row is not None
    assert two.chosen_row.streams == two.memory.most_streams == 6
    assert next(answer_sentences(two)).startswith("Yes: 6 streams (limited by memory) ")


def test_objectives_choose_the_streams(model):
    device, large = find_device("H100-SXM"), model("70B")
    free = make_plan(large, device, Question(count=4))
    question = Question(count=4, tpot_s=0.0125)
    plan = make_plan(large, device, question)
    assert free.memory.most_streams > free.chosen_row.streams == 256 > plan.chosen_row.streams > 1
    planner = Planner(large, device, question)
    assert planner.tpot_s(plan.chosen_row.streams) <= question.tpot_s
    assert planner.tpot_s(plan.chosen_row.streams + 1) > question.tpot_s
    assert plan.chosen_row.tpot_s == planner.tpot_s(plan.chosen_row.streams)
    assert (free.bound, plan.bound) == ("the default", "TPOT")
    assert make_plan(large, device, replace(question, streams=2)).bound == ""
    for impossible, words in (
        (Question(count=4, tpot_s=0.005), "needs at least 9 devices"),
        (Question(count=4, ttft_s=0.03), "needs at least 8 devices"),
        # 160 all-reduces of 1,024 x 8,192 values take nearly 11.9 ms, however many devices.
        (Question(count=4, ttft_s=0.0119), "1,024 devices are not enough"),
        (Question(count=4, ttft_s=0.001), "times the objective"),
        (Question(count=4, ttft_s=5e-324), "1,024 devices are not enough"),
        (Question(count=4, streams=5000), "do not fit"),
        (replace(question, streams=99), f"; at most {plan.chosen_row.streams} would meet it."),
        (Question(count=4, ttft_s=0.046, streams=99), "with 99 streams, 1.1"),
    ):
        refused = make_plan(large, device, impossible)
        assert refused.chosen_row is None
        assert words in refused.verdict


def test_prompts_of_others_make_tokens_late(model):
    """TPOT and throughput agree: streams = requests per second times the time of a request."""
    large = model("70B")
    question = Question(count=4, prompt=2048, output=300)
    planner = Planner(large, find_device("H100-SXM"), question)
    plan = make_plan(large, find_device("H100-SXM"), question)
    assert plan.rows[0].tpot_s == plan.rows[0].step_s
    for row in plan.rows[1:]:
        assert row.tokens_per_s == pytest.approx(300 * row.requests_per_s)
        request_s = planner.prompt_s(row.streams) + 300 * row.tpot_s
        assert row.streams / request_s == pytest.approx(row.requests_per_s)
        assert row.tpot_s > 1.02 * row.step_s
    # A prompt alone reads the weights for itself; one among others does not.
    assert 0.8 < planner.prompt_s(64) / plan.ttft_s < 1


def test_a_long_prompt_is_prefilled_in_chunks(model):
    """Weights are read for each chunk, and a chunk's attention grows with its start."""
    large, device = model("8B"), find_device("H100-SXM")
    base = Question(prompt=20_000, output=1000, cached=0.1)
    default_plan = make_plan(large, device, base)
    for budget in (128, 2048):
        question = replace(base, token_budget=budget)
        planner = Planner(large, device, question)
        starts = range(2000, 20_000, budget)
        steps = [
            planner.roofline.step(BatchShape((start,), (min(budget, 20_000 - start),), 0))
            for start in starts
        ]
        logits_s = planner.prefill().ops["logits"].seconds
        assert planner.prefill().seconds == pytest.approx(sum(s.seconds for s in steps) + logits_s)
        plan = make_plan(large, device, question)
        assert plan.ttft_s == planner.prefill().seconds
        assert plan.prefill.bytes > len(starts) * 0.9 * large.all_bytes
        assert any(f" in {len(starts)} steps of at most {budget}: " in line for line in plan.steps)
        assert f"computed in {len(starts)} steps of {budget:,}: " in "".join(plan_facts(plan))
        others = planner.decode(9).seconds
        left = budget - 9
        extra = 0.0
        for start in range(2000, 20_000, left):
            count = min(left, 20_000 - start)
            sampled = 9 + (start + count == 20_000)
            shape = BatchShape((*(20_500,) * 9, start), (*(1,) * 9, count), sampled)
            extra += planner.roofline.step(shape).seconds - others
        assert planner.prompt_s(10) == pytest.approx(extra, rel=0.005)
        first_s = extra + planner.num_chunks(10) * others
        assert planner.ttft_s(10) == pytest.approx(first_s, rel=0.005)
    assert default_plan.ttft_s < 1.02 * plan.ttft_s
    assert (
        make_plan(large, device, replace(base, token_budget=128)).ttft_s > 1.9 * default_plan.ttft_s
    )
    assert (
        make_plan(large, device, replace(base, token_budget=20_000)).ttft_s == default_plan.ttft_s
    )


def test_steps_are_full_with_streams_and_their_prompts(model):
    small, device = model("8B"), find_device("H100-SXM")
    question = Question(prompt=1000, output=250, token_budget=500)
    plan = make_plan(small, device, question)
    assert question.max_decoding_streams == plan.chosen_row.streams == plan.rows[-1].streams == 100
    assert "(limited by prompts)" in "".join(answer_sentences(plan))
    assert "fill steps of 500 tokens" in "".join(answer_sentences(plan))
    refused = make_plan(small, device, replace(question, streams=101))
    assert refused.chosen_row is None
    assert refused.verdict.endswith("steps of at least 505 tokens (--token-budget).")
    assert make_plan(small, device, replace(question, streams=101, token_budget=505)).chosen_row


def test_a_load_waits_as_theory_says(model, monkeypatch):
    """With prompts of a second and answers of a token, M/D/1 waits rho / (2 (1 - rho)) seconds."""
    planner = Planner(model("8B"), find_device("L4"), Question(output=1))
    monkeypatch.setattr(planner, "prompt_s", lambda _: 1.0)
    monkeypatch.setattr(planner, "step_s", lambda _: 1e-9)
    for load in loads(planner, 4000):
        assert load.requests_per_s == pytest.approx(load.share)
        wait_s = load.share / (2 * (1 - load.share))
        assert load.ttft_s == pytest.approx(1 + wait_s, rel=1e-6)
        assert load.at_work == pytest.approx(load.share / (1 - load.share))  # M/G/1, shared


def test_means_stay_near_where_prompts_cost_nothing_among_others(model):
    """A short prompt computed alone reads all weights; in a decode step it costs nothing more."""
    for prompt in (1, 16):
        question = Question(prompt=prompt, output=1, streams=2)
        plan = make_plan(model("8B"), find_device("H100-SXM"), question)
        for load in plan.loads:
            assert plan.ttft_s < load.ttft_s < 12 * plan.ttft_s


def test_a_request_that_comes_alone_sees_the_times_of_one_stream(model, monkeypatch):
    monkeypatch.setattr("twostroke.lab.planner.queueing.SHARES", (1e-9,))
    for question in (
        Question(),
        Question(output=2),
        Question(streams=1),
        Question(token_budget=300),
    ):
        planner = Planner(model("8B"), find_device("L4"), question)
        for streams in (1, 60):
            (light,) = loads(planner, streams)
            assert light.ttft_s == pytest.approx(planner.prefill().seconds, rel=1e-6)
            assert light.tpot_s == pytest.approx(planner.tpot_s(1), rel=1e-6)


def test_loads_agree_with_littles_law(model):
    planner = Planner(model("8B"), find_device("L4"), Question(output=100))
    light, *_, heavy = loads(planner, 40)
    assert light.ttft_s < heavy.ttft_s
    assert light.tpot_s < heavy.tpot_s < planner.row(40).tpot_s
    for load in (light, heavy):
        in_system_s = load.ttft_s + 99 * load.tpot_s
        assert load.at_work == pytest.approx(load.requests_per_s * in_system_s, rel=0.1)


def test_one_user_sees_the_times_of_a_request_that_comes_alone(model):
    planner = Planner(model("8B"), find_device("L4"), Question(users=1, think_s=3.0, output=50))
    load = user_load(planner, 8)
    assert load.ttft_s == pytest.approx(planner.prefill().seconds, rel=1e-6)
    assert load.tpot_s == pytest.approx(planner.tpot_s(1), rel=1e-6)
    assert load.requests_per_s == pytest.approx(1 / (3.0 + load.response_s), rel=0.02)


def test_users_wait_for_one_server_as_machines_for_one_repairman(model, monkeypatch):
    """The finite-source queue M/M/1//N: users are served one at a time, a second each."""
    question = Question(users=6, think_s=4.0, output=1, ttft_s=100.0)  # else no request would queue
    planner = Planner(model("8B"), find_device("L4"), question)
    monkeypatch.setattr(planner, "prompt_s", lambda _: 1.0)
    monkeypatch.setattr(planner, "step_s", lambda _: 1e-9)
    load = user_load(planner, 1)
    weights = [math.perm(6, number) / 4.0**number for number in range(7)]
    throughput = 1 - weights[0] / sum(weights)
    assert load.requests_per_s == pytest.approx(throughput, rel=1e-6)


def test_more_users_wait_longer_and_get_more_replicas(model):
    def load_of(users, ttft_s=1e6, **objectives):
        question = Question(users=users, think_s=5.0, output=64, ttft_s=ttft_s, **objectives)
        planner = Planner(model("8B"), find_device("L4"), question)
        return user_load(planner, 32)

    few, many = load_of(4), load_of(400)
    assert few.ttft_s < many.ttft_s
    assert few.requests_per_s < many.requests_per_s <= 400 / 5.0
    shared = load_of(400, ttft_s=1.0, tpot_s=0.12)
    assert (shared.meets_objectives, shared.num_replicas > 1) == (True, True)
    assert shared.ttft_s <= 1.0
    fewer = load_of(math.ceil(400 / (shared.num_replicas - 1)))
    assert fewer.ttft_s > 1.0 or fewer.tpot_s > 0.12, "one replica less would be too few"
    assert not load_of(400, ttft_s=1e-4).meets_objectives


def test_without_an_objective_users_get_replicas_on_which_nobody_queues(model):
    question = Question(users=2000, think_s=5.0, output=64)
    load = user_load(Planner(model("8B"), find_device("L4"), question), 32)
    assert load.num_replicas > 1
    waiting = load.users_per_replica - load.requests_per_s / load.num_replicas * 5.0
    assert waiting <= 33
    alone = Planner(model("8B"), find_device("L4"), replace(question, users=30))
    assert user_load(alone, 32).num_replicas == 1


@pytest.mark.parametrize(
    ("size", "count", "change", "other"),
    [
        ("13B", 1, "8 queries for each key", {"num_key_value_heads": 5}),
        ("8B", 2, "8 queries for each key", {"num_key_value_heads": 4}),
        ("8B", 1, "a window of 4,096 tokens", {"sliding_window": 4096}),
    ],
)
def test_other_attention_is_planned_as_the_model_that_has_it(model, size, count, change, other):
    question = Question(prompt=7000, count=count, streams=3, token_budget=2048)
    device, family = find_device("H100-SXM"), {"model_type": "mistral", "sliding_window": None}
    plan = make_plan(model(size, **family).with_weights("fp8"), device, question)
    predicted = {what_if.change: what_if for what_if in plan.what_ifs}[change]
    trained = make_plan(model(size, **family | other).with_weights("fp8"), device, question)
    (expected, *_) = trained.what_ifs
    assert predicted.most_streams == expected.most_streams
    assert predicted.ttft_s == pytest.approx(expected.ttft_s, rel=1e-4)  # but for rotation of keys
    assert predicted.tpot_s == pytest.approx(expected.tpot_s, rel=1e-4)
    assert predicted.tpot_s < plan.chosen_row.tpot_s
    assert change not in {what_if.change for what_if in trained.what_ifs}


def test_each_figure_follows_from_the_numbers_of_its_formula(model):
    """Evaluate the printed formulas with their printed numbers, to as many digits."""
    for size, count in (("70B", 4), ("8B", 16)):
        question = Question(prompt=2048, output=300, count=count, tpot_s=0.04, token_budget=2048)
        plan = make_plan(model(size), find_device("H100-SXM"), question)
        row, formulas = plan.chosen_row, {}
        for line in plan.steps:
            name, _, rest = line.partition(" = ")
            formulas[name] = rest.split(" = ")
        numbers = {
            "KV of a token": plan.memory.kv_per_token,
            "TTFT": row.ttft_s,
            "TPOT": row.tpot_s,
            "time of a request": 1 / row.requests_per_s,
            "$ per 1M output tokens": row.usd_per_million,
            "J per token": row.joules_per_token,
            "prefill devices per decode device": plan.prefill_per_decode,
        }
        for name, value in numbers.items():
            written, result = (part.replace(",", "") for part in formulas[name][-2:])
            assert float(result.split(" ")[0]) == pytest.approx(value, rel=1e-3)
            written = (
                written.replace(" x ", " * ").replace("W", "").replace("(devices / heads)", "")
            )
            assert eval(written) == pytest.approx(value, rel=2e-3)


def test_a_request_beyond_the_context_has_no_plan_and_the_longest_that_fits_is_named(model):
    device, question = find_device("L4"), Question(prompt=9000)
    short, wide = (model("8B", max_position_embeddings=size) for size in (8192, 131072))
    refused = make_plan(short, device, question)
    assert "or one request of 8,192 tokens, the whole context." in "".join(plan_facts(refused))
    assert (refused.chosen_row, refused.fits) == (None, False)
    assert "9,256 tokens together, and its context ends at 8,192." in refused.verdict
    assert make_plan(short, device, Question(prompt=7936)).chosen_row is not None
    plan = make_plan(wide, device, question)
    assert plan.verdict == ""
    most_tokens = plan.memory.most_tokens
    assert most_tokens % 256 == 0
    assert most_tokens * 131_072 <= 24e9 * 0.9 - wide.all_bytes < (most_tokens + 256) * 131_072
    assert make_plan(wide, find_device("H100-SXM"), question).memory.most_tokens == 131072


def test_a_thousand_requests_cost_what_their_tokens_do(model):
    plan = make_plan(model("8B"), find_device("L4"), Question(output=200))
    row = plan.chosen_row
    assert row.usd_per_1k == pytest.approx(row.usd_per_million * 200 * 1000 / 1e6)
    assert row.usd_per_1k == pytest.approx(0.44 / 3600 / row.requests_per_s * 1000)
    assert f"; 1,000 requests cost {row.usd_per_1k:.3g} $." in next(answer_sentences(plan))


def test_what_ifs_go_the_right_way(model):
    plan = make_plan(model("8B"), find_device("A100-80GB"), Question(streams=4))
    what_ifs = {what_if.change: what_if for what_if in plan.what_ifs}
    unchanged = what_ifs["as asked"]
    assert what_ifs["weights w4a16"].tpot_s < 0.4 * unchanged.tpot_s
    assert what_ifs["weights w4a16"].ttft_s == unchanged.ttft_s
    assert what_ifs["50% of the prompt cached"].ttft_s < 0.6 * unchanged.ttft_s
    assert what_ifs["keys and values int8"].most_streams > 1.8 * unchanged.most_streams
    speculation = next(
        what_if for name, what_if in what_ifs.items() if name.startswith("speculation")
    )
    assert speculation.tpot_s < 0.7 * unchanged.tpot_s
    assert speculation.usd_per_million < unchanged.usd_per_million


def test_a_window_bounds_the_cache(model):
    config = {"model_type": "mistral", "sliding_window": 1000}
    windowed = model("8B", **config)
    full_bytes = kv_bytes(model("8B"), Question(), 10_000)
    assert kv_bytes(windowed, Question(), 10_000) == full_bytes / 10


def test_efficiency_and_price_scale(model):
    device, small = find_device("L4"), model("8B")
    base = make_plan(small, device, Question(streams=1)).rows[0]
    plan = make_plan(small, device, Question(streams=1, mfu=0.5, mbu=0.5))
    assert "50% of the arithmetic and 50% of the bandwidth." in list(plan_facts(plan))[-1]
    half = plan.rows[0]
    assert half.tpot_s == pytest.approx(2 * base.tpot_s)
    assert half.mbu == pytest.approx(base.mbu / 2)
    dear = make_plan(small, device, Question(streams=1, usd_per_hour=4.4)).rows[0]
    assert dear.usd_per_million == pytest.approx(10 * base.usd_per_million)


def test_devices_come_from_the_table_or_a_file(tmp_path):
    assert len(known_devices()) > 25
    with pytest.raises(UsageError, match="Did you mean 'H100-SXM'"):
        find_device("H100-SXN")
    with pytest.raises(UsageError, match=r"Did you mean H100-PCIe or H100-SXM\?"):
        find_device("h100")
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nmemory_gb = 48\nbandwidth_gb_s = 900\nbf16_tflops = 180\n')
    assert find_device(str(path)) == Device("mine", 48e9, 900e9, {"bf16": 180e12})
    nested = f"a = {'[' * 5000}{']' * 5000}\n"
    for text in ('name = "mine"', "memory_gb = x", path.read_text() + "memory = 3\n", nested):
        path.write_text(text)
        with pytest.raises(UsageError, match="does not describe a device"):
            find_device(str(path))
    head = 'name = "mine"\nbandwidth_gb_s = 900\nbf16_tflops = 180\n'
    for name in ("memory_gb", "link_gb_s", "tdp_w", "fp8_tflops", "usd_per_hour"):
        for value in ("-1", "0", "nan", "inf"):
            path.write_text(f"{head}{name} = {value}\n")
            with pytest.raises(UsageError, match=rf"mine.toml, line 4: {name} must be greater"):
                find_device(str(path))
    path.write_text(f"{head}usd_per_hour = 0.8\n")
    plan = make_plan(
        load_planned_model(write_config(tmp_path / "8b.json", "8B")),
        find_device(str(path)),
        Question(),
    )
    assert "Price: 0.8 $ an hour." in plan_facts(plan)
    for text, words in (
        (head.replace("mine", " "), "mine.toml, line 1: name must not be empty"),
        (f'{head}"memory_gb" = 0\n', "mine.toml, line 4: memory_gb must be greater"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=words):
            find_device(str(path))


def test_sizes_that_a_configuration_leaves_out_are_named(tmp_path):
    path = tmp_path / "bare" / "config.json"
    path.parent.mkdir()
    for text, words in (
        ('{"model_type": "llama"}', "leaves out hidden_size, num_hidden_layers, num_attention_"),
        ('{"model_type": "llama", "num_hidden_layers": 9}', "leaves out hidden_size, num_att"),
    ):
        path.write_text(text)
        plan = make_plan(
            load_planned_model(str(path)).with_weights("fp8"), find_device("L4"), Question()
        )
        assert any(words in line for line in plan_facts(plan))
    complete = load_planned_model(write_config(tmp_path / "8b.json", "8B"))
    assert make_plan(complete, find_device("L4"), Question()).assumed == ()


def test_bad_questions_and_models_are_refused(tmp_path):
    for field, value in (
        ("prompt", 0),
        ("prompt", 1.5),
        ("cached", 1.0),
        ("mfu", 1.5),
        ("mbu", 1e-300),
        ("tpot_s", -1),
        ("count", 0),
    ):
        with pytest.raises(UsageError, match="must be"):
            replace(Question(), **{field: value})
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "alien"}')
    with pytest.raises(ModelFormatError, match="alien"):
        load_planned_model(str(path))
