"""Sentences and table rows of a plan, for the terminal and the HTML report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twostroke.core.message_text import counted_noun
from twostroke.lab.measure.report_text import format_ms, format_number
from twostroke.lab.planner.chunks import num_chunks
from twostroke.lab.planner.served import thread_count_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twostroke.lab.planner.plan import Plan
    from twostroke.lab.planner.planner import PlanRow
    from twostroke.lab.planner.question import Question
    from twostroke.lab.planner.queueing import UserLoad

HEADINGS: Final = (
    "STREAMS", "STEP MS", "MBU", "MFU", "TTFT MS", "MS/TOKEN", "TOKENS/S", "REQUESTS/S", "$/1M",
    "J/TOKEN", "MOST TIME",
)  # fmt: skip
LOAD_HEADINGS: Final = ("LOAD", "REQUESTS/S", "AT WORK", "TTFT MS", "MS/TOKEN")
ABOUT_LOADS: Final = (
    "These are means for requests that arrive at random, at shares of the load that the streams "
    "can carry. Close to 100%, a small error in a step's time becomes a long queue. To simulate "
    "percentiles and varying lengths:"
)
RANK_HEADINGS: Final = (
    "DEVICE", "STREAMS", "TTFT MS", "MS/TOKEN", "TOKENS/S", "REQUESTS/S", "REPLICAS", "$/HOUR",
    "$/1K REQUESTS", "BOUND BY",
)  # fmt: skip
WHAT_IF_HEADINGS: Final = ("WHAT IF", "TTFT MS", "MS/TOKEN", "FIT", "$/1M")


def title(plan: Plan) -> str:
    """Return the title of a plan: the model and the devices, such as "llama-8b on 2 x L4"."""
    devices = f"{plan.question.count} x " if plan.question.count > 1 else ""
    return f"{plan.model} on {devices}{plan.device}"


def decode_name(streams: int) -> str:
    """Return the name of a decode step, such as "decode, 2 streams"."""
    return f"decode, {num_streams(streams)}"


def num_streams(count: int) -> str:
    """Return a number of streams as text: "1 stream" or "2 streams"."""
    return counted_noun(count, "stream", form=",")


def plan_facts(plan: Plan) -> Iterator[str]:
    """Yield the sentences above a plan's tables: memory, first token, price, accuracy of times."""
    question = plan.question
    yield (
        f"{title(plan)}: {plan.num_weights / 1e9:.3g} G weights ({plan.stored}), "
        f"arithmetic {plan.arithmetic}"
    )
    yield _memory(plan)
    count = num_chunks(question.num_new, question.token_budget)
    chunks = (
        f", computed in {counted_noun(count, 'step', form=',')} of {question.token_budget:,}"
        if count > 1
        else ""
    )
    yield (
        f"First token of a prompt of {_tokens(question.prompt)}{chunks}: "
        f"{format_ms(plan.ttft_s)} ms ({plan.prefill_bottleneck}). Knee: {plan.knee:,.0f} "
        "streams."
    )
    if plan.assumed:
        yield describe_missing_fields(plan.assumed, plan.model)
    if plan.roof.usd_per_hour is not None:
        source = f", {plan.roof.price_source}" if plan.roof.price_source else ""
        yield f"Price: {plan.roof.usd_per_hour:.4g} $ an hour{source}."
    if (calibrated := plan.calibrated) is not None:
        threads = thread_count_text(calibrated.num_threads)
        steps = f"one step measured {threads} on {calibrated.date}"
        if calibrated.error is not None:
            steps = (
                f"{counted_noun(calibrated.num_steps, 'step')} measured {threads} on "
                f"{calibrated.date}; predicting each of them from the others has a median error of "
                f"{calibrated.error:.0%}"
            )
        yield f"Times are corrected by {steps}. Nearest step: {calibrated.nearest}."
    elif plan.usual:
        yield describe_reference(plan.usual)
    else:
        yield _efficiency(question)
    if question.count > 1 and plan.roof.link is None:
        yield (
            f"The speed of {plan.device}'s links is not known: exchanges between devices take no "
            "time in this plan."
        )


def describe_reference(reference: str) -> str:
    """Return a sentence that says from which model and machine a plan's times are corrected."""
    return (
        "No steps of this model were measured here (--calibrate measures them): times exceed the "
        f"limits as much as the times of {reference} do. --mfu 1 --mbu 1 shows the limits."
    )


def describe_missing_fields(keys: Sequence[str], model: str) -> str:
    """Return a sentence about fields that a model's configuration lacks, so that defaults hold."""
    return (
        f"The configuration of {model} leaves out {', '.join(keys)}: the defaults of transformers "
        "are used."
    )


def _tokens(count: int) -> str:
    return counted_noun(count, "token", form=",")


def _efficiency(question: Question) -> str:
    if (question.mfu, question.mbu) == (1.0, 1.0):
        return (
            "Times are limits, which no engine passes: set --mfu and --mbu to the efficiency of "
            "your engine; on this machine --calibrate measures it."
        )
    return (
        f"Times are for an engine that reaches {question.mfu:.0%} of the arithmetic and "
        f"{question.mbu:.0%} of the bandwidth."
    )


def _memory(plan: Plan) -> str:
    memory = plan.memory
    text = (
        f"Memory: weights {format_number(memory.weights / 1e9)} GB, keys and values "
        f"{memory.kv_per_token:,.0f} bytes per token and "
        f"{format_number(memory.kv_per_request / 1e9)} GB per request"
    )
    if memory.usable is None or memory.most_streams is None or memory.most_tokens is None:
        return f"{text}. The size of the device's memory is not known."
    is_full_context = memory.most_tokens == plan.context_length
    note = ", the whole context" if is_full_context else ""
    return (
        f"{text}. {counted_noun(memory.most_streams, 'request fits', 'requests fit', form=',')} "
        f"into {memory.usable / 1e9:,.1f} GB, or one request of "
        f"{counted_noun(memory.most_tokens, 'token', form=',')}{note}."
    )


def row_cells(row: PlanRow) -> tuple[str, ...]:
    """Return the cells of a row in a plan's table by number of streams."""
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


def answer_sentences(plan: Plan) -> Iterator[str]:
    """Yield the sentences that answer a plan's question; the first is the verdict."""
    row = plan.chosen_row
    if row is None:
        yield plan.verdict
        return
    if plan.user_load is not None:
        yield _users_answer(plan, plan.user_load)
    start = "Each replica" if plan.user_load is not None else "Yes"
    bound = f" (limited by {plan.bound})" if plan.bound else ""
    cost = "" if row.usd_per_1k is None else f"; 1,000 requests cost {_usd(row.usd_per_1k)} $"
    yield (
        f"{start}: {num_streams(row.streams)}{bound} produce {row.tokens_per_s:,.0f} tokens/s in "
        f"all and {1 / row.tpot_s:.1f} tokens/s each, or {row.requests_per_s:.3g} "
        f"requests/s{cost}."
    )
    if plan.bound == "prompts":
        yield (
            f"Prefill and decode of these streams fill steps of {plan.question.token_budget:,} "
            "tokens (--token-budget)."
        )
    if (ratio := plan.prefill_per_decode) is not None:
        yield f"Prefill and decode apart: {ratio:.2g} prefill devices for each decode device."


def verdict(plan: Plan) -> str:
    """Return a plan's verdict: the first sentence of its answer, without a leading "No"."""
    return next(answer_sentences(plan)).removeprefix("No: ")


def _users_answer(plan: Plan, load: UserLoad) -> str:
    """Return sentences about the users of a plan: replicas for them, latencies and costs."""
    replicas = (
        "one replica"
        if load.num_replicas == 1
        else counted_noun(load.num_replicas, "replica", form=",")
    )
    users = counted_noun(load.num_users, "user", form=",")
    start = f"Yes: {users} on {replicas} of {title(plan)}"
    if not load.meets_objectives:
        start = f"No: the objectives cannot be met for {users}. On one replica of {title(plan)}"
    cost = ""
    if plan.roof.usd_per_hour is not None:
        cost = f", for {plan.roof.usd_per_hour * load.num_replicas:,.4g} $ an hour"
    return (
        f"{start}: on average {format_ms(load.ttft_s)} ms to the first token, "
        f"{format_ms(load.tpot_s)} ms for each further token, and {format_number(load.response_s)} "
        f"s for an answer. The next request comes {load.think_s:g} s later. In all "
        f"{load.requests_per_s:.3g} requests/s, {load.at_work:,.1f} in progress on each "
        f"replica{cost}."
    )


def load_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a plan's table of mean latencies by load."""
    for load in plan.loads:
        yield (
            f"{load.share:.0%}",
            f"{load.requests_per_s:.3g}",
            f"{load.at_work:,.1f}",
            format_ms(load.ttft_s),
            format_ms(load.tpot_s),
        )


def ranking_row(plan: Plan) -> tuple[str, ...]:
    """Return the cells of a plan in the table that compares devices."""
    count = f"{plan.question.count} x " if plan.question.count > 1 else ""
    device, row, load = f"{count}{plan.device}", plan.chosen_row, plan.user_load
    if row is None:
        return (device, *("–",) * 8, plan.verdict.partition(":")[0])
    figures = row if load is None else load
    num_replicas = 1 if load is None else load.num_replicas
    hour = None if plan.roof.usd_per_hour is None else plan.roof.usd_per_hour * num_replicas
    return (
        device,
        f"{row.streams:,}",
        format_ms(figures.ttft_s),
        format_ms(figures.tpot_s),
        f"{row.tokens_per_s:,.0f}",
        f"{figures.requests_per_s:.3g}",
        f"{num_replicas:,}",
        _usd(hour),
        _usd(cost_of(plan)),
        plan.bound or "–",
    )


def cost_of(plan: Plan) -> float | None:
    """Return a plan's price of 1,000 requests in $; None without a price.

    With users, it is the price of all replicas at the users' load.
    """
    row, load = plan.chosen_row, plan.user_load
    if row is None or load is None or plan.roof.usd_per_hour is None:
        return None if row is None else row.usd_per_1k
    return plan.roof.usd_per_hour * load.num_replicas / 3600 / load.requests_per_s * 1000


def rank(plans: Sequence[Plan]) -> list[Plan]:
    """Return plans for different devices, the cheapest first; without prices, the fastest.

    Plans that miss an objective come last.
    """

    def key(plan: Plan) -> tuple[int, float, str]:
        usd = cost_of(plan)
        if not is_met(plan):
            return (2, 0.0, plan.device)
        speed = plan.chosen_row.requests_per_s if plan.chosen_row else 0.0
        return (0, usd, "") if usd is not None else (1, -speed, "")

    return sorted(plans, key=key)


def is_met(plan: Plan) -> bool:
    """Whether a plan meets all latency objectives, also for its users."""
    return plan.chosen_row is not None and (
        plan.user_load is None or plan.user_load.meets_objectives
    )


def rank_verdict(plans: Sequence[Plan]) -> str:
    """Return the verdict on ranked plans: which costs least, or why all miss the objectives."""
    best = plans[0]
    if not is_met(best):
        return f"No: none of the {counted_noun(len(plans), 'device')} {_why_none(plans)}"
    usd = cost_of(best)
    if usd is None:
        return f"Yes: {title(best)} is the fastest; the prices of these devices are not known."
    second = next((plan for plan in plans[1:] if cost_of(plan) is not None and is_met(plan)), None)
    text = f"Yes: {title(best)} costs least, {_usd(usd)} $ for 1,000 requests"
    if second is None:
        return f"{text}."
    ratio = (cost_of(second) or usd) / usd
    difference = f"{ratio - 1:.0%} more" if ratio < 2 else f"{ratio:.1f} times as much"
    return f"{text}; {second.device} costs {difference}."


def _why_none(plans: Sequence[Plan]) -> str:
    """Return why all of the ranked plans miss the objectives, as the end of a sentence."""
    reasons = list(dict.fromkeys(verdict(plan) for plan in plans))
    if len(reasons) == 1:
        return f"can do it: {reasons[0]}"
    return f"meets the objectives. {plans[0].device}: {reasons[0]}"


def about_ranking(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield sentences that explain the columns of the table that compares devices."""
    question = plans[0].question
    if any(plan.calibrated is None and not plan.usual for plan in plans):
        yield _efficiency(question)
    if question.users is not None:
        users = counted_noun(question.users, "user sees", "users see", form=",")
        yield (
            f"TTFT MS and MS/TOKEN are what {users} on average; REPLICAS is the number of "
            "replicas that serve them."
        )


def what_if_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a plan's table of changes and their effects."""
    for what_if in plan.what_ifs:
        yield (
            what_if.change,
            format_ms(what_if.ttft_s),
            format_ms(what_if.tpot_s),
            "–" if what_if.most_streams is None else f"{what_if.most_streams:,}",
            _usd(what_if.usd_per_million),
        )


def _usd(price: float | None) -> str:
    return "–" if price is None else f"{price:.3g}"
