"""Options get the values that they name; wrong values name the option and its limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import pytest

from twostroke.cli import generate, serve
from twostroke.cli.app import CommandFailure
from twostroke.cli.help import ByteSizeParam, WordParam
from twostroke.cli.options import engine_options, sampling_params
from twostroke.core.distributed_options import ParallelOptions
from twostroke.core.errors import RequestError, UsageError
from twostroke.core.options import (
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    EngineOptions,
    GenerationOptions,
    SpeculationOptions,
)
from twostroke.core.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran


def given_options(command: click.Command, *arguments: str) -> dict[str, Any]:
    """Return the values that click passes to a command's function."""
    return command.make_context("x", ["some-model", *arguments]).params


def test_options_left_alone_are_the_defaults() -> None:
    lasting = EngineOptions(speculation=SpeculationOptions(draft="auto"))
    assert engine_options(given_options(serve.command), "tiny") == lasting
    assert (
        engine_options(given_options(serve.command, "--draft", "None"), "tiny") == EngineOptions()
    )
    assert engine_options(given_options(generate.command, "--draft", "AUTO"), "tiny") == lasting
    assert engine_options(given_options(generate.command), "tiny") == EngineOptions()
    assert sampling_params(given_options(generate.command)) == SamplingParams()


def test_engine_options_reach_their_fields() -> None:
    line = (
        "--backend cpu --threads 3 --level avx2 --context-length 100 --kv-memory 2MB "
        "--page-size 32 --kv-format int8 --no-prefix-cache --strict-prefix --policy dynamic "
        "--max-running 7 --token-budget 64 --batch-size 5 --max-wait 0.5 --max-waiting 9 "
        "--speculate draft --draft small --drafts 4 --activation-bits 8 --tensor-parallel 2 "
        "--pipeline-parallel 3 --expert-parallel 1 --context-parallel 4 --shares 3,2 "
        "--reduce gather --kv-shares heads --ray --attention-shares 1,0"
    )
    assert engine_options(given_options(serve.command, *line.split()), "tiny") == EngineOptions(
        ComputeOptions("cpu", 3, "avx2", activation_bits=8),
        CacheOptions(2_000_000, 100, 32, prefix_cache=False, strict_prefix=True, kv_format="int8"),
        BatchOptions("dynamic", 7, 64, 5, 0.5, max_waiting_requests=9),
        SpeculationOptions("draft", "small", 4),
        ParallelOptions(2, 3, 1, 4, (3, 2), "gather", "heads", "ray", (1, 0)),
    )


def test_shares_divide_weights_or_else_layers() -> None:
    columns = ParallelOptions(tensor=2, pipeline=2, shares=(3, 2))
    assert (columns.column_shares, columns.stage_shares) == ((3, 2), (1, 1))
    layers = ParallelOptions(pipeline=2, shares=(3, 2))
    assert (layers.column_shares, layers.stage_shares) == ((1,), (3, 2))


def test_sampling_options_reach_their_fields() -> None:
    line = (
        "--max-tokens 9 --min-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 "
        "--repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --seed 4 "
        "--stop a --stop b --ignore-eos"
    )
    assert sampling_params(given_options(generate.command, *line.split())) == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=4,
        stop=("a", "b"),
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--max-tokens 0", "--max-tokens must be from 1 to 2147483647, got 0."),
        ("--min-tokens 9 --max-tokens 3", "--min-tokens must be at most --max-tokens (3), got 9."),
        ("--temperature -1", "--temperature must be from 0 to 100, got -1."),
        ("--temperature nan", "--temperature must be a finite number, got nan."),
        ("--top-p 1.5", "--top-p must be from 0 to 1, got 1.5."),
        ("--top-k -1", "--top-k must be from 0 "),
        ("--min-p 2", "--min-p must be from 0 to 1, got 2."),
        ("--repetition-penalty 0", "--repetition-penalty must be greater than 0"),
        ("--presence-penalty 3", "--presence-penalty must be from -2 to 2, got 3."),
        ("--frequency-penalty -3", "--frequency-penalty must be from -2 to 2, got -3."),
        ("--seed 99999999999999999999999", "--seed must be from "),
        (f"--stop {'x' * 1001}", "--stop takes at most 16 strings of 1 to 1000 characters."),
    ],
)
def test_wrong_sampling_values_name_their_option(line: str, sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        sampling_params(given_options(generate.command, *line.split()))
    assert CommandFailure(caught.value, generate.command).message.startswith(sentence)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--backend reference --level avx2", "--level needs the backend cpu."),
        ("--kv-format fp8", "--kv-format can be fp8 only on the backend gpu; int8 is as small."),
        ("--backend torch --kv-format fp8", "--kv-format needs the backend cpu or gpu."),
        ("--backend gpu --tensor-parallel 2", "--tensor-parallel needs the backend cpu or torch."),
        ("--device cuda", "--device needs the backend gpu or torch."),
        ("--activation-bits 7", "--activation-bits must be auto, 15, 9 or 8, got 7."),
        (
            "--activation-bits 8 --backend reference",
            "--activation-bits needs the backend cpu.",
        ),
        ("--threads 0", "--threads must be from 1 to 1024, got 0."),
        ("--page-size 17", "--page-size must be 16, 32 or 64, got 17."),
        ("--kv-memory 0", "--kv-memory must be greater than 0, got 0."),
        ("--context-length 1", "--context-length must be at least 2, got 1."),
        ("--max-running 0", "--max-running must be at least 1, got 0."),
        ("--token-budget 0", "--token-budget must be at least 1, got 0."),
        ("--batch-size 0", "--batch-size must be at least 1, got 0."),
        ("--max-wait -1", "--max-wait must be at least 0, got -1.0."),
        ("--max-wait nan", "--max-wait must be at least 0, got nan."),
        ("--max-wait inf", "--max-wait must be a finite number, got inf."),
        ("--max-waiting 0", "--max-waiting must be at least 1, got 0."),
        ("--tensor-parallel 0", "--tensor-parallel must be from 1 to 256, got 0."),
        (
            "--tensor-parallel 20 --context-parallel 20",
            "Degrees of 20 x 1 x 1 x 20 make 400 ranks; at most 256 work.",
        ),
        (
            "--shares 3,2",
            "--shares needs --tensor-parallel or --pipeline-parallel: there is one part only.",
        ),
        (
            "--context-parallel 2 --shares 3,2",
            "--shares needs --tensor-parallel or --pipeline-parallel: rows are divided evenly.",
        ),
        (
            "--tensor-parallel 3 --shares 3,2",
            "--shares must be 3 numbers, one for each part, got 2.",
        ),
        ("--ray", "--ray needs several ranks, such as --tensor-parallel 2."),
        (
            "--tensor-parallel 2 --shares 3,0",
            "--shares must be at least 1 each, got 0: for fewer parts, lower --tensor-parallel.",
        ),
        ("--reduce sum", "--reduce can be sum only on the backend torch."),
        (
            "--pipeline-parallel 2 --kv-shares places",
            "--kv-shares can be places only with --tensor-parallel or --context-parallel.",
        ),
        (
            "--tensor-parallel 2 --kv-shares places --backend torch",
            "--kv-shares cannot be places on the backend torch.",
        ),
        (
            "--tensor-parallel 2 --kv-shares places --page-size 32",
            "--page-size cannot be chosen where --kv-shares is places.",
        ),
        (
            "--tensor-parallel 2 --attention-shares 1,2 --kv-shares places",
            "--kv-shares cannot be places with --attention-shares.",
        ),
        ("--drafts 0", "--drafts must be from 1 to 24, got 0."),
        (
            "--speculate draft --draft none",
            "--speculate can be draft only with a draft model: set --draft as well.",
        ),
        (
            "--speculate ngram --draft small",
            "--draft has no effect where --speculate is ngram: leave one of them out.",
        ),
    ],
)
def test_wrong_engine_values_name_their_option(line: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        engine_options(given_options(serve.command, *line.split()), "tiny")
    assert CommandFailure(caught.value, serve.command).message == sentence


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "--backend cp",
            "not one of auto, cpu, gpu, reference, torch. Did you mean 'cpu'?",
        ),
        (
            "--speculate OFF",
            "ngram, draft, lookahead, medusa, eagle, mtp. Did you mean 'off'?",
        ),
        ("--policy continous", "Did you mean 'continuous'?"),
        ("--kv-memory 12x", "'12x' is not a size: write 512M, 2GB or 1GiB."),
        ("--packed-cache 12x", "'12x' is not a size: write 512M, 2GB, 1GiB or off."),
        ("--threads many", "'many' is not a valid integer"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(
    cli: Callable[..., Ran], line: str, sentence: str
) -> None:
    ran = cli("serve", "x", *line.split())
    assert ran.code == 2
    assert sentence in ran.err
    assert line.split(maxsplit=1)[0] in ran.err


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512", 512),
        ("512B", 512),
        ("3k", 3000),
        ("2MB", 2_000_000),
        ("1.5g", 1_500_000_000),
        ("1GiB", 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("2 MiB", 2**21),
        ("4Ki", 4096),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert ByteSizeParam().convert(text, None, None) == num_bytes


@pytest.mark.parametrize("text", ["", "x", "-1", "1P", "1..5G", "1e9", "i", "1iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        ByteSizeParam().convert(text, None, None)


def test_one_of_shows_its_words() -> None:
    option = click.Option(["--kind"], type=WordParam(("this", "that")))
    context = click.Context(click.Command("x"))
    record = option.get_help_record(context)
    assert record is not None
    assert record[0] == "--kind [this|that]"


def test_options_about_default_sampling_reach_their_fields() -> None:
    line = ("--generation-config", "openai", "--override-generation-config", '{"top_k": 5}')
    options = engine_options(given_options(serve.command, *line), "tiny")
    assert options.generation == GenerationOptions("openai", {"top_k": 5})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
        ("5", "not a JSON object"),
        ('{"temperature": 1e999}', "not JSON: the number 1e999 is not finite"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_an_override_must_be_an_object(text: str, reason: str) -> None:
    with pytest.raises(click.BadParameter, match=reason):
        given_options(serve.command, "--override-generation-config", text)
