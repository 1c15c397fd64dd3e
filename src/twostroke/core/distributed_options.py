"""Options of several ranks, of disaggregated prefill and decode, and of KV offload.

Each field is declared with its flag, range, default and help (`core/option_schema.py`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from twostroke.core.errors import Field, UsageError
from twostroke.core.message_text import counted_noun
from twostroke.core.option_schema import Option, OptionStruct, check

REDUCTIONS: Final = ("auto", "gather", "sum")
KV_SHARES: Final = ("auto", "heads", "places")
LAUNCHERS: Final = ("auto", "ray")
MAX_RANKS: Final = 256
ROLES: Final = ("mixed", "prefill", "decode")
DISAGGREGATE: Final = ("auto", "always", "never")
PEER_LINKS: Final = ("auto", "socket", "nixl", "nixl-read", "nixl-write")
DEFAULT_PEER_ADDRESS: Final = "127.0.0.1:7800"
DEFAULT_PAGE_CACHE_BYTES: Final = 10_000_000_000
_MIN_PAGE_CACHE_BYTES: Final = 10_000_000
_STORE_SCHEMES: Final = ("redis://", "rediss://", "unix://")


class ParallelOptions(OptionStruct):
    """How many ranks run the model together, and which part of the model each rank holds.

    Ranks are processes or GPUs, on this machine or on several. Their number is the product of the
    four degrees (`tensor`, `pipeline`, `expert`, `context`); a degree of 1 divides nothing.

    Attributes:
        tensor: the number of parts into which every layer's weights and heads are divided.
        pipeline: the number of groups of consecutive layers into which the model is divided.
        expert: the number of parts into which the experts of a mixture-of-experts model are
            divided; other weights are divided as by `tensor`.
        context: the number of parts into which the rows (tokens) of a step are divided, for long
            prompts; each rank has all weights.
        shares: unequal parts, such as (3, 2): one number for each part of the weights, or for each
            group of layers if only the layers are divided.
        reduce: with "gather", ranks compute exactly the tokens that one process computes; "sum"
            moves less data and rounds differently (backend torch only); "auto" is "sum" on GPUs and
            "gather" elsewhere.
        kv_shares: "heads" divides keys and values by their heads, and with `context` not at all;
            "places" divides them evenly by the positions of tokens; "auto" is "places" on the
            backend cpu of one machine if "heads" would store some of them twice, else "heads".
        launcher: "auto" uses the ranks of the launcher that started this process (torchrun, or
            another launcher that sets RANK and WORLD_SIZE); without a launcher it starts the ranks
            on this machine. "ray" starts them by Ray.
        attention_shares: `shares` for attention with its keys and values, if they differ: with
            shares (0, 1) and attention_shares (1, 0), attention and the rest of the model are on
            different ranks.
    """

    SECTION: ClassVar[str] = "Several processes, GPUs or machines"

    tensor: Annotated[
        int,
        Option(
            "--tensor-parallel",
            low=1,
            high=MAX_RANKS,
            help="Divide every layer's weights into N parts.",
        ),
    ] = 1
    pipeline: Annotated[
        int,
        Option(
            "--pipeline-parallel",
            low=1,
            high=MAX_RANKS,
            help="Divide the layers into N groups, one after another.",
        ),
    ] = 1
    expert: Annotated[
        int,
        Option(
            "--expert-parallel",
            low=1,
            high=MAX_RANKS,
            help="Divide the experts of a mixture of experts into N parts.",
        ),
    ] = 1
    context: Annotated[
        int,
        Option(
            "--context-parallel",
            low=1,
            high=MAX_RANKS,
            help="Divide the tokens of a step into N parts, for long prompts.",
        ),
    ] = 1
    shares: Annotated[
        tuple[int, ...],
        Option(
            "--shares",
            default="equal parts",
            help="Unequal parts of the weights or layers, such as 3,2.",
        ),
    ] = ()
    reduce: Annotated[
        str,
        Option(
            "--reduce",
            choices=REDUCTIONS,
            help="How ranks combine their results: gather gives the same tokens as one process; "
            "sum moves less data (backend torch; auto on GPUs).",
        ),
    ] = "auto"
    kv_shares: Annotated[
        str,
        Option(
            "--kv-shares",
            choices=KV_SHARES,
            help="How keys and values are divided among ranks: by heads, or evenly by the "
            "positions of tokens (places).",
        ),
    ] = "auto"
    launcher: Annotated[
        str,
        Option(
            "--ray",
            choices=LAUNCHERS,
            flag_value="ray",
            default="processes of this machine, or the ranks of torchrun",
            help="Let Ray place the ranks on the machines of a cluster.",
        ),
    ] = "auto"
    attention_shares: Annotated[
        tuple[int, ...],
        Option(
            "--attention-shares",
            default="as --shares",
            help="Unequal parts of attention and its KV cache, such as 1,0.",
        ),
    ] = ()

    def __post_init__(self) -> None:
        """Raise UsageError if a degree, the number of ranks, or the shares are not valid."""
        check(self)
        if self.num_ranks > MAX_RANKS:
            degrees = f"{self.tensor} x {self.pipeline} x {self.expert} x {self.context}"
            reason = (
                f"Degrees of {degrees} make {counted_noun(self.num_ranks, 'rank')}; at most "
                f"{MAX_RANKS} work."
            )
            raise UsageError(reason)
        if self.launcher != "auto" and self.num_ranks == 1:
            reason = "needs several ranks, such as {other} 2."
            raise UsageError(reason, field="launcher", other=Field("tensor"))
        if self.kv_shares == "places" and self.num_ranks == self.pipeline:
            reason = "can be places only with {other} or {more}."
            facts = {"other": Field("tensor"), "more": Field("context")}
            raise UsageError(reason, field="kv_shares", **facts)
        if self.kv_shares == "places" and self.attention_shares:
            reason = "cannot be places with {other}."
            raise UsageError(reason, field="kv_shares", other=Field("attention_shares"))
        if self.shares:
            self._check_shares()
        if self.attention_shares:
            self._check_attention_shares()

    @property
    def num_ranks(self) -> int:
        """The number of ranks: the product of the four degrees."""
        return self.tensor * self.pipeline * self.expert * self.context

    @property
    def column_shares(self) -> tuple[int, ...]:
        """The relative size of each part of every layer's weights; equal numbers by default."""
        count = self.tensor * self.expert
        return self.shares if self.shares and count > 1 else (1,) * count

    @property
    def stage_shares(self) -> tuple[int, ...]:
        """The relative size of each pipeline stage, which is a group of layers."""
        are_of_stages = self.shares and self.tensor * self.expert == 1
        return self.shares if are_of_stages else (1,) * self.pipeline

    def _check_shares(self) -> None:
        count = self.tensor * self.expert
        count = self.pipeline if count == 1 else count
        if count == 1:
            reason = "needs {other} or {more}: "
            reason += "rows are divided evenly." if self.context > 1 else "there is one part only."
            facts = {"other": Field("tensor"), "more": Field("pipeline")}
            raise UsageError(reason, field="shares", **facts)
        if len(self.shares) != count:
            reason = (
                f"must be {counted_noun(count, 'number')}, one for each part, got "
                f"{len(self.shares)}."
            )
            raise UsageError(reason, field="shares")
        if min(self.shares) < 1 and not self.attention_shares:
            knob = "tensor" if self.tensor > 1 else "expert" if self.expert > 1 else "pipeline"
            reason = f"must be at least 1 each, got {min(self.shares)}: for fewer parts, lower "
            raise UsageError(f"{reason}{{other}}.", field="shares", other=Field(knob))

    def _check_attention_shares(self) -> None:
        name, count = "attention_shares", self.tensor * self.expert
        if count == 1:
            raise UsageError("needs {other}.", field=name, other=Field("tensor"))
        if len(self.attention_shares) != count:
            reason = (
                f"must be {counted_noun(count, 'number')}, one for each part, got "
                f"{len(self.attention_shares)}."
            )
            raise UsageError(reason, field=name)
        for field_name in (name, "shares"):
            shares = getattr(self, field_name) or (1,)
            if min(shares) < 0 or not any(shares):
                reason = "must be 0 or more each, and not 0 for all."
                raise UsageError(reason, field=field_name)
        if 0 in map(sum, zip(self.column_shares, self.attention_shares, strict=True)):
            reason = "leaves a part without any work: its share is 0 in {other}, too."
            raise UsageError(reason, field=name, other=Field("shares"))


class DisaggregationOptions(OptionStruct):
    """Whether this engine prefills prompts, decodes them, or does both (disaggregated prefill).

    `role` "mixed": the engine prefills and decodes its own requests. "prefill": it also prefills
    prompts for decode engines, which connect to `peer_address`. "decode": it lets the engines at
    `prefill_peers`, and at the addresses in the file `peer_listing`, prefill prompts, and fetches
    the KV pages. `disaggregate` chooses these prompts: "always", "never", or "auto", where a remote
    prefill saves time. `peer_link` is the transfer method; "auto" and "nixl" measure the methods
    and take the faster.
    """

    SECTION: ClassVar[str] = "Disaggregated prefill and decode"

    role: Annotated[
        str,
        Option(
            "--role",
            choices=ROLES,
            help="prefill: also prefill prompts for decode engines; decode: let prefill engines "
            "prefill prompts; mixed: neither.",
        ),
    ] = "mixed"
    peer_address: Annotated[
        str | None,
        Option(
            "--peer-address",
            metavar="HOST:PORT",
            default=DEFAULT_PEER_ADDRESS,
            help="Where a prefill engine listens for decode engines; port 0 takes a free one. "
            "Engines of other users or machines need the same TWOSTROKE_PEER_SECRET.",
        ),
    ] = None
    prefill_peers: Annotated[
        tuple[str, ...],
        Option(
            "--prefill-peer",
            metavar="HOST:PORT",
            help="The --peer-address of a prefill engine; repeatable.",
        ),
    ] = ()
    disaggregate: Annotated[
        str,
        Option(
            "--disaggregate",
            choices=DISAGGREGATE,
            help="Which prompts a decode engine sends to prefill engines; auto: prompts for which "
            "that saves time.",
        ),
    ] = "auto"
    peer_link: Annotated[
        str,
        Option(
            "--peer-link",
            choices=PEER_LINKS,
            help="How KV pages travel between engines that share no memory: by their socket, or by "
            "NIXL, where the decode engine reads or the prefill engine writes; auto measures, and "
            "takes the faster one.",
        ),
    ] = "auto"
    peer_listing: Annotated[
        str | None,
        Option(
            "--prefill-peers-file",
            metavar="FILE",
            default="none",
            help="File with the addresses of prefill engines, one on each line, besides "
            "--prefill-peer. Changes are followed; the file may be empty.",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise UsageError if an option or an address is not valid, or does not fit the role."""
        check(self)
        if self.role == "decode" and not self.prefill_peers and self.peer_listing is None:
            reason = "can be decode only with the address of a prefill engine: set {other}."
            raise UsageError(reason, field="role", other=Field("prefill_peers"))
        if self.role != "decode" and self.prefill_peers:
            reason = "needs {other} decode."
            raise UsageError(reason, field="prefill_peers", other=Field("role"))
        if self.role != "decode" and self.peer_listing is not None:
            raise UsageError("needs {other} decode.", field="peer_listing", other=Field("role"))
        if self.role != "decode" and self.disaggregate != "auto":
            raise UsageError("needs {other} decode.", field="disaggregate", other=Field("role"))
        if self.role != "prefill" and self.peer_address is not None:
            raise UsageError("needs {other} prefill.", field="peer_address", other=Field("role"))
        if self.role == "mixed" and self.peer_link != "auto":
            reason = "needs {other} prefill or decode."
            raise UsageError(reason, field="peer_link", other=Field("role"))
        for address in self.prefill_peers:
            parse_address(address, "prefill_peers")
        parse_address(self.own_address, "peer_address")

    @property
    def own_address(self) -> str:
        """The HOST:PORT at which a prefill engine listens for decode engines."""
        return self.peer_address or DEFAULT_PEER_ADDRESS


class OffloadOptions(OptionStruct):
    """Where KV pages are kept in addition to the engine's memory: a folder, Redis, or both."""

    SECTION: ClassVar[str] = "KV offload"

    page_cache: Annotated[
        str | None,
        Option(
            "--page-cache",
            metavar="DIR",
            default="pages are in memory only",
            help="Keep keys and values of prompts in this folder, so that they are not computed "
            "again after a restart.",
        ),
    ] = None
    page_cache_bytes: Annotated[
        int | None,
        Option(
            "--page-cache-size",
            form="size",
            low=_MIN_PAGE_CACHE_BYTES,
            default="10GB",
            help="Most bytes that the folder holds, of all models together, such as 50GB.",
        ),
    ] = None
    page_store: Annotated[
        str | None,
        Option(
            "--page-store",
            metavar="URL",
            default="none",
            help="Share keys and values of prompts with servers on other machines in this Redis "
            "server: redis://, rediss:// or unix://. Needs the extra [store] and "
            "TWOSTROKE_STORE_KEY.",
        ),
    ] = None

    def __post_init__(self) -> None:
        """Raise UsageError if an option is not valid, or a size is given without a folder."""
        check(self)
        if self.page_cache == "":
            raise UsageError("must name a folder: leave it out, or name one.", field="page_cache")
        if self.page_cache_bytes is not None and self.page_cache is None:
            raise UsageError("needs {other}.", field="page_cache_bytes", other=Field("page_cache"))
        if self.page_store is not None and not self.page_store.startswith(_STORE_SCHEMES):
            reason = f"must be a URL that begins with one of: {', '.join(_STORE_SCHEMES)}."
            raise UsageError(reason, field="page_store")

    @property
    def max_page_cache_bytes(self) -> int:
        """The maximum number of bytes that KV pages may take in the folder of the page cache."""
        return self.page_cache_bytes or DEFAULT_PAGE_CACHE_BYTES

    @property
    def is_used(self) -> bool:
        """Whether KV pages are kept in a folder or in a page store (Redis)."""
        return self.page_cache is not None or self.page_store is not None

    @property
    def field(self) -> str:
        """The name of the option that turned KV offload on, for error messages."""
        return "page_store" if self.page_cache is None else "page_cache"


def parse_address(text: str, field: str) -> tuple[str, int]:
    """Return the host and the port of a HOST:PORT text; `field` is the option that errors name.

    Raises:
        UsageError: the text is not HOST:PORT.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UsageError("must be HOST:PORT, got {value!r}.", field=field, value=text)
    return host.removeprefix("[").removesuffix("]"), int(port)
