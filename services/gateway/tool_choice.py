"""What a request says of calls that have to be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from headrace.services.runtime.errors import InvalidArgument


def forces_tool(given: Mapping[str, Any]) -> bool:
    """A call has to be. It comes without reasoning, unless the request says otherwise."""
    choice = given.get("tool_choice")
    return names_tool(given) or choice == "required" or (isinstance(choice, Mapping) and choice.get("type") == "any")


def names_tool(given: Mapping[str, Any]) -> bool:
    """One tool has to be called, once, and no other."""
    choice = given.get("tool_choice")
    return isinstance(choice, Mapping) and choice.get("type") in ("function", "tool", "custom")


def behind_reasoning(read: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the choice left to the model, among the tools that it may choose of: deepseek-recipe knows no
    forced call behind reasoning, and a grammar forces it. A choice of no tool stays, and is refused."""
    choice, tools = read["tool_choice"], read.get("tools")
    if not isinstance(tools, list) or not tools:
        return dict(read)
    if isinstance(choice, Mapping):
        name = _name(choice)
        tools = [tool for tool in tools if isinstance(tool, Mapping) and _name(tool) == name]
    return {**read, "tools": tools, "tool_choice": "auto"} if tools else dict(read)


def _name(one: Mapping[str, Any]) -> object:
    function = one.get("function")
    return function.get("name") if isinstance(function, Mapping) else one.get("name")


def requiring(conversation: recipe.Conversation) -> recipe.Conversation:
    """The conversation with a call that has to be. Raises InvalidArgument where it reasons."""
    if conversation.thinking_mode:
        raise InvalidArgument("a forced call comes without reasoning; switch thinking off", field="tool_choice")
    return recipe.Conversation(
        conversation.messages, thinking_mode=False, tools=conversation.tools, tool_choice="required"
    )
