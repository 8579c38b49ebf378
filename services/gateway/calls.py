"""An API's request as a call of InferenceService: checked, converted, rendered, tokenised. Nothing here waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import deepseek_recipe as recipe

from headrace.services.gateway import cache_points, fields, hermes
from headrace.services.gateway.constraints import Place, answer_of, constraint_of, held_calls
from headrace.services.gateway.errors import from_recipe
from headrace.services.gateway.prompts import (
    Rendered,
    render_template,
    render_v41,
    special_tokens,
    unused_marks,
    wire_images,
)
from headrace.services.gateway.sampling import sampling_of, stops_of
from headrace.services.gateway.served import Served
from headrace.services.gateway.tool_choice import behind_reasoning, forces_tool, names_tool, requiring
from headrace.services.gateway.tool_grammars import ClientTool, Held, Wanted
from headrace.services.runtime.errors import Unimplemented
from headrace.services.runtime.ids import new_request_id
from headrace.v1 import common_pb2, inference_pb2

Body = Mapping[str, Any]
ApiName = Literal["chat", "responses", "messages"]


class Api(Protocol):
    """What differs between the three conversational APIs before the call."""

    name: ApiName
    id_prefix: str
    request_class: Any
    """deepseek-recipe's."""
    reasoning_field: str
    """What a client switches reasoning on with."""

    def recipe_body(self, body: Body, served: Served) -> dict[str, Any]:
        """What deepseek-recipe reads of a checked body. Raises typed errors for what is not supported."""
        ...

    def response_format(self, body: Body) -> Mapping[str, Any]:
        """The wanted form of the text, in the words of Chat Completions; empty: any."""
        ...

    def forces_any_tool(self, body: Body) -> bool:
        """Some tool has to be called, whichever."""
        ...

    def one_call_only(self, body: Body) -> bool:
        """At most one tool may be called."""
        ...

    def asks_reasoning(self, body: Body) -> bool:
        """The request wants a forced call to come behind reasoning, where the model reasons."""
        ...

    def client_tools(self, body: Body, names: Mapping[str, tuple[str, str]]) -> dict[str, ClientTool]:
        """The tools of a body that deepseek-recipe has read, by the names that it gives them. `names`: those of tools
        in namespaces."""
        ...


@dataclass(frozen=True)
class Call:
    """A request that can be sent."""

    api: ApiName
    served: Served
    request: inference_pb2.GenerateRequest
    generator: Callable[[], Any]
    """Makes deepseek-recipe's generator of one choice's events."""
    parsing: Callable[[], recipe.ParsingOptions]
    tools: frozenset[str]
    """Names that calls in the Hermes form may have; empty: text is no call."""
    in_call: bool
    either: bool
    """Calls in the Hermes form begin the answer, or there are none."""
    images: tuple[str, ...]
    """Where each is in the body."""
    id: str
    created: int
    """Unix seconds."""
    stream: bool
    stops: frozenset[str]
    eos: frozenset[int]
    held: Held | None = field(default=None, repr=False)
    """The language of its tool calls, where they have one."""
    n: int = 1
    echo: recipe.ResponsesEcho | None = field(default=None, repr=False)

    @property
    def model(self) -> str:
        return self.served.name

    @property
    def as_text(self) -> bool:
        """The answer is read from the router's text, not from its tokens."""
        return bool(self.tools)


UNREADABLE: Final = (recipe.ConversionError, ValueError, OverflowError)
"""What deepseek-recipe raises for a body."""


@dataclass(frozen=True)
class _Read:
    """A request as deepseek-recipe has read it."""

    converted: recipe.ConversationRequest
    conversation: recipe.Conversation
    echo: recipe.ResponsesEcho | None
    names: dict[str, tuple[str, str]]
    """Of tools in namespaces."""
    behind: bool
    """A call has to come behind the reasoning."""


def _read(api: Api, given: Body, served: Served, options: recipe.ConversionOptions, point: str) -> _Read:
    """`point` marks prefixes for the cache, if it is not empty. Raises InvalidArgument, Unimplemented."""
    v41 = served.protocol == "v4.1"
    read = {**api.recipe_body(given, served), "model": served.name}
    if point and v41:
        read["messages"] = cache_points.with_points(read["messages"], point)
    behind = v41 and forces_tool(given) and api.asks_reasoning(given)
    if behind:
        read = behind_reasoning(read)
    try:
        reader = api.request_class(read)
        echo = reader.echo() if isinstance(reader, recipe.ResponsesRequest) else None
        names = reader.namespace_tool_map(options) if isinstance(reader, recipe.ResponsesRequest) else {}
        converted = reader.convert(options)
    except UNREADABLE as error:
        raise from_recipe(error, _culprit(api, read, options)) from error
    conversation = converted.conversation
    if conversation.thinking_mode and not v41:
        raise Unimplemented(api.reasoning_field, "this model does not reason; leave it out")
    if conversation.tools and (api.forces_any_tool(given) or (behind and not conversation.thinking_mode)):
        conversation = requiring(conversation)
    return _Read(converted, conversation, echo, names, behind and conversation.thinking_mode)


def make_call(api: Api, body: Body, served: Served, model: inference_pb2.Model, low_detail_tokens: int) -> Call:
    """Raises InvalidArgument, Unimplemented naming the field, in the API's words."""
    fields.check(api.name, body)
    given = {name: value for name, value in body.items() if value is not None}
    v41 = served.protocol == "v4.1"
    mark, point = unused_marks(body)
    cached = cache_points.marks(given) if api.name == "messages" else []
    options = _options(served, model, mark, thinking=served.thinking and not forces_tool(given))
    read = _read(api, given, served, options, point if cached else "")
    converted, conversation, echo = read.converted, read.conversation, read.echo
    prefilled = api.name == "messages" and bool(_prefill(conversation))
    if prefilled:
        conversation = _continuing(conversation)
    most = model.limits.context_tokens
    rendered = (
        render_v41(conversation, served.assets, mark, point, most)
        if v41
        else render_template(conversation, served.assets, mark, most)
    )
    stops = tuple(converted.parsing_options.stop_sequences) or stops_of(given)
    request = _request(given, converted, rendered, stops, v41=v41, low_detail_tokens=low_detail_tokens)
    offered = conversation.tool_choice != "none" and bool(conversation.tools)
    opened = offered and conversation.tool_choice == "required"
    if cached:
        request.traffic_class = common_pb2.TRAFFIC_CLASS_AGENT  # which headers overrule
        request.snapshot_at.extend(cache_points.snapshot_positions(cached, rendered, model.block_tokens))
    tools = frozenset(tool.name for tool in conversation.tools) if offered and not v41 else frozenset()
    stage = None if prefilled or opened else converted.parsing_options.thinking_initial_stage
    place = Place(v41, served.assets.tokenizer, opened, reasons=stage is not None and stage.starts_in_reasoning())
    held, answer = None, None
    if offered:
        its, one = api.client_tools(given, read.names), api.one_call_only(given) or names_tool(given)
        forced = opened or read.behind
        if not forced:  # a forced call has no text beside it
            answer = answer_of(api.response_format(given), converted, place)
        held = held_calls(Wanted(conversation.tools, its, forced, one, answer), place)
        if held is None and one:
            request.stop.stop.append(hermes.CLOSE)
    constraint = constraint_of(api.response_format(given), converted, place)
    if held is not None:
        constraint = held.constraint
    if constraint is not None:
        request.constraint.CopyFrom(constraint)
    identifier = api.id_prefix + new_request_id()

    def parsing() -> recipe.ParsingOptions:
        made: recipe.ParsingOptions = converted.parsing_options
        made.stop_sequences = list(stops)
        if prefilled:  # whose reasoning is over
            made.thinking_initial_stage = None
        if tools:
            made.special_tokens = recipe.SpecialTokens(dsml=hermes.DELIMITER)
            made.parse_tool_calls, made.starts_in_tool_calls = True, False
        elif opened:
            made.parse_tool_calls = made.starts_in_tool_calls = True
        return made

    def generator() -> Any:
        if prefilled:
            return recipe.MessagesChunkGenerator(identifier, served.name, False)
        made = api.request_class.chunk_generator(converted, identifier, served.name)
        if echo is not None:
            made = made.with_echo(echo).with_namespace_tool_map(read.names)
        return made

    return Call(
        api=api.name,
        served=served,
        request=request,
        generator=generator,
        parsing=parsing,
        tools=tools,
        in_call=rendered.in_call,
        either=answer is not None,
        images=tuple(source.path.lstrip(".") for source in rendered.images),
        id=identifier,
        created=int(time.time()),
        stream=converted.stream,
        stops=frozenset(stops),
        eos=frozenset(model.eos_token_ids),
        held=held,
        n=int(request.sampling.n or 1),
        echo=echo,
    )


def _culprit(api: Api, read: Body, options: recipe.ConversionOptions) -> str:
    """The field without which deepseek-recipe takes the request; its own words name none."""
    for name in read:
        try:
            api.request_class({other: value for other, value in read.items() if other != name}).convert(options)
        except UNREADABLE:
            continue
        return name
    return "input" if api.name == "responses" else "messages"


def _options(served: Served, model: inference_pb2.Model, mark: str, *, thinking: bool) -> recipe.ConversionOptions:
    most = model.limits.max_tokens or 2**31 - 1
    return (
        recipe.ConversionOptions(
            default_thinking_mode=thinking,
            responses_web_search=recipe.WebSearchBehavior.Reject,
            thinking_max_tokens_upper_bound=most,
            non_thinking_max_tokens_upper_bound=most,
        )
        .with_model_versions_by_name({served.name: recipe.ModelVersion.DeepseekV41Flash})
        .with_special_tokens(special_tokens(mark))
    )


def _prefill(conversation: recipe.Conversation) -> str:
    """Text with which the answer of a Messages request begins: that of a last turn of the assistant."""
    last = conversation.messages[-1] if conversation.messages else None
    return "" if last is None or last.role != "assistant" or last.tool_calls else last.content


def _continuing(conversation: recipe.Conversation) -> recipe.Conversation:
    *before, last = conversation.messages
    return recipe.Conversation(
        [*before, recipe.AssistantMessage(last.content, last.reasoning_content, prefix=True)],
        thinking_mode=conversation.thinking_mode,
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        reasoning_effort=conversation.reasoning_effort,
    )


def _request(
    given: Body,
    converted: recipe.ConversationRequest,
    rendered: Rendered,
    stops: tuple[str, ...],
    *,
    v41: bool,
    low_detail_tokens: int,
) -> inference_pb2.GenerateRequest:
    options = converted.inference_options
    tokens = inference_pb2.TokenPrompt(
        token_ids=rendered.token_ids, images=wire_images(rendered.images, low_detail_tokens)
    )
    request = inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(tokens=tokens), sampling=sampling_of(given))
    if v41:
        request.sampling.temperature, request.sampling.top_p = options.temperature or 0.0, options.top_p or 1.0
    if options.logprobs:
        request.sampling.logprobs = options.top_logprobs or 0
    if options.max_tokens is not None:
        request.stop.max_tokens = options.max_tokens
    request.stop.stop.extend(stops)
    return request
