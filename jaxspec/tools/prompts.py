"""Host. The prompts that `verify` and `doctor` ask: JSON lines, or the few that ship."""

import importlib.resources
from pathlib import Path
from typing import Any

from jaxspec.config.engine import EngineConfig
from jaxspec.errors import ConfigError
from jaxspec.text.prompt_lines import read_prompt_lines
from jaxspec.text.tokenizer import Tokenizer, load_tokenizer
from jaxspec.weights.aliases import resolve_model


def default_prompts_path() -> Path:
    """Short prompts that ship; their answers repeat themselves in part, so that n-grams have something to guess."""
    return Path(str(importlib.resources.files("jaxspec.tools") / "data" / "verify.jsonl"))


def tokenizer_of(config: EngineConfig) -> Tokenizer | None:
    """The model's, if it has one; the engine's own log says why it has none."""
    if config.tokenizer is not None:
        return load_tokenizer(resolve_model(config.tokenizer))
    try:
        return load_tokenizer(resolve_model(config.model))
    except ConfigError:
        return None


def read_prompts(path: Path, tokenizer: Tokenizer | None, most: int | None = None) -> list[list[int]]:
    """Token ids of the first `most` prompts. A line is {"messages": [...]}, {"prompt": "..."} or
    {"prompt_token_ids": [...]}; other keys are left alone.

    Raises:
        ConfigError: the file or a line of it cannot be used.
    """
    needs = "messages, prompt or prompt_token_ids"
    return read_prompt_lines(path, lambda row, number: _prompt(row, tokenizer), needs, most)


def _prompt(row: dict[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    if "prompt_token_ids" in row:
        ids = row["prompt_token_ids"]
    elif tokenizer is None:
        raise ConfigError("this model has no tokenizer; its prompts are lines of {'prompt_token_ids': [...]}")
    elif "messages" in row:
        ids = _chat(row["messages"], tokenizer)
    else:
        ids = tokenizer.encode(row["prompt"])
    if not isinstance(ids, list) or not ids or not all(isinstance(token_id, int) for token_id in ids):
        raise ValueError("a prompt must hold at least one token id")
    return ids


def _chat(messages: list[dict[str, str]], tokenizer: Tokenizer) -> list[int]:
    """By the model's template; a model without one is asked the bare words."""
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n".join(message["content"] for message in messages))
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
