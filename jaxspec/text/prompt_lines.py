"""Host. Files of prompts: JSON lines, an object each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxspec.errors import ConfigError

T = TypeVar("T")


def read_prompt_lines(
    path: Path, take: Callable[[dict[str, Any], int], T], needs: str, most: int | None = None
) -> list[T]:
    """What `take` makes of the first `most` lines that are not blank, given each one's object and number.

    Args:
        take: raises ValueError, KeyError or TypeError for a line that is no prompt.
        needs: what a line must have, for people.

    Raises:
        ConfigError: the file cannot be read, holds no prompt, or the line that it names is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts from {path} ({error}); give a file of JSON lines") from None
    found: list[T] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or len(found) == most:
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("a line is an object")
            found.append(take(row, number))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}:{number} is not a prompt ({type(error).__name__}: {error}); a line needs {needs}"
            ) from None
    if not found:
        raise ConfigError(f"{path} holds no prompt; give at least one line")
    return found
