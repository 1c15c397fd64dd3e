"""The options that several commands share, by section, and what they are turned into."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from twostroke.cli.help import (
    ByteSize,
    Counts,
    JsonText,
    OneOf,
    Option,
    TextFile,
    WordOr,
    read_text,
)
from twostroke.core.constraint import Constraint
from twostroke.core.env import install_command
from twostroke.core.errors import BackendError, Field, UsageError
from twostroke.core.frozen import Frozen
from twostroke.core.options import (
    AUTO_BITS,
    BACKENDS,
    DEFAULT_PAGE_SIZE,
    DEFAULT_PEER_ADDRESS,
    DISAGGREGATE,
    GENERATION_CONFIGS,
    KV_FORMATS,
    KV_SHARES,
    PARTNER,
    PEER_LINKS,
    POLICIES,
    REDUCTIONS,
    ROLES,
    SPECULATE,
    BatchOptions,
    CacheOptions,
    ComputeOptions,
    DisaggregationOptions,
    EngineOptions,
    GenerationOptions,
    OffloadOptions,
    ParallelOptions,
    SpeculationOptions,
)
from twostroke.core.sampling import BOUNDS, DEFAULTED, LOCAL_DEFAULTS, SamplingParams
from twostroke.model.built_in_templates import BUILT_IN, check_template

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T", bound=Frozen)
_NO_DRAFT: Final = "none"
_MAX_PATH: Final = 4096  # characters; longer texts are templates
_DEFAULTS: Final = SamplingParams()
_NUMBERS: Final = [name for name in BOUNDS if name not in {"n", "logprobs", "prompt_logprobs"}]
_FORMS: Final = ("json_schema", "regex", "choice", "grammar")  # as constraints call them

_sampling = partial(Option, section="Choosing tokens")
_form = partial(Option, section="Form of the answer")
_machine = partial(Option, section="Machine")
_chat = partial(Option, section="Conversations")
_dividing = partial(Option, section="Several processes, GPUs or machines")
_guessing = partial(Option, section="Speculation")
_batching = partial(Option, section="Batching")
_handing = partial(Option, section="Prefill and decode apart")
_keeping = partial(Option, section="Pages that stay")
_observing = partial(Option, section="Observing")


def _usual(name: str) -> str:
    """Return the help's words about a default that the model's files may replace."""
    if name not in DEFAULTED:
        return ""
    return f" [default: the model's own, else {getattr(LOCAL_DEFAULTS, name):g}]"


# The fields of `SamplingParams`.
SAMPLING: Final = [
    *(
        _sampling(
            [f"--{name.replace('_', '-')}"],
            type=BOUNDS[name].kind,
            default=getattr(_DEFAULTS, name),
            help=BOUNDS[name].description + _usual(name),
        )
        for name in _NUMBERS
    ),
    _sampling(["--stop"], multiple=True, help="Stop before this text; repeatable."),
    _sampling(["--ignore-eos"], is_flag=True, help="Do not stop at end tokens."),
]

# What `constraint` reads.
FORM: Final = [
    _form(["--json-schema"], type=TextFile(), help="JSON that follows the schema in this file."),
    _form(["--regex"], help="A text that matches this regular expression as a whole."),
    _form(["--choice"], multiple=True, help="One of the given texts; repeat for each."),
    _form(["--grammar"], type=TextFile(), help="A text of the grammar in this file: Lark or GBNF."),
]

# The fields of `ComputeOptions` and `CacheOptions`, by name, and how careful a load is.
MACHINE: Final = {
    str(option.name): option
    for option in (
        _machine(["--backend"], type=OneOf(BACKENDS), default="auto", help="Compute backend."),
        _machine(
            ["--threads", "num_threads"],
            type=int,
            help="Compute threads [default: one for each core].",
        ),
        _machine(
            ["--level"], help="Instruction set [default: the best that runs here, see doctor]."
        ),
        _machine(
            ["--device"],
            default="auto",
            help="Device of the backends gpu and torch, such as cuda:1.",
        ),
        _machine(
            ["--same-tokens"],
            is_flag=True,
            help="Backend gpu: a request's tokens do not depend on its batch, as always on cpu.",
        ),
        _machine(
            ["--activation-bits"],
            type=WordOr(AUTO_BITS),
            default=ComputeOptions().activation_bits,
            help="Bits of activations for quantized weights: 15, 9, 8 (fewer are faster), or auto: "
            "as few for each product as the answers allow, chosen once for a model.",
        ),
        _machine(
            ["--context-length"],
            type=int,
            help="Most tokens of prompt and answer together [default: the model's limit].",
        ),
        _machine(
            ["--kv-memory", "memory_bytes"],
            type=ByteSize(),
            help="Memory for keys and values, such as 2GB; the prefix cache fills it in time "
            "[default: as much as the weights and one whole context, or 128 tokens for each of "
            "--max-running; at most half of what is free].",
        ),
        _machine(
            ["--kv-format"],
            type=OneOf(KV_FORMATS),
            default="auto",
            help="Format of keys and values: f16, bf16, int16 (the fastest on x86 processors, "
            "where it is auto), int8 (half the memory), or fp8 (likewise; backend gpu).",
        ),
        _machine(
            ["--page-size"],
            type=int,
            help=f"Tokens in a page of keys and values [default: {DEFAULT_PAGE_SIZE}, or 64 for "
            "each rank where these are divided by places].",
        ),
        _machine(
            ["--prefix-cache/--no-prefix-cache"],
            default=True,
            help="Reuse what was computed for a prompt that begins the same.",
        ),
        _machine(
            ["--strict-prefix"],
            is_flag=True,
            help="Reuse only what was computed for prompts, not for generated tokens.",
        ),
        _machine(
            ["--accept-quality"],
            is_flag=True,
            help="Use a model that writes garbage, as its first load finds, with a warning.",
        ),
    )
}

# What `engine_options` makes a chat template of.
TEMPLATE: Final = [
    _chat(
        ["--chat-template"],
        metavar="NAME|FILE|TEXT",
        help="Another chat template than the model's: a built-in one, such as chatml, or Jinja.",
    ),
    _chat(["--chat-template-file"], type=TextFile(), help="A file with the chat template."),
]

# The fields of `ParallelOptions`.
PARALLEL: Final = [
    *(
        _dividing([f"--{name}-parallel", name], type=int, default=1, metavar="N", help=what)
        for name, what in (
            ("tensor", "Divide every layer's weights into N parts."),
            ("pipeline", "Divide the layers into N groups, one after another."),
            ("expert", "Divide the experts of a mixture into N parts."),
            ("context", "Divide the tokens of a step into N parts, for long prompts."),
        )
    ),
    _dividing(
        ["--shares"],
        type=Counts(least=0),
        default=(),
        show_default=False,
        help="Unequal parts, such as 3,2 [default: equal parts].",
    ),
    _dividing(
        ["--attention-shares"],
        type=Counts(least=0),
        default=(),
        show_default=False,
        help="Other parts of attention and its pages, such as 1,0 [default: --shares].",
    ),
    _dividing(
        ["--reduce"],
        type=OneOf(REDUCTIONS),
        default="auto",
        help="gather: the tokens of one process; sum: moves less (torch backend, auto on GPUs).",
    ),
    _dividing(
        ["--kv-shares"],
        type=OneOf(KV_SHARES),
        default="auto",
        help="How keys and values are divided: by heads, or evenly by the places of tokens.",
    ),
    _dividing(
        ["--ray", "launcher"],
        flag_value="ray",
        default="auto",
        show_default=False,
        help="Let Ray place the ranks [default: this machine, or as torchrun says].",
    ),
]

# The fields of `BatchOptions`.
BATCHING: Final = [
    _batching(
        ["--policy"],
        type=OneOf(POLICIES),
        default=BatchOptions().policy,
        help="When requests start: at any step, or in batches (dynamic, static).",
    ),
    _batching(
        ["--max-running"], type=int, help="Most requests that run at the same time [default: 256]."
    ),
    _batching(
        ["--token-budget"],
        type=int,
        default=BatchOptions().token_budget,
        help="Most tokens that a step computes.",
    ),
    _batching(
        ["--batch-size"],
        type=int,
        default=BatchOptions().batch_size,
        help="Requests in a dynamic or static batch.",
    ),
    _batching(
        ["--max-wait", "max_wait_s"],
        type=float,
        default=BatchOptions().max_wait_s,
        help="Seconds that a dynamic batch waits for more requests; a static one of `serve` waits "
        "10 if this is left out.",
    ),
    _batching(
        ["--max-waiting", "max_waiting_requests"],
        type=int,
        default=BatchOptions().max_waiting_requests,
        help="Most requests in the queue; more are refused.",
    ),
]

# The fields of `DisaggregationOptions`.
HANDOVER: Final = [
    _handing(
        ["--role"],
        type=OneOf(ROLES),
        default="mixed",
        help="prefill: read prompts for decode engines, too; decode: let such engines read them.",
    ),
    _handing(
        ["--peer-address"],
        metavar="HOST:PORT",
        help=f"Where a prefill engine waits for decode engines [default: {DEFAULT_PEER_ADDRESS}]. "
        "Those of other users or machines need the same TWOSTROKE_PEER_SECRET.",
    ),
    _handing(
        ["--prefill-peer", "prefill_peers"],
        multiple=True,
        metavar="HOST:PORT",
        help="The --peer-address of a prefill engine; repeatable.",
    ),
    _handing(
        ["--disaggregate"],
        type=OneOf(DISAGGREGATE),
        default="auto",
        help="Which prompts prefill engines read; auto: those for which it saves time.",
    ),
    _handing(
        ["--peer-link"],
        type=OneOf(PEER_LINKS),
        default="auto",
        help="How pages travel if no memory is shared; auto: socket or NIXL, what is faster.",
    ),
]

# The fields of `OffloadOptions`.
TIERS: Final = [
    _keeping(
        ["--page-cache"],
        metavar="DIR",
        help="Keep keys and values of prompts in this folder, so that a server that starts again "
        "does not compute them again [default: none are kept].",
    ),
    _keeping(
        ["--page-cache-size", "page_cache_bytes"],
        type=ByteSize(),
        help="Most that the folder holds, such as 50GB [default: 10GB].",
    ),
    _keeping(
        ["--page-store"],
        metavar="URL",
        help="Share them with servers on other machines in this Redis server, redis:// or "
        "rediss://; needs the extra [store] and TWOSTROKE_STORE_KEY.",
    ),
]

# The fields of `GenerationOptions`.
DEFAULT_SAMPLING: Final = [
    _sampling(
        ["--generation-config"],
        type=OneOf(GENERATION_CONFIGS),
        default="auto",
        help="Sampling of requests that leave it out: auto: as the model's files recommend, else "
        "as usual for local servers; none: the usual; openai: temperature 1, nothing cut off.",
    ),
    _sampling(
        ["--override-generation-config"],
        type=JsonText(),
        default=None,
        metavar="JSON",
        help='Values that precede these, such as \'{"temperature": 0.6, "top_k": 20}\'.',
    ),
]

# What the operators of a server see: logs, objectives, traces, the dashboard.
OBSERVING: Final = [
    _observing(
        ["--dashboard/--no-dashboard"],
        default=None,
        help="Serve the dashboard and plans, /api/state and /api/plan [default: only on a "
        "loopback host].",
    ),
    _observing(
        ["--objective", "objectives"],
        multiple=True,
        metavar="[CLASS:]NAME=S",
        help="A latency objective: queue, ttft, tpot or e2e in seconds, for one class of service "
        "or for all; repeatable.",
    ),
    _observing(["--log-format"], type=OneOf(("text", "json")), default="text", help="Log format."),
    _observing(
        ["--log-level"],
        type=OneOf(("debug", "info", "warning", "error")),
        default="info",
        help="Lowest level that is logged.",
    ),
    _observing(["--access-log/--no-access-log"], default=True, help="Log a line for each request."),
    _observing(
        ["--otlp-endpoint"],
        metavar="URL",
        help="Send traces to this OpenTelemetry collector (OTLP over HTTP); needs "
        "the extra [traces].",
    ),
]


def speculation(draft: str = _NO_DRAFT) -> list[Option]:
    """Return the options of `SpeculationOptions`; `draft` is the default of --draft."""
    return [
        _guessing(
            ["--speculate", "method"],
            type=OneOf(SPECULATE),
            default="auto",
            help="How to guess tokens ahead. Answers stay the same, only their speed changes.",
        ),
        _guessing(
            ["--draft"],
            default=draft,
            metavar="MODEL|auto|none",
            help="A smaller model that guesses; auto: the catalogue's, if it is in the cache.",
        ),
        _guessing(["--heads"], help="A folder of heads, trained by twostroke train-heads."),
        _guessing(
            ["--drafts", "count"],
            type=int,
            help="Always guess this many tokens [default: as many as save time].",
        ),
    ]


def engine_options(given: dict[str, Any], model: str) -> EngineOptions:
    """Take the options of an engine for `model` out of `given` and build them.

    An option has the name of the field that it sets; what a command does not offer stays as it is.
    If a launcher has made this process another rank than 0, it is that rank, and exits in the end.
    """
    draft = given.get("draft")
    if draft is not None and draft.lower() in {_NO_DRAFT, PARTNER}:
        given["draft"] = None if draft.lower() == _NO_DRAFT else PARTNER
    if given.get("override_generation_config") is None:
        given.pop("override_generation_config", None)
    options = EngineOptions(
        _taken(ComputeOptions, given),
        _taken(CacheOptions, given),
        _taken(BatchOptions, given),
        _taken(SpeculationOptions, given),
        _taken(ParallelOptions, given),
        given.pop("accept_quality", False),
        _taken(DisaggregationOptions, given),
        _taken(OffloadOptions, given),
        _taken(GenerationOptions, given),
        _chat_template(given),
    )
    if options.parallel.num_ranks > 1 and options.parallel.launcher == "auto":
        from twostroke.backends.parallel.launcher import follow_if_launched

        follow_if_launched(model, options.parallel)
    return options


def _chat_template(values: dict[str, Any]) -> str | None:
    """Take the options of `TEMPLATE` out of `values`, and return the template or its name."""
    named: str | None = values.pop("chat_template", None)
    text: str | None = values.pop("chat_template_file", None)
    if named is None or text is not None:
        if named is not None:
            reason = "cannot be combined with {other}: leave one of them out."
            raise UsageError(reason, field="chat_template", other=Field("chat_template_file"))
        return text
    is_file = named not in BUILT_IN and len(named) < _MAX_PATH and Path(named).is_file()
    template = read_text(named) if is_file else named
    check_template(template)
    return template


def parallel_options(given: dict[str, Any]) -> ParallelOptions:
    """Take the options of `PARALLEL` out of `given` and build them."""
    return _taken(ParallelOptions, given)


def _taken(kind: type[T], given: dict[str, Any]) -> T:
    names = [name for name in kind.__struct_fields__ if name in given]
    return kind(**{name: given.pop(name) for name in names})


def sampling_params(given: dict[str, Any], constraint: Constraint | None = None) -> SamplingParams:
    """Take the sampling options out of `given` and build them."""
    names = (*_NUMBERS, "stop", "ignore_eos")
    return SamplingParams(**{name: given.pop(name) for name in names}, constraint=constraint)


def constraint(given: dict[str, Any]) -> Constraint | None:
    """Take the options of `FORM` out of `given` and return the constraint, if there is one.

    Raises:
        UsageError: more than one was given.
    """
    texts = {name: given.pop(name) for name in _FORMS}
    texts["choice"] = json.dumps(texts["choice"], ensure_ascii=False) if texts["choice"] else None
    found = [Constraint(name, text, name) for name, text in texts.items() if text is not None]
    if len(found) > 1:
        reason = "cannot be combined with {other}: leave one of them out."
        raise UsageError(reason, field=found[0].param, other=Field(found[1].param))
    return found[0] if found else None


def is_given(name: str) -> bool:
    """Whether an option stands on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


def check_effect(name: str, other: str, *, has_effect: bool, value: str = "") -> None:
    """Refuse an option that is given without `other` (with `value`), on which its effect depends.

    Raises:
        UsageError: it has no effect.
    """
    if is_given(name) and not has_effect:
        reason = f"has no effect without {{other}}{value and ' '}{value}: add that, or leave "
        raise UsageError(f"{reason}{{this}} out.", field=name, other=Field(other), this=Field(name))


def check_batching(policy: str, *, is_server: bool = False) -> None:
    """Refuse options of a batching policy that is not chosen.

    A server starts a static batch that is not full after `--max-wait`; other commands know when no
    more requests come.

    Raises:
        UsageError: one has no effect.
    """
    has_wait = policy == "dynamic" or (is_server and policy == "static")
    check_effect("batch_size", "policy", has_effect=policy != "continuous", value="dynamic")
    check_effect("max_wait_s", "policy", has_effect=has_wait, value="dynamic")


@contextmanager
def needing_torch(what: str) -> Iterator[None]:
    """Raise BackendError if an import in the block fails because there is no PyTorch."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise BackendError(f"{what} needs PyTorch: {install_command('train')}.") from None


PLOTS: Final = (".svg", ".png")


def file_option(suffixes: tuple[str, ...]) -> dict[str, Any]:
    """Return the type and the placeholder of an option that takes such a file."""
    kind = click.Path(path_type=Path, dir_okay=False, writable=True)
    return {"type": kind, "metavar": "|".join(f"FILE{one}" for one in suffixes)}


def check_file(path: Path | None, field: str, suffixes: tuple[str, ...]) -> None:
    """Refuse a file that could not be written.

    Raises:
        UsageError: its suffix is another, its folder is missing, or matplotlib is.
    """
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        reason = f"must end in {' or '.join(suffixes)}, got '{{value}}'."
        raise UsageError(reason, field=field, value=path.name)
    check_folder(path, field)
    from twostroke.lab.measure.plots import new_figure

    new_figure(1, 1)


def check_folder(path: Path, field: str) -> None:
    """Raise UsageError if a file's folder is missing."""
    if not path.absolute().parent.is_dir():
        reason = "is in a folder that does not exist: '{value}'."
        raise UsageError(reason, field=field, value=path.parent)
