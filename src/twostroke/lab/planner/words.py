"""A plan in words and tables, for the terminal and the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.lab.measure.report_text import format_ms, format_number
from twostroke.lab.planner.chunks import num_chunks
from twostroke.lab.planner.served import on_threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.lab.planner.plan import Plan
    from twostroke.lab.planner.planner import Row
    from twostroke.lab.planner.question import Question
    from twostroke.lab.planner.queueing import UserLoad

HEADINGS: Final = (
    "STREAMS", "STEP MS", "MBU", "MFU", "TTFT MS", "MS/TOKEN", "TOKENS/S", "REQUESTS/S", "$/1M",
    "J/TOKEN", "MOST TIME",
)  # fmt: skip
LOAD_HEADINGS: Final = ("LOAD", "REQUESTS/S", "AT WORK", "TTFT MS", "MS/TOKEN")
ABOUT_LOADS: Final = (
    "These are means of requests that come by chance, at shares of what the streams carry. Near "
    "all of it a small error of a step becomes a long queue. Percentiles and lengths that differ:"
)
RANK_HEADINGS: Final = (
    "DEVICE", "STREAMS", "TTFT MS", "MS/TOKEN", "TOKENS/S", "REQUESTS/S", "REPLICAS", "$/HOUR",
    "$/1K REQUESTS", "BOUND BY",
)  # fmt: skip
WHAT_IF_HEADINGS: Final = ("WHAT IF", "TTFT MS", "MS/TOKEN", "FIT", "$/1M")


def title(plan: Plan) -> str:
    """Return the model and the devices."""
    devices = f"{plan.question.count} x " if plan.question.count > 1 else ""
    return f"{plan.model} on {devices}{plan.device}"


def decode_name(streams: int) -> str:
    """Return the name of a decode step."""
    return f"decode, {num_streams(streams)}"


def num_streams(count: int) -> str:
    """Return "1 stream" or "2 streams"."""
    return f"{count:,} {'stream' if count == 1 else 'streams'}"


def facts(plan: Plan) -> Iterator[str]:
    """Yield what heads the tables, a line each."""
    asked = plan.question
    yield (
        f"{title(plan)}: {plan.num_weights / 1e9:.3g} G weights ({plan.stored}), "
        f"arithmetic {plan.arithmetic}"
    )
    yield _memory(plan)
    count = num_chunks(asked.num_new, asked.token_budget)
    chunks = f", read in {count:,} steps of {asked.token_budget:,}" if count > 1 else ""
    yield (
        f"First token of a prompt of {_tokens(asked.prompt)}{chunks}: "
        f"{format_ms(plan.ttft_s)} ms ({plan.prefill_bottleneck}). Knee: {plan.knee:,.0f} "
        "streams."
    )
    if plan.assumed:
        yield left_out(plan.assumed, plan.model)
    if plan.roof.usd_per_hour is not None:
        source = f", {plan.roof.price_source}" if plan.roof.price_source else ""
        yield f"Price: {plan.roof.usd_per_hour:.4g} $ an hour{source}."
    if (one := plan.calibrated) is not None:
        threads = on_threads(one.num_threads)
        told = f"one step measured {threads} on {one.date}"
        if one.error is not None:
            told = f"{one.num_steps} steps measured {threads} on {one.date}; each of these "
            told += f"follows from the others with an error of {one.error:.0%} (median)"
        yield f"Times are corrected by {told}. Nearest: {one.nearest}."
    elif plan.usual:
        yield about_usual(plan.usual)
    else:
        yield _shares(asked)
    if asked.count > 1 and plan.roof.link is None:
        yield f"The speed of {plan.device}'s links is not known: exchanges take no time here."


def about_usual(measured: str) -> str:
    """Return by which steps of another model times are corrected."""
    return (
        "No step of this model was measured here (--calibrate does it): times are as far above the "
        f"limits as those of {measured}. --mfu 1 --mbu 1 shows the limits."
    )


def left_out(keys: Sequence[str], model: str) -> str:
    """Return what tells that a model's configuration leaves out sizes."""
    return (
        f"The configuration of {model} leaves out {', '.join(keys)}: transformers' defaults count."
    )


def _tokens(count: int) -> str:
    return f"{count:,} {'token' if count == 1 else 'tokens'}"


def _shares(asked: Question) -> str:
    if (asked.mfu, asked.mbu) == (1.0, 1.0):
        return (
            "Times are limits, which no engine passes: --mfu and --mbu say what yours reaches; on "
            "this machine --calibrate measures it."
        )
    return (
        f"Times are those of an engine that reaches {asked.mfu:.0%} of the arithmetic and "
        f"{asked.mbu:.0%} of the bandwidth."
    )


def _memory(plan: Plan) -> str:
    memory = plan.memory
    text = (
        f"Memory: weights {format_number(memory.weights / 1e9)} GB, keys and values "
        f"{memory.kv_per_token:,.0f} bytes a token, "
        f"{format_number(memory.kv_per_request / 1e9)} GB a request"
    )
    if memory.usable is None:
        return f"{text}. How much the device has is not known."
    whole = ", the whole context" if memory.most_tokens == plan.context_length else ""
    return (
        f"{text}; {memory.most_streams:,} requests fit into {memory.usable / 1e9:,.1f} GB, or one "
        f"of {memory.most_tokens:,} tokens{whole}."
    )


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table by number of streams."""
    return (
        f"{row.streams:,}",
        format_ms(row.step_s),
        f"{row.mbu:.0%}",
        f"{row.mfu:.0%}",
        format_ms(row.ttft_s),
        format_ms(row.tpot_s),
        f"{row.tokens_per_s:,.0f}",
        f"{row.requests_per_s:.3g}",
        _usd(row.usd_per_million),
        "–" if row.joules_per_token is None else f"{row.joules_per_token:.3g}",
        row.bottleneck,
    )


def answer(plan: Plan) -> Iterator[str]:
    """Yield the answer to what was asked, or why there is none."""
    row = plan.chosen
    if row is None:
        yield plan.verdict
        return
    if plan.user_load is not None:
        yield _users_answer(plan, plan.user_load)
    yes = "" if plan.user_load is not None else "Yes, "
    bound = f" (bound by {plan.bound})" if plan.bound else ""
    cost = "" if row.usd_per_1k is None else f"; 1K requests cost {_usd(row.usd_per_1k)} $"
    yield (
        f"{yes}{num_streams(row.streams)}{bound}: {row.tokens_per_s:,.0f} tokens/s, "
        f"{1 / row.tpot_s:.1f} for each, and {row.requests_per_s:.3g} requests/s, "
        f"while as many are always at work{cost}."
    )
    if plan.bound == "prompts":
        yield (
            f"With their prompts, these fill steps of {plan.question.token_budget:,} tokens "
            "(--token-budget)."
        )
    if (ratio := plan.prefill_per_decode) is not None:
        yield f"Prefill and decode apart: {ratio:.2g} prefill devices for each that decodes."


def verdict(plan: Plan) -> str:
    """Return the first sentence of the answer; as an error message if the answer is no."""
    return next(answer(plan)).removeprefix("No, ")


def _users_answer(plan: Plan, load: UserLoad) -> str:
    """Return a sentence about the users: their replicas, latencies and costs."""
    replicas = "one replica" if load.num_replicas == 1 else f"{load.num_replicas:,} replicas"
    users = "1 user" if load.num_users == 1 else f"{load.num_users:,} users"
    start = f"Yes, {users} on {replicas} of {title(plan)}"
    if not load.meets_objectives:
        start = f"No, the objectives cannot be met for {users}. On one replica of {title(plan)}"
    cost = ""
    if plan.roof.usd_per_hour is not None:
        cost = f", for {plan.roof.usd_per_hour * load.num_replicas:,.4g} $ an hour"
    return (
        f"{start}: {format_ms(load.ttft_s)} ms to the first token and "
        f"{format_ms(load.tpot_s)} ms for each further one on average, an answer after "
        f"{format_number(load.response_s)} s and the next request {load.think_s:g} s later; "
        f"{load.requests_per_s:.3g} requests/s in all, {load.at_work:,.1f} at work on each{cost}."
    )


def loads(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of loads."""
    for one in plan.loads:
        times = format_ms(one.ttft_s), format_ms(one.tpot_s)
        yield f"{one.share:.0%}", f"{one.requests_per_s:.3g}", f"{one.at_work:,.1f}", *times


def ranked(plan: Plan) -> tuple[str, ...]:
    """Return a row of the table that compares devices."""
    count = f"{plan.question.count} x " if plan.question.count > 1 else ""
    device, row, load = f"{count}{plan.device}", plan.chosen, plan.user_load
    if row is None:
        return (device, *("–",) * 8, plan.verdict.partition(":")[0])
    seen = row if load is None else load
    num_replicas = 1 if load is None else load.num_replicas
    hour = None if plan.roof.usd_per_hour is None else plan.roof.usd_per_hour * num_replicas
    return (
        device,
        f"{row.streams:,}",
        format_ms(seen.ttft_s),
        format_ms(seen.tpot_s),
        f"{row.tokens_per_s:,.0f}",
        f"{seen.requests_per_s:.3g}",
        f"{num_replicas:,}",
        _usd(hour),
        _usd(cost_of(plan)),
        plan.bound or "–",
    )


def cost_of(plan: Plan) -> float | None:
    """Return $ for 1,000 requests of a plan, or of its users; None without a price."""
    row, load = plan.chosen, plan.user_load
    if row is None or load is None or plan.roof.usd_per_hour is None:
        return None if row is None else row.usd_per_1k
    return plan.roof.usd_per_hour * load.num_replicas / 3600 / load.requests_per_s * 1000


def rank(plans: Sequence[Plan]) -> list[Plan]:
    """Sort plans by cost, or by speed without prices; plans that miss an objective are last."""

    def key(plan: Plan) -> tuple[int, float, str]:
        usd = cost_of(plan)
        if not is_met(plan):
            return (2, 0.0, plan.device)
        speed = plan.chosen.requests_per_s if plan.chosen else 0.0
        return (0, usd, "") if usd is not None else (1, -speed, "")

    return sorted(plans, key=key)


def is_met(plan: Plan) -> bool:
    """Whether a plan meets all objectives, also for its users."""
    return plan.chosen is not None and (plan.user_load is None or plan.user_load.meets_objectives)


def rank_verdict(plans: Sequence[Plan]) -> str:
    """Return a sentence about the best of ranked plans, or that none meets the objectives."""
    best = plans[0]
    if not is_met(best):
        return f"No: none of the {len(plans)} devices {_why_none(plans)}"
    usd = cost_of(best)
    if usd is None:
        return f"Yes: {title(best)} is the fastest; the prices of these devices are not known."
    second = next((plan for plan in plans[1:] if cost_of(plan) is not None and is_met(plan)), None)
    text = f"Yes: {title(best)} costs least, {_usd(usd)} $ for 1K requests"
    if second is None:
        return f"{text}."
    ratio = (cost_of(second) or usd) / usd
    difference = f"{ratio - 1:.0%} more" if ratio < 2 else f"{ratio:.1f} times as much"
    return f"{text}; {second.device} costs {difference}."


def _why_none(plans: Sequence[Plan]) -> str:
    """Return the end of a sentence about devices that all miss the question."""
    reasons = list(dict.fromkeys(verdict(plan) for plan in plans))
    if len(reasons) == 1:
        return f"can do it: {reasons[0]}"
    return f"meets the objectives. {plans[0].device}: {reasons[0]}"


def about_ranking(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield sentences that explain the columns of a ranking."""
    question = plans[0].question
    if any(plan.calibrated is None and not plan.usual for plan in plans):
        yield _shares(question)
    if question.users is not None:
        yield (
            f"TTFT MS and MS/TOKEN are what {question.users:,} users see on average; REPLICAS is "
            "the number of replicas that serve them."
        )


def what_ifs(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of other choices."""
    for one in plan.what_ifs:
        fits = "–" if one.most_streams is None else f"{one.most_streams:,}"
        cells = format_ms(one.ttft_s), format_ms(one.tpot_s), fits
        yield one.change, *cells, _usd(one.usd_per_million)


def _usd(price: float | None) -> str:
    return "–" if price is None else f"{price:.3g}"
