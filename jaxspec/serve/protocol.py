"""Host. What a request may say: OpenAI's fields and vLLM's extras, each honoured or refused by its name."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import Field, ValidationError

from jaxspec.errors import RequestError
from jaxspec.sampling.params import SamplingParams
from jaxspec.serve.formats import FORMAT_FIELDS, settle_formats
from jaxspec.serve.messages import ListOf, Message, WireModel
from jaxspec.serve.tools import Tool, ToolUse, tool_use

# Sampling parameters that travel as they are: SamplingParams checks them and names the one at fault.
SAMPLING_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "max_tokens", "min_tokens",
    "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids",
    "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "speculative", "extra_args", "vllm_xargs", *FORMAT_FIELDS,
)  # fmt: skip

# Known fields that do not work here yet, with the values at which they ask for nothing (null always does).
NOT_YET: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
}
CHAT_NOT_YET: dict[str, tuple[Any, ...]] = {
    **NOT_YET,
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "documents": ([],),
    "continue_final_message": (False,),
    "chat_template": (),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}

DEFAULT_MAX_TOKENS = 16  # of a completion, as OpenAI's

# Of `stop` and `bad_words`, each, and characters in one: the engine's thread, which serves everybody, handles them all.
MAX_TEXTS, MAX_TEXT_CHARACTERS = 128, 1024

Parsed = TypeVar("Parsed", bound="WireModel")


class StreamOptions(WireModel):
    """include_usage: a last chunk without choices carries the usage; continuous_usage_stats: every chunk does.

    one_token_per_chunk: a chunk for every token, so that the chunks tell nothing of how many were verified together.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    one_token_per_chunk: bool = False


class GenerationRequest(WireModel):
    """What both ways to ask have in common. `sampling` holds the sampling fields as they came."""

    KNOWN_LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_YET

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # a label for the caller's own books
    return_token_origins: bool = False  # beside each choice its tokens, and where each came from
    priority: int = 0  # lower first, of an engine that schedules by priority
    cache_salt: str | None = None  # what the cache holds of the prompt is for requests of the same salt alone
    sampling: dict[str, Any] = Field(default_factory=dict)

    @property
    def options(self) -> StreamOptions:
        """How to stream."""
        return self.stream_options or StreamOptions()


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. prompt: text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: Any
    echo: bool = False  # the prompt before the answer; with logprobs also the prompt's, with max_tokens 0 nothing else

    @property
    def is_echo_alone(self) -> bool:
        """Whether no token of an answer is wanted, as who scores texts asks."""
        return self.echo and _is_id(self.sampling.get("max_tokens")) and self.sampling["max_tokens"] == 0

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids.

        Raises: RequestError for any other form, and for an empty one.
        """
        given = self.prompt
        if isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0])):
            given = [given]
        if not isinstance(given, list) or not given:
            raise RequestError("prompt must be a text, token ids, or a non-empty list of either", param="prompt")
        for one in given:
            if not isinstance(one, str) and not (isinstance(one, list) and all(map(_is_id, one))):
                raise RequestError(
                    "prompt must be a text, a list of texts, a list of token ids, or a list of such lists; "
                    f"got an item that is {type(one).__name__}",
                    param="prompt",
                )
            if not one:
                raise RequestError("prompt must not be empty; send at least one token", param="prompt")
        return given


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    KNOWN_LATER: ClassVar[Mapping[str, tuple[Any, ...]]] = CHAT_NOT_YET

    messages: ListOf[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_completion_tokens: int | None = None
    top_logprobs: int | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True

    def tool_use(self) -> ToolUse | None:
        """The tools that may be called.

        Raises: RequestError naming the field that is wrong.
        """
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)


class TokenizeRequest(WireModel):
    """POST /tokenize: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: ListOf[Tool] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(WireModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: ListOf[int]


def parse(kind: type[Parsed], body: Mapping[str, Any]) -> Parsed:
    """A request of that kind.

    Raises: RequestError naming the first field that is unknown, unsupported or wrong.
    """
    data = dict(body)
    if issubclass(kind, GenerationRequest):
        _refuse_not_yet(data, kind.KNOWN_LATER)
        # null means "not given", as OpenAI's clients send it.
        sampling = {key: data.pop(key) for key in SAMPLING_FIELDS if key in data}
        _reject_unknown(data, {*kind.model_fields, *SAMPLING_FIELDS} - {"sampling"})
        data["sampling"] = {key: value for key, value in sampling.items() if value is not None}
    else:
        _reject_unknown(data, kind.model_fields)
    data = {key: value for key, value in data.items() if value is not None or key not in kind.model_fields}
    try:
        parsed = kind.model_validate(data)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])[:200]
        got = "" if fault["type"] == "missing" else f", got {_short(fault['input'])}"
        raise RequestError(f"{where}: {fault['msg']}{got}", param=str(fault["loc"][0])) from None
    if isinstance(parsed, GenerationRequest) and parsed.stream_options is not None and not parsed.stream:
        raise RequestError(
            "stream_options needs stream to be true; set it or leave stream_options out", param="stream_options"
        )
    return parsed


def sampling_params(
    request: GenerationRequest,
    room: int,
    tools: ToolUse | None = None,
    reasoning_end: str | None = None,
    *,
    reads_special_tokens: bool = False,
) -> SamplingParams:
    """The request's SamplingParams.

    room: tokens that still fit after the longest prompt; tools: a chat's; reasoning_end: the tag before which no form
    of the text is asked for, where the answer begins with reasoning; reads_special_tokens: the answer's parts are told
    apart by tokens that texts otherwise leave out.

    Raises: RequestError naming the parameter at fault.
    """
    fields = dict(request.sampling)
    if reads_special_tokens:
        fields["skip_special_tokens"] = False
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens not in (None, fields.get("max_tokens", request.max_completion_tokens)):
            raise RequestError(
                "max_tokens and max_completion_tokens differ; send one of them", param="max_completion_tokens"
            )
        if request.max_completion_tokens is not None:
            fields["max_tokens"] = request.max_completion_tokens
        fields.setdefault("max_tokens", room)  # a chat answer may be as long as fits
        _settle_chat_logprobs(fields, request.top_logprobs)
    elif isinstance(request, CompletionRequest) and request.echo:
        _settle_echo(fields, is_alone=request.is_echo_alone)
    if "vllm_xargs" in fields:  # vLLM's name for it on the wire
        fields.setdefault("extra_args", fields.pop("vllm_xargs"))
    fields["structured_outputs"] = settle_formats(fields)
    if tools is not None and tools.is_forced:
        if fields["structured_outputs"] is not None:
            raise RequestError(
                "tool_choice makes the answer a call, and another field asks for another form; send one of them",
                param="tool_choice",
            )
        fields["structured_outputs"] = tools.structured_outputs()
    form = fields["structured_outputs"]
    if reasoning_end is not None and form is not None and form.reasoning_end_str is None:
        fields["structured_outputs"] = dataclasses.replace(form, reasoning_end_str=reasoning_end)
    if isinstance(fields.get("logit_bias"), Mapping):  # JSON's keys are texts
        fields["logit_bias"] = {_as_id(key): value for key, value in fields["logit_bias"].items()}
    fields.setdefault("max_tokens", min(DEFAULT_MAX_TOKENS, room))
    for name in ("stop", "bad_words"):
        _check_texts(name, fields.get(name))
    params = SamplingParams(**fields)
    if params.max_tokens is not None and params.max_tokens > room:
        raise RequestError(
            f"max_tokens={params.max_tokens} must not exceed the {room} tokens that fit after the prompt; lower it",
            param="max_tokens",
        )
    return params


def _check_texts(name: str, value: Any) -> None:
    texts = value if isinstance(value, list) else [value]
    if len(texts) > MAX_TEXTS or any(isinstance(text, str) and len(text) > MAX_TEXT_CHARACTERS for text in texts):
        raise RequestError(
            f"{name} must hold at most {MAX_TEXTS} texts of {MAX_TEXT_CHARACTERS} characters; send fewer or shorter",
            param=name,
        )


def _settle_echo(fields: dict[str, Any], *, is_alone: bool) -> None:
    """The prompt's log-probabilities where the answer's are asked for; and one token of an answer, if none is shown."""
    if fields.get("logprobs") is not None:
        if fields.get("prompt_logprobs", fields["logprobs"]) != fields["logprobs"]:
            raise RequestError("echo gives the prompt logprobs as many; leave prompt_logprobs out", param="echo")
        fields["prompt_logprobs"] = fields["logprobs"]
    if is_alone:
        fields["max_tokens"] = 1


def _settle_chat_logprobs(fields: dict[str, Any], top_logprobs: int | None) -> None:
    """OpenAI's two fields of a chat as the one of SamplingParams."""
    wanted = fields.pop("logprobs", False)
    if not isinstance(wanted, bool):
        raise RequestError(f"logprobs of a chat must be true or false, got {_short(wanted)}", param="logprobs")
    if top_logprobs is not None and top_logprobs < 0:
        raise RequestError(f"top_logprobs must be at least 0, got {top_logprobs}", param="top_logprobs")
    if top_logprobs and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true; set it", param="top_logprobs")
    if wanted:
        fields["logprobs"] = top_logprobs or 0


def _as_id(key: Any) -> Any:
    """The token id that a JSON key writes; what is none is left for SamplingParams to refuse."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse_not_yet(data: dict[str, Any], known_later: Mapping[str, tuple[Any, ...]]) -> None:
    for key in [key for key in data if key in known_later]:
        value = data.pop(key)
        if value is not None and value not in known_later[key]:
            raise RequestError(f"{key} is not supported yet, got {_short(value)}; leave it out", param=key)


def _reject_unknown(data: Mapping[str, Any], known: Any) -> None:
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
            remedy = f"did you mean {' or '.join(near)}?" if near else "leave it out"
            raise RequestError(f"unknown field {_short(key)}; {remedy}", param=key[:100])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
