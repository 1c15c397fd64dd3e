"""Counters of servers before and after a run."""

from __future__ import annotations

from twostroke.lab.bench.server_counters import ServerCounters, counted_between, parse_counters

TWOSTROKE = """
# TYPE twostroke_speculation_proposed_tokens_total counter
twostroke_speculation_proposed_tokens_total{{source="ngram"}} {drafted}
twostroke_speculation_proposed_tokens_total{{source="mtp"}} 50
# TYPE twostroke_speculation_accepted_tokens_total counter
twostroke_speculation_accepted_tokens_total{{source="ngram"}} {accepted}
# TYPE twostroke_speculation_passes_total counter
twostroke_speculation_passes_total 10
# TYPE twostroke_step_steps_total counter
twostroke_step_steps_total{{stroke="prefill"}} {steps}
twostroke_step_steps_total{{stroke="decode"}} 100
# TYPE twostroke_step_flops_total counter
twostroke_step_flops_total{{stroke="prefill"}} 2e12
twostroke_step_flops_total{{stroke="decode"}} 1e12
# TYPE twostroke_step_bytes_total counter
twostroke_step_bytes_total{{stroke="prefill"}} 1e9
twostroke_step_bytes_total{{stroke="decode"}} 7e9
# TYPE twostroke_step_time_seconds_total counter
twostroke_step_time_seconds_total{{stroke="prefill"}} 2
twostroke_step_time_seconds_total{{stroke="decode"}} 4
# TYPE twostroke_peak_flops_per_second gauge
twostroke_peak_flops_per_second 4e12
# TYPE twostroke_peak_bytes_per_second gauge
twostroke_peak_bytes_per_second 25e9
"""
VLLM = """
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="other"} 999.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 200.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 50.0
"""


def twostroke(drafted: int = 150, accepted: int = 100, steps: int = 20) -> ServerCounters:
    counters = parse_counters(
        TWOSTROKE.format(drafted=drafted, accepted=accepted, steps=steps), "m"
    )
    assert counters is not None
    return counters


def test_counters_of_all_sources_are_summed():
    counters = twostroke()
    assert counters.acceptance == 0.5
    assert counters.tokens_per_draft_step == 11.0
    assert counters.prefill is not None
    assert counters.decode is not None
    assert (counters.prefill.flops, counters.decode.seconds) == (2e12, 4.0)
    assert (counters.peak_flops, counters.bandwidth) == (4e12, 25e9)
    assert counters.hit_share is None


def test_counters_of_other_models_are_left_out():
    counters = parse_counters(VLLM, "m")
    assert counters is not None
    assert counters.acceptance == 0.4
    assert counters.tokens_per_draft_step == 2.2
    assert counters.hit_share == 0.25
    assert counters.prefill is None


def test_an_endpoint_without_a_model_name_has_all_samples():
    counters = parse_counters(VLLM, "")
    assert counters is not None
    assert counters.num_drafted == 1029


def test_a_run_has_the_difference_of_counters():
    difference = counted_between(twostroke(), twostroke(drafted=250, accepted=140, steps=25))
    assert difference is not None
    assert (difference.num_drafted, difference.num_accepted) == (100, 40)
    assert difference.prefill is not None
    assert (difference.prefill.num_steps, difference.prefill.flops) == (5, 0)
    assert difference.peak_flops == 4e12


def test_a_counter_that_appears_during_the_run_began_at_zero():
    text = "\n".join(
        line
        for line in TWOSTROKE.format(drafted=0, accepted=0, steps=20).splitlines()
        if "_tokens_total" not in line
    )
    before = parse_counters(text, "m")
    assert before is not None
    assert before.num_drafted is None
    difference = counted_between(before, twostroke())
    assert difference is not None
    assert difference.acceptance == 0.5


def test_a_server_that_started_again_has_no_counts():
    assert counted_between(twostroke(drafted=250), twostroke()) is None
    assert counted_between(twostroke(steps=30), twostroke()) is None
    assert counted_between(None, twostroke()) is None


def test_texts_without_counters_have_none():
    for text in ("", "# nothing", "<html>", "other_total 5\n", '{"error": "no"}', "a{b 5"):
        assert parse_counters(text, "m") is None
