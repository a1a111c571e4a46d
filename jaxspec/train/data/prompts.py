"""Host. Prompts from a file: JSON lines, each with messages and perhaps a kind."""

import json
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError
from jaxspec.train.data.shards import KINDS


def read_prompts(path: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """(kind, messages) of every line that is not empty; a line without a kind is chat.

    Raises: ConfigError naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {path} ({error}); give a JSONL file") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number} is not JSON ({error}); write one object a line") from None
        kind = entry.get("kind", "chat") if isinstance(entry, dict) else None
        messages = entry.get("messages") if isinstance(entry, dict) else None
        if kind not in KINDS or not isinstance(messages, list) or not messages:
            raise ConfigError(
                f'{path}:{number} must hold {{"messages": [...]}} and perhaps a kind of {", ".join(KINDS)}, '
                f"got {line[:100]!r}"
            )
        found.append((kind, messages))
    if not found:
        raise ConfigError(f"{path} holds no prompts; write one JSON object a line")
    return found
