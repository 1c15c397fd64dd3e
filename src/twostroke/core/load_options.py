"""The options of a synthetic load of requests, which `bench` and `simulate` share."""

from __future__ import annotations

from typing import Annotated, ClassVar

from twostroke.core.option_schema import Option, OptionStruct


class LoadOptions(OptionStruct):
    """The arrivals and lengths of a synthetic load, and options that change any load.

    A synthetic load has random requests. `SyntheticWorkload` has the defaults and the ranges of the
    fields that are None here. They are None so that a command knows which of them the user gave.
    """

    SECTION: ClassVar[str] = "Arrivals and lengths"

    arrivals: Annotated[
        str | None,
        Option(
            "--arrivals",
            choices=("poisson", "constant", "gamma"),
            default="poisson",
            help="Distribution of arrivals of --rate.",
        ),
    ] = None
    burstiness: Annotated[
        float | None,
        Option("--burstiness", default="3", help="Coefficient of variation of gamma arrivals."),
    ] = None
    prompt: Annotated[
        int | None, Option("--prompt", default="1024", help="Mean tokens of a prompt.")
    ] = None
    output: Annotated[
        int | None, Option("--output", default="256", help="Mean tokens of an answer.")
    ] = None
    spread: Annotated[
        float | None,
        Option("--spread", default="0", help="Coefficient of variation of both lengths."),
    ] = None
    shared: Annotated[
        int | None,
        Option("--shared", default="0", help="Tokens at the start that all prompts share."),
    ] = None
    speed: Annotated[float, Option("--speed", help="Make requests arrive X times as fast.")] = 1.0
    scale: Annotated[
        float, Option("--scale", help="Multiply the lengths of prompts and answers by X.")
    ] = 1.0


class ConversationOptions(OptionStruct):
    """Options of the conversations of several turns that `twostroke bench` sends."""

    SECTION: ClassVar[str] = "Conversations"

    num_turns: Annotated[
        int,
        Option(
            "--turns",
            low=1,
            high=1000,
            help="Requests are conversations of N turns, each with the history and its answers.",
        ),
    ] = 1
    think_s: Annotated[
        float,
        Option("--think", low=0, help="Seconds from an answer to the next message of the user."),
    ] = 0.0
    num_calls: Annotated[
        int,
        Option(
            "--tool-calls",
            low=0,
            high=1000,
            help="Tool calls of an agent before the answer of each turn; each is a request.",
        ),
    ] = 0
    tool_result: Annotated[
        int, Option("--tool-result", low=1, help="Tokens of the result of a tool.")
    ] = 256
    tool_s: Annotated[
        float, Option("--tool-time", low=0, help="Seconds from a tool call to its result.")
    ] = 0.0
