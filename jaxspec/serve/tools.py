"""Host. The tools that a chat may call, how the model is made to call one, and how its calls are read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from jaxspec.errors import RequestError
from jaxspec.sampling.structured_outputs import StructuredOutputsParams
from jaxspec.serve.messages import WireModel
from jaxspec.text.answer_parts import CALL_FORMATS, CallList, CallParser, NamedCall, call_format_of, knows_tools


class FunctionSpec(WireModel):
    """A function: its name, what it is for, and the JSON schema of its arguments."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(WireModel):
    """One thing the model may call; functions are the only kind there is."""

    type: Literal["function"]
    function: FunctionSpec


@dataclass(frozen=True)
class ToolUse:
    """What a chat's `tools` and `tool_choice` come to. named: the one function to call, where the choice is "named"."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "required", "named"]
    parallel: bool
    named: str = ""

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.tools]

    @property
    def is_forced(self) -> bool:
        """Whether a grammar makes the whole answer calls."""
        return self.choice != "auto"

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """The form of the answer where a call is forced: the arguments of the one, or a list of calls."""
        if self.choice == "auto":
            return None
        if self.choice == "named":
            (tool,) = [tool for tool in self.tools if tool.function.name == self.named]
            return StructuredOutputsParams(json=_parameters(tool), param="tool_choice")
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": _parameters(tool)},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for tool in self.tools
        ]
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.parallel:
            schema["maxItems"] = 1
        return StructuredOutputsParams(json=schema, param="tool_choice")

    def parser(self, configured: str, chat_template: str) -> CallParser:
        """What reads one answer's calls. configured: the server's tool_call_parser."""
        if self.choice == "required":
            return CallList(self.names)
        if self.choice == "named":
            return NamedCall(self.named)
        name = call_format_of(chat_template) if configured == "auto" else configured
        return CALL_FORMATS[name](self.names)


def tool_use(tools: Sequence[Tool] | None, choice: Any, parallel: bool) -> ToolUse | None:
    """What the fields come to; None where no tool may be called.

    Raises: RequestError naming the field that is wrong.
    """
    if not tools:
        if choice not in (None, "none"):
            raise RequestError(f"tool_choice {choice!r:.80} needs tools; send some", param="tool_choice")
        return None
    names = [tool.function.name for tool in tools]
    if len(set(names)) != len(names):
        raise RequestError(f"tools must have different names, got {', '.join(names)[:200]}", param="tools")
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.keys() != {"type", "function"} or choice["type"] != "function" or not isinstance(name, str):
            raise RequestError(
                'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}, got '
                f"{choice!r:.200}",
                param="tool_choice",
            )
        if name not in names:
            raise RequestError(
                f"tool_choice names {name!r:.80}, which is none of tools: {', '.join(names)[:200]}", param="tool_choice"
            )
        return ToolUse(tuple(tools), "named", parallel, name)
    if choice not in (None, "none", "auto", "required"):
        raise RequestError(
            f'tool_choice must be "none", "auto", "required" or a named function, got {choice!r:.80}',
            param="tool_choice",
        )
    return None if choice == "none" else ToolUse(tuple(tools), choice or "auto", parallel)


def check_template_knows_tools(chat_template: str | None) -> None:
    """Raises: RequestError where the template would leave the tools out, and the model never hear of them."""
    if chat_template is not None and not knows_tools(chat_template):
        raise RequestError(
            "this model's chat template has no place for tools; leave them out, or start the server with "
            "--chat-template, a template that has one",
            param="tools",
        )


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments: an object in any case."""
    schema = tool.function.parameters or {"type": "object", "properties": {}}
    if schema.get("type", "object") != "object":
        raise RequestError(
            f"tools: the parameters of {tool.function.name!r} must be a schema of type object, got "
            f"{json.dumps(schema.get('type'))[:80]}",
            param="tools",
        )
    return {"type": "object"} | schema
