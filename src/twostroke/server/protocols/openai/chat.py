"""POST /v1/chat/completions: OpenAI's chat protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec.structs import replace

from twostroke.core.errors import RequestError
from twostroke.server.body import field
from twostroke.server.http.answer_limits import CHAT
from twostroke.server.http.errors import UnsupportedFieldError
from twostroke.server.http.ignored import Ignored
from twostroke.server.protocols.common.fields import (
    CommonFields,
    MetadataPairs,
    ReasoningBudget,
    ReasoningEffort,
    TemplateVariables,
    TopLogprobs,
    check_combinations,
    llama_server_aliases,
    to_caller,
    to_job,
    to_params,
)
from twostroke.server.protocols.common.prompts import (
    ContinuesLast,
    Messages,
    OpensTurn,
    to_conversation,
    to_thinking,
)
from twostroke.server.protocols.common.tools import (
    TOOL_CHOICE,
    AllowedToolsChoice,
    CustomToolBody,
    NamedChoice,
    NamedCustomChoice,
    ParallelCalls,
    ToolBody,
    ToolChoice,
    ToolsAs,
    restrict_tools,
    to_tools,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twostroke.engine.chat.reasoning import Thinking
    from twostroke.engine.chat.tools import Tools
    from twostroke.engine.model_card import ModelCard
    from twostroke.server.generation.job import Job
    from twostroke.server.generation.response_store import Tenant

# The fields with a budget of the reasoning: this server's, llama-server's, vLLM's and Qwen's.
BUDGET_NAMES: Final = (
    *("reasoning_budget", "thinking_budget_tokens", "thinking_token_budget", "thinking_budget"),
)
_SPLITS_REASONING: Final = {"none": False, "deepseek": True}
TOOL_NAMES: Final = {
    "tool_choice.name": "tool_choice.function.name",
    "tools[].name": "tools[].function.name",
    "tools[].parameters": "tools[].function.parameters",
}


class ChatThinking(field.RequestObject):
    """The field `thinking` that clients of GLM, DeepSeek and Kimi send, as in Anthropic's API."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: ReasoningBudget = None

    @property
    def is_on(self) -> bool | None:
        """Whether reasoning is switched on or off; None leaves that to the template."""
        return {"enabled": True, "disabled": False}.get(self.type or "")


class ChatRequest(CommonFields, kw_only=True):
    """The body of a chat completion request."""

    messages: Messages
    max_completion_tokens: Annotated[
        int | None, field.limit("The newer name of `max_tokens`; if both are given, it holds.")
    ] = None
    logprobs: Annotated[bool | None, field.doc("Report how likely each token was.")] = None
    top_logprobs: TopLogprobs = None
    add_generation_prompt: OpensTurn = None
    continue_final_message: ContinuesLast = None

    chat_template_kwargs: TemplateVariables = None
    reasoning_effort: ReasoningEffort = None
    thinking: Annotated[
        ChatThinking | None, field.doc("Whether to reason, and how much."), field.DROPPABLE
    ] = None
    enable_thinking: Annotated[
        bool | None, field.doc("Whether to reason, as Qwen's clients say."), field.DROPPABLE
    ] = None
    reasoning_budget: ReasoningBudget = None
    thinking_budget_tokens: ReasoningBudget = None  # llama-server's name
    thinking_token_budget: ReasoningBudget = None  # vLLM's name
    thinking_budget: ReasoningBudget = None  # the name of Qwen's own service
    reasoning_format: Annotated[
        Literal["none", "auto", "deepseek"] | None,
        field.doc(
            "llama-server's: `none` leaves reasoning in the content, `deepseek` sends it apart; "
            "`auto` leaves that to the server."
        ),
        field.DROPPABLE,
    ] = None

    store: Annotated[
        bool | None, field.doc("Keep the answer, to list and read it later."), field.DROPPABLE
    ] = None
    metadata: Annotated[
        MetadataPairs | None, field.doc("Returned with a stored answer."), field.DROPPABLE
    ] = None

    tools: ToolsAs[ToolBody | CustomToolBody] = None
    tool_choice: Annotated[ToolChoice | None, TOOL_CHOICE] = None
    parallel_tool_calls: ParallelCalls = None

    add_special_tokens: field.AlwaysOff = None
    audio: field.Hint = None  # has no effect without the modality audio
    chat_template: field.Unsupported = None
    documents: Annotated[Any, field.unsupported([])] = None
    echo: field.AlwaysOff = None
    function_call: Annotated[Any, field.unsupported("none", "auto")] = None
    functions: Annotated[
        Any, field.doc("Older than `tools`; accepted if `function_call` is `none`.")
    ] = None
    modalities: Annotated[Any, field.unsupported(["text"])] = None
    verbosity: Annotated[Any, field.hint("medium")] = None
    web_search_options: field.Hint = None


def read(request: ChatRequest, tenant: Tenant) -> Job:
    """Translate the body of a chat completion request into a job that the engine can run.

    Raises:
        RequestError: a value is out of bounds or not supported; the error's `field` names it.
    """
    check_combinations(request)
    if request.functions and request.function_call != "none":
        raise UnsupportedFieldError("is not supported yet: send tools.", field="functions")
    tools = _read_tools(request)
    conversation = to_conversation(
        request.messages,
        tools,
        opens_turn=request.add_generation_prompt,
        continues=request.continue_final_message,
        thinking=_thinking(request),
    )
    ignored = list[Ignored]()
    newer_limit = request.max_completion_tokens
    if newer_limit is not None and request.max_tokens not in {None, newer_limit}:
        reason = "has no effect beside max_completion_tokens, its newer name."
        ignored.append(Ignored.of(RequestError(reason, field="max_tokens")))
    job = to_job(
        request,
        (conversation,),
        params=to_params(
            request, logprobs=_num_alternatives(request), max_tokens=CHAT.first_limit(request)
        ),
        caller=to_caller(request, "messages", tenant),
        tools=tools,
    )
    return replace(
        job,
        ignored=(*job.ignored, *ignored),
        splits_reasoning=_SPLITS_REASONING.get(request.reasoning_format or ""),
    )


def _thinking(request: ChatRequest) -> Thinking:
    """Return a request's options for the model's reasoning.

    An effort takes precedence over fields that only switch reasoning on or off.
    """
    effort, is_on, param = request.reasoning_effort, request.enable_thinking, "enable_thinking"
    if is_on is None and request.thinking is not None:
        is_on, param = request.thinking.is_on, "thinking"
    return to_thinking(
        request.chat_template_kwargs,
        effort,
        param=param if effort is None else "reasoning_effort",
        is_on=is_on,
        budget=_reasoning_budget(request),
    )


def _reasoning_budget(request: ChatRequest) -> tuple[str, int] | None:
    """Return the name and the value of a request's first field with a budget of the reasoning."""
    for name in BUDGET_NAMES:
        budget = getattr(request, name)
        if budget is not None:
            return name, budget
    if request.thinking is not None and request.thinking.budget_tokens is not None:
        return "thinking.budget_tokens", request.thinking.budget_tokens
    return None


def _read_tools(request: ChatRequest) -> Tools | None:
    """Return the tools that the answer to a chat request may call; None if it may call none.

    Raises:
        RequestError: a tool is not valid, or the tool choice names a tool that does not exist.
    """
    choice = request.tool_choice
    offered = [tool.offered() for tool in request.tools or ()]
    parallel = request.parallel_tool_calls
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        tools = to_tools(offered, allowed.mode, parallel=parallel)
        return restrict_tools(
            tools,
            [tool.named for tool in allowed.tools],
            mode=allowed.mode,
            where="tool_choice.allowed_tools.tools",
            name_field="function.name",
        )
    mode = choice.named if isinstance(choice, NamedChoice | NamedCustomChoice) else choice
    return to_tools(offered, mode, parallel=parallel)


class ChatInputTokens(msgspec.Struct, frozen=True):
    """The number of tokens in a chat request's prompt, including cached tokens."""

    input_tokens: int
    object: Literal["chat.completion.input_tokens"] = "chat.completion.input_tokens"


def count_tokens(request: ChatRequest, card: ModelCard, tenant: Tenant) -> ChatInputTokens:
    """Answer POST /v1/chat/completions/input_tokens: count the tokens of the prompt.

    Raises:
        RequestError: a value is out of bounds or not supported, as in a chat completion
            request.
    """
    [prompt] = read(request, tenant).encode(card).prompts
    return ChatInputTokens(len(prompt))


def _num_alternatives(request: ChatRequest) -> int | None:
    """Return how many likely tokens to report for each token of a chat answer.

    Returns None if no log-probabilities are reported.

    Raises:
        RequestError: `top_logprobs` is set without `logprobs`.
    """
    if request.top_logprobs and not request.logprobs:
        raise RequestError("may only be set when logprobs is true.", field="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def field_names(request: ChatRequest) -> Mapping[str, str]:
    """Map the engine's parameter names to the names that a request uses, for error messages.

    For example, `max_tokens` may be sent as `max_completion_tokens`.
    """
    has_newer = request.max_completion_tokens is not None
    newer_name = {"max_tokens": "max_completion_tokens"} if has_newer else {}
    budget = _reasoning_budget(request)
    budget_name = {} if budget is None else {"reasoning_budget": budget[0]}
    return TOOL_NAMES | newer_name | budget_name | llama_server_aliases(request)
