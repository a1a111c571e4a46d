"""Host. Log-probabilities in OpenAI's two shapes, and vLLM's for prompts."""

from collections.abc import Sequence
from typing import Any

from jaxspec.engine.outputs import Logprob, TokenLogprobs

LOWEST = -9999.0  # JSON has no -inf

Scored = TokenLogprobs | str  # a token's log-probabilities, or the text of one that has none


def chat_logprobs(entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat: a list of tokens, each with its likeliest alternatives."""
    content = []
    for entry in entries:
        likeliest = sorted(entry.values(), key=lambda one: one.rank)[:num_top]
        content.append(_chat_token(_first(entry)) | {"top_logprobs": [_chat_token(one) for one in likeliest]})
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[Scored], num_top: int, offset: int) -> dict[str, Any]:
    """`choices[].logprobs` of a completion: parallel lists; offset: characters of the answer before these tokens."""
    tokens = [entry if isinstance(entry, str) else _text(_first(entry)) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if isinstance(e, str) else _finite(_first(e).logprob) for e in entries],
        "top_logprobs": [None if isinstance(e, str) or not num_top else _by_text(e) for e in entries],
        "text_offset": offsets,
    }


def prompt_logprobs(entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: a map by token id for each token of the prompt, null for the first."""
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": _finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for token_id, one in entry.items()
        }
        for entry in entries
    ]


def _by_text(entry: TokenLogprobs) -> dict[str, float]:
    """Log-probabilities by their tokens' texts; of tokens with one text, such as half characters, the later ones stand
    under vLLM's other name for a token, since who looks for the largest must find it."""
    named: dict[str, float] = {}
    for token_id, one in entry.items():
        text = _text(one)
        named[text if text not in named else f"token_id:{token_id}"] = _finite(one.logprob)
    return named


def _first(entry: TokenLogprobs) -> Logprob:
    return next(iter(entry.values()))


def _chat_token(one: Logprob) -> dict[str, Any]:
    text = _text(one)
    return {"token": text, "logprob": _finite(one.logprob), "bytes": list(text.encode())}


def _text(one: Logprob) -> str:
    return one.decoded_token or ""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
