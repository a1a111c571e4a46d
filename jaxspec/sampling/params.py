"""Host. `SamplingParams`: how a request wants its tokens drawn and when to stop, in vLLM's words."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from jaxspec.errors import RequestError
from jaxspec.sampling.structured_outputs import StructuredOutputsParams

# Below this a temperature is greedy decoding, as in vLLM: dividing by less would only overflow.
MIN_TEMPERATURE = 1e-5

MAX_CHOICES = 16384  # of one request, as in vLLM

# Parameters that do not work yet, and the values that ask for nothing. Any other value is refused by name.
NOT_SUPPORTED_YET: Mapping[str, tuple[Any, ...]] = {
    "flat_logprobs": (False,),
    "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (True,),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request asks of sampling. Names, defaults and meanings are vLLM's.

    >>> SamplingParams(temperature=0.8, top_p=0.95, stop="\\n").stop
    ('\\n',)

    Raises: RequestError naming the field, on a value out of range and on a parameter that does not work yet.
    """

    n: int = 1  # choices; each has its own random key
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # keep the likeliest tokens until they hold this probability; 1 = all
    top_k: int = 0  # keep this many of the likeliest tokens; 0 or -1 = all
    min_p: float = 0.0  # drop tokens less likely than this part of the likeliest; 0 = none
    seed: int | None = None  # None (or -1): the engine draws one
    stop: str | Sequence[str] | None = None  # texts that end the answer; kept as a tuple
    stop_token_ids: Sequence[int] | None = None  # ids that end the answer; kept as a tuple
    max_tokens: int | None = 16  # None = as many as the model's length leaves
    min_tokens: int = 0  # before these neither EOS nor a stop can end the answer
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True  # False: ids alone, no text

    presence_penalty: float = 0.0  # taken off the logit of every token that the answer holds
    frequency_penalty: float = 0.0  # the same, once for each time it holds it
    repetition_penalty: float = 1.0  # divides the logits of tokens that prompt or answer hold; above 1 they get rarer
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its logit
    bad_words: Sequence[str] | None = None  # texts that the answer must not hold, as tokens; kept as a tuple
    allowed_token_ids: Sequence[int] | None = None  # no other token is emitted; kept as a tuple
    logprobs: int | None = None  # this many likeliest tokens beside each emitted one; 0 = the emitted alone, -1 = all
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    logits_processors: Sequence[Callable[..., Any]] | None = None  # `sampling.processors.HostLogitsProcessor`
    extra_args: Mapping[str, Any] | None = None  # what the engine's own logits processors read
    structured_outputs: StructuredOutputsParams | None = None  # the form of the text; a map of its fields will do
    speculative: Mapping[str, Any] | None = None  # {"enabled": bool, "num_speculative_tokens": at most so many}

    flat_logprobs: bool = False
    truncate_prompt_tokens: int | None = None
    spaces_between_special_tokens: bool = True

    def __post_init__(self):
        for name, neutral in NOT_SUPPORTED_YET.items():
            value = getattr(self, name)
            if not any(_is_same(value, nothing) for nothing in neutral):
                raise RequestError(f"{name} is not supported yet, got {value!r:.200}; leave it out", param=name)
        for name, rule, is_right in _RULES:
            value = getattr(self, name)
            if not is_right(value):
                raise RequestError(f"{name} must be {rule}, got {value!r:.200}", param=name)
        # Frozen, and tidied this once: one form for what follows.
        tidy: dict[str, Any] = {"stop": _tuple_of(self.stop), "stop_token_ids": _tuple_of(self.stop_token_ids)}
        tidy["stop_token_ids"] = tuple(dict.fromkeys(tidy["stop_token_ids"]))
        tidy |= {"bad_words": _tuple_of(self.bad_words), "logits_processors": _tuple_of(self.logits_processors)}
        if isinstance(self.structured_outputs, Mapping):
            tidy["structured_outputs"] = StructuredOutputsParams.from_mapping(self.structured_outputs)
        if self.allowed_token_ids is not None:
            tidy["allowed_token_ids"] = tuple(dict.fromkeys(self.allowed_token_ids))
        tidy |= {"seed": None if self.seed == -1 else self.seed, "top_k": max(self.top_k, 0)}
        tidy |= {"temperature": self.temperature if self.temperature >= MIN_TEMPERATURE else 0.0}
        for name, value in tidy.items():
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}; lower it",
                param="min_tokens",
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={self.stop!r} needs the text that detokenize=False leaves out; use stop_token_ids", param="stop"
            )

    @property
    def max_drafts(self) -> int | None:
        """The most drafts a round may make for this request; None leaves it to the engine."""
        wish = self.speculative or {}
        return wish.get("num_speculative_tokens") if wish.get("enabled", True) else 0

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are arg-maxima, and no random number matters."""
        return self.temperature == 0


def _is_same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and type(value) is not str and value == neutral


def _tuple_of(value: Any) -> tuple:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _is_int(value: Any, least: int, below: int = 2**63) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) < below


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and all(is_item(item) for item in value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_speculative(value: Any) -> bool:
    if not isinstance(value, Mapping) or not set(value) <= {"enabled", "num_speculative_tokens"}:
        return False
    return _is_bool(value.get("enabled", True)) and _is_int(value.get("num_speculative_tokens", 0), 0)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_RULES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("n", f"an integer from 1 to {MAX_CHOICES}", lambda v: _is_int(v, 1, MAX_CHOICES + 1)),
    ("temperature", "a finite number of at least 0 (0 is greedy)", lambda v: _is_number(v) and v >= 0),
    ("top_p", "a number in (0, 1] (1 keeps all tokens)", lambda v: _is_number(v) and 0 < v <= 1),
    ("top_k", "an integer of at least 1, or 0 or -1 to keep all tokens", lambda v: _is_int(v, -1)),
    ("min_p", "a number in [0, 1] (0 drops no token)", lambda v: _is_number(v) and 0 <= v <= 1),
    ("seed", "a 64-bit integer, or None", lambda v: v is None or _is_int(v, -(2**63))),
    (
        "stop",
        "a non-empty text, a list of such, or None",
        lambda v: v is None or _is_text(v) or _is_list(v, _is_text),
    ),
    (
        "stop_token_ids",
        "a list of token ids of at least 0, or None",
        lambda v: v is None or _is_list(v, lambda item: _is_int(item, 0)),
    ),
    ("presence_penalty", "a number in [-2, 2]", lambda v: _is_number(v) and -2 <= v <= 2),
    ("frequency_penalty", "a number in [-2, 2]", lambda v: _is_number(v) and -2 <= v <= 2),
    ("repetition_penalty", "a finite number above 0 (1 changes nothing)", lambda v: _is_number(v) and v > 0),
    (
        "logit_bias",
        "a map of token ids to numbers in [-100, 100], or None",
        lambda v: (
            v is None
            or (
                isinstance(v, Mapping)
                and all(_is_int(key, 0) for key in v)
                and all(_is_number(item) and -100 <= item <= 100 for item in v.values())
            )
        ),
    ),
    ("bad_words", "a list of non-empty texts, or None", lambda v: v is None or _is_list(v, _is_text)),
    (
        "allowed_token_ids",
        "a non-empty list of token ids of at least 0, or None",
        lambda v: v is None or (_is_list(v, lambda item: _is_int(item, 0)) and len(v) > 0),
    ),
    (
        "logprobs",
        "an integer of at least 0, -1 for the whole vocabulary, or None",
        lambda v: v is None or _is_int(v, -1),
    ),
    (
        "prompt_logprobs",
        "an integer of at least 0, -1 for the whole vocabulary, or None",
        lambda v: v is None or _is_int(v, -1),
    ),
    ("logits_processors", "a list of callables, or None", lambda v: v is None or _is_list(v, callable)),
    ("extra_args", "a map of names to values, or None", lambda v: v is None or isinstance(v, Mapping)),
    (
        "structured_outputs",
        "StructuredOutputsParams, a map of its fields, or None",
        lambda v: v is None or isinstance(v, StructuredOutputsParams | Mapping),
    ),
    (
        "speculative",
        'a map with "enabled" (true or false) and "num_speculative_tokens" (an integer of at least 0), or None',
        lambda v: v is None or _is_speculative(v),
    ),
    ("max_tokens", "an integer of at least 1, or None", lambda v: v is None or _is_int(v, 1)),
    ("min_tokens", "an integer of at least 0", lambda v: _is_int(v, 0)),
    ("ignore_eos", "true or false", _is_bool),
    ("include_stop_str_in_output", "true or false", _is_bool),
    ("skip_special_tokens", "true or false", _is_bool),
    ("detokenize", "true or false", _is_bool),
)
