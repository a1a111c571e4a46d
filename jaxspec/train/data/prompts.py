"""Host. Prompts from a file: JSON lines, each with messages and perhaps a kind."""

from pathlib import Path
from typing import Any

from jaxspec.text.prompt_lines import read_prompt_lines
from jaxspec.train.data.shards import KINDS


def read_prompts(path: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """(kind, messages) of every line that is not empty; a line without a kind is chat.

    Raises: ConfigError naming the line.
    """
    return read_prompt_lines(path, _prompt, f"messages, and perhaps a kind of {', '.join(KINDS)}")


def _prompt(row: dict[str, Any], number: int) -> tuple[str, list[dict[str, Any]]]:
    del number
    kind, messages = row.get("kind", "chat"), row["messages"]
    if kind not in KINDS or not isinstance(messages, list) or not messages:
        raise ValueError(f"got {kind=}, {messages=!r:.100}")
    return kind, messages
