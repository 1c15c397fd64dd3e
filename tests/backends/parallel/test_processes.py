"""Several real processes give the answers of one, survive each other, and leave nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from support.cpu import greedy_request
from support.native import native_dir
from support.tiny import Tiny, tiny_of, write_tiny_gguf
from support.waiting import wait_for
from twostroke import LLM, SamplingParams
from twostroke.backends.parallel.rank_group import on_cores
from twostroke.backends.parallel.worker import _failure_of
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.errors import BackendError, RanksLostError, UsageError
from twostroke.core.hardware import resolve_num_threads
from twostroke.core.options import CacheOptions, ComputeOptions, EngineOptions, SpeculationOptions
from twostroke.core.step import Slice, StepPlan

SMALL = CacheOptions(memory_bytes=4_000_000)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [
    "hello",
    "the world is round",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 4,
]
ENTRY = "twostroke.backends.parallel.worker"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    native_dir()
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_gguf(folder / "tiny.gguf", Tiny(num_layers=3, fmt="Q8_0")))


def engine(path, *, num_drafts=None, **degrees):
    speculation = SpeculationOptions("ngram", count=num_drafts)
    options = EngineOptions(
        ComputeOptions("cpu"),
        SMALL,
        speculation=speculation if num_drafts else SpeculationOptions(),
        parallel=ParallelOptions(**degrees),
    )
    return LLM(path, options)


def rank_pids(parent):
    """Return the ranks that a process has started and that have not been reaped."""
    children = Path(f"/proc/{parent}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if ENTRY in Path(f"/proc/{pid}/cmdline").read_text()]


def is_over(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture(scope="module")
def expected(path):
    with engine(path) as llm:
        tokens = llm.engine.card.tokenizer.encode("hello world")
        scores = llm.engine.client.loop._backend.score(tokens)
        answers = llm.generate(PROMPTS, GREEDY)
        vectors = [embedding.vector for embedding in llm.embed(PROMPTS)]
        return answers, scores, vectors


@pytest.mark.parametrize(
    "degrees",
    [
        {"tensor": 2},
        {"tensor": 2, "shares": (3, 1), "pipeline": 2},
        {"context": 3},
        {"context": 2, "kv_shares": "places"},
    ],
    ids=str,
)
@pytest.mark.usefixtures("patient_ranks")
def test_answers_are_those_of_one_process(path, expected, degrees):
    answers, scores, vectors = expected
    count = ParallelOptions(**degrees).num_ranks
    with engine(path, **degrees) as llm:
        facts = llm.engine.facts
        assert [rank.rank for rank in facts.ranks] == list(range(count))
        assert facts.weight_bytes == sum(rank.weight_bytes for rank in facts.ranks)
        assert len(rank_pids(os.getpid())) == count - 1
        for ours, theirs in zip(llm.generate(PROMPTS, GREEDY), answers, strict=True):
            assert ours[0].token_ids == theirs[0].token_ids
            assert ours[0].logprobs == theirs[0].logprobs
        tokens = llm.engine.card.tokenizer.encode("hello world")
        backend = llm.engine.client.loop._backend
        assert np.array_equal(backend.score(tokens), scores)
        for ours, theirs in zip(llm.embed(PROMPTS), vectors, strict=True):
            assert np.array_equal(ours.vector, theirs)
    assert not rank_pids(os.getpid())


@pytest.mark.parametrize(
    "degrees",
    [{"tensor": 2, "pipeline": 2}, {"tensor": 4}, {"expert": 2, "context": 2}],
    ids=str,
)
@pytest.mark.usefixtures("patient_ranks")
def test_answers_of_recurrent_layers_are_those_of_one_process(tmp_path, degrees):
    native_dir()
    path = str(write_tiny_gguf(tmp_path / "tiny.gguf", tiny_of("qwen3.5-moe", num_layers=4)))
    chats = [PROMPTS[2], PROMPTS[2] + PROMPTS[1], PROMPTS[0]]
    with engine(path) as llm:
        expected = [llm.generate([prompt], GREEDY)[0][0] for prompt in chats]
    with engine(path, kv_shares="heads", **degrees) as llm:  # prompts fill pages of 16 tokens
        count = ParallelOptions(**degrees).num_ranks
        assert len(llm.engine.facts.ranks) == count
        alone_answers = [llm.generate([prompt], GREEDY)[0][0] for prompt in chats]
        together = [answer for (answer,) in llm.generate(chats, GREEDY)]
    with engine(path, num_drafts=3, kv_shares="heads", **degrees) as llm:
        drafted = [
            llm.generate([prompt], GREEDY, prediction=answer.text)[0][0]
            for prompt, answer in zip(chats, expected, strict=True)
        ]
        assert sum(llm.engine.client.loop.speculator.stats.proposed.values()) > 0
    for answers in (alone_answers, together, drafted):
        for ours, theirs in zip(answers, expected, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.logprobs == theirs.logprobs
    assert alone_answers[1].usage.cached_tokens > 0


@pytest.mark.usefixtures("patient_ranks")
def test_each_rank_keeps_to_its_own_cores_and_threads(path):
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    with engine(path, tensor=2) as llm:
        (pid,) = rank_pids(os.getpid())
        loop = llm.engine.client.loop._thread.native_id
        assert not os.sched_getaffinity(pid) & os.sched_getaffinity(loop)
        assert os.sched_getaffinity(0) == cores
        num_threads = resolve_num_threads(None)
        assert sum(rank.num_threads for rank in llm.engine.facts.ranks) == max(2, num_threads)


def plan_of(request, start, count):
    return StepPlan((Slice(request, start, count, samples=True),))


def test_ranks_that_die_or_freeze_are_replaced(path, monkeypatch):
    monkeypatch.setattr(
        "twostroke.engine.loop._RANK_CHECK_INTERVAL_S", 1e3
    )  # the test itself recovers
    request = greedy_request([5, 6, 7], logprobs=None)
    request.pages = [[3]]
    with engine(path, tensor=2) as llm:
        backend = llm.engine.client.loop._backend
        token = backend.run(plan_of(request, 0, 3)).tokens
        (pid,) = rank_pids(os.getpid())
        cores = os.sched_getaffinity(pid)
        os.kill(pid, signal.SIGINT)  # as a terminal may: only rank 0 ends the others
        for number in (signal.SIGKILL, signal.SIGSTOP):
            assert backend.run(plan_of(request, 0, 3)).tokens == token
            (pid,) = rank_pids(os.getpid())
            os.kill(pid, number)
            start_s = time.monotonic()
            with pytest.raises(RanksLostError, match=r"Rank 1 (was ended by|has not)"):
                backend.run(plan_of(request, 0, 3))
            assert time.monotonic() - start_s < 30  # about 1 s, on a machine that does nothing else
            assert [rank.state for rank in backend.states()] == ["ready", "lost"]
            assert is_over(pid)
            with on_cores(0, 2):  # as the engine's thread is
                backend.recover()
            assert os.sched_getaffinity(rank_pids(os.getpid())[0]) == cores
            request.num_moves += 1  # as a preemption does
            assert backend.run(plan_of(request, 0, 3)).tokens == token
        wait_for(lambda: all(rank.collective_s > 0 for rank in backend.states()))
        zero, rank_one = backend.states()
        assert (zero.num_restarts, rank_one.num_restarts) == (0, 2)
        assert (rank_one.state, rank_one.facts.coordinate.column_part) == ("ready", 1)


@pytest.mark.usefixtures("patient_ranks")
def test_a_forked_process_does_not_end_the_ranks(path):
    with engine(path, tensor=2) as llm:
        backend = llm.engine.client.loop._backend
        (pid,) = rank_pids(os.getpid())
        backend._process = -1  # what a copy of this process sees
        backend.close()
        backend._process = os.getpid()
        llm.generate("hello", GREEDY)
        assert rank_pids(os.getpid()) == [pid]


@pytest.mark.usefixtures("patient_ranks")
def test_a_step_that_fails_is_the_only_one(path):
    request = greedy_request([5, 6, 7], logprobs=None)
    request.pages = [[3]]
    with engine(path, tensor=2) as llm:
        backend = llm.engine.client.loop._backend
        token = backend.run(plan_of(request, 0, 3)).tokens
        wrong = greedy_request([5, 6, 10**6], logprobs=None)
        wrong.pages = [[4]]
        with pytest.raises(BackendError, match="token"):
            backend.run(plan_of(wrong, 0, 3))
        assert backend.run(plan_of(request, 0, 3)).tokens == token
        assert len(rank_pids(os.getpid())) == 1


PROGRAM = """
import sys
from twostroke import LLM, EngineOptions, CacheOptions, ParallelOptions, SamplingParams
options = EngineOptions(
    cache=CacheOptions(memory_bytes=4_000_000), parallel=ParallelOptions(tensor=2)
)
with LLM(sys.argv[1], options) as llm:
    print("ready", flush=True)
    while True:
        llm.generate("hello", SamplingParams(max_tokens=50, ignore_eos=True))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_rank_0(path, number):
    command = [sys.executable, "-c", PROGRAM, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"ready\n"
        (pid,) = rank_pids(process.pid)
        process.send_signal(number)
        assert process.wait(120) != 0
        wait_for(lambda: is_over(pid))


def test_what_cannot_be_divided_is_refused_before_ranks_start(path, tmp_path):
    with pytest.raises(UsageError, match="must be at most 3, the model's layers, got 4"):
        engine(path, pipeline=4)
    assert not rank_pids(os.getpid())


def test_a_rank_without_memory_says_so():
    for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        failed = _failure_of(error)
        assert failed.kind == "MemoryLimitError"
        assert "too little memory" in failed.reason


def test_another_file_on_a_rank_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "twostroke.backends.parallel.rank_group.weights_identity", lambda tensors: "another"
    )
    with pytest.raises(BackendError, match=r"Rank 1: .* is not the file that rank 0 has"):
        engine(path, tensor=2)
    assert not rank_pids(os.getpid())
