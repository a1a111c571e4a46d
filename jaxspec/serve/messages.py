"""Host. Conversations as OpenAI's clients send them, and as chat templates read them."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, model_validator

from jaxspec.errors import RequestError

# What OpenAI's clients send back of an answer they got; null, as it always is here, asks for nothing.
_ALWAYS_NULL = ("refusal", "annotations", "audio", "function_call")


class _EndsAtFault(FailFast):
    """A list that is wrong ends at its first wrong item: a million would be a million errors, each with its words."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]  # a union of types needs one


Item = TypeVar("Item")
ListOf = Annotated[list[Item], _EndsAtFault()]


class WireModel(BaseModel):
    """Base of what clients send: JSON types exactly, no unknown field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TextPart(WireModel):
    """One piece of a message's content; text is the only kind there is."""

    type: Literal["text"]
    text: str


class CalledFunction(WireModel):
    """What an earlier answer called. arguments: a JSON object, written as text."""

    name: str
    arguments: str


class ToolCall(WireModel):
    """A call in an assistant's turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(WireModel):
    """One turn of a conversation. An assistant's may hold calls in place of content; a tool's says which it answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if key not in _ALWAYS_NULL or value is not None}

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError(f"a message of role {self.role!r} needs content")
        for name, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) is not None and self.role != role:
                raise ValueError(f"{name} belongs to a message of role {role!r}, not {self.role!r}")
        return self

    def as_template_input(self, index: int) -> dict[str, Any]:
        """What a chat template reads: content as one string, a call's arguments as an object.

        Raises: RequestError for arguments that are no JSON object; index: the message's, for its words.
        """
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        given = {"role": self.role, "content": content, "name": self.name, "tool_call_id": self.tool_call_id}
        given["reasoning_content"] = self.reasoning_content
        message = {key: value for key, value in given.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call, index)},
                }
                for call in self.tool_calls
            ]
        return message


def _arguments(call: ToolCall, index: int) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(
            f"messages.{index}.tool_calls: arguments must be a JSON object as text, got "
            f"{call.function.arguments!r:.80}",
            param="messages",
        )
    return arguments
