"""Host. The prompts a bench runs: JSON lines, grouped by kind."""

import importlib.resources
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.text.prompt_lines import read_prompt_lines
from jaxspec.text.tokenizer import Tokenizer

NEEDS = "max_tokens and messages or prompt"  # a line of the file


@dataclass(frozen=True)
class BenchPrompt:
    """One line of the file: an answer of exactly max_tokens tokens is timed."""

    name: str
    kind: str
    token_ids: list[int]
    max_tokens: int


def default_prompts_path() -> Path:
    """The dozen realistic prompts that ship with jaxspec: chat, summary, code, json, edit and story."""
    return Path(str(importlib.resources.files("jaxspec.bench") / "prompts" / "smollm2.jsonl"))


def read_prompts(path: Path, tokenizer: Tokenizer) -> dict[str, list[BenchPrompt]]:
    """Kind -> its prompts. A line is {"messages": [...]} or {"prompt": "..."}, with "max_tokens" and perhaps "kind".

    Raises:
        ConfigError: the file or a line of it cannot be used.
    """
    kinds: dict[str, list[BenchPrompt]] = defaultdict(list)
    for prompt in read_prompt_lines(path, lambda row, number: _prompt(row, number, tokenizer), NEEDS):
        kinds[prompt.kind].append(prompt)
    return dict(kinds)


def _prompt(row: dict[str, Any], number: int, tokenizer: Tokenizer) -> BenchPrompt:
    if "messages" in row:
        text = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(row["prompt"])
    max_tokens = row["max_tokens"]
    if not isinstance(max_tokens, int) or max_tokens < 1 or not ids:
        raise ValueError(f"{max_tokens=} must be 1 or more, and the prompt not empty")
    return BenchPrompt(str(row.get("id", number)), str(row.get("kind", "prompt")), ids, max_tokens)
