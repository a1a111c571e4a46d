"""Host. Typed look-ups in a foreign description of a model (JSON or GGUF keys), each failing by naming its key."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError


class Fields:
    """A read-only view of one file's keys. Unknown keys are nobody's business; a missing needed one is an error.

    Null counts as absent, as the files mean it.
    """

    def __init__(self, values: Any, label: str):
        if not isinstance(values, Mapping):
            raise ConfigError(f"{label} must be an object of keys and values, got {values!r:.100}")
        self._values, self.label = values, label

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def has_key(self, key: str) -> bool:
        """Whether the file writes the key at all, null included."""
        return key in self._values

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """The same keys, and those of `defaults` that the file does not write at all."""
        return Fields({**defaults, **self._values}, self.label)

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it stands, or the default."""
        return self._values[key] if key in self else default

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`."""
        value = self._needed(key, default)
        if type(value) is not int or not minimum <= value < 2**31:
            raise self._wrong(key, f"a whole number from {minimum} to 2^31", value)
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        """A whole number, or None where the key is absent."""
        return self.integer(key, minimum=minimum) if key in self else None

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._needed(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self._wrong(key, "a finite number above 0", value)
        return float(value)

    def optional_positive(self, key: str) -> float | None:
        """A finite number above zero, or None where the key is absent."""
        return self.positive(key) if key in self else None

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._needed(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._needed(key, default)
        if type(value) is not str:
            raise self._wrong(key, "a string", value)
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of them as a tuple without repeats; empty where the key is absent."""
        value = self.raw(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(type(token_id) is not int or token_id < 0 for token_id in ids):
            raise self._wrong(key, "a token id or a list of them", value)
        return tuple(dict.fromkeys(ids))

    def _needed(self, key: str, default: Any) -> Any:
        value = self.raw(key, default)
        if value is None:
            raise ConfigError(
                f"{self.label} lacks {key!r}, which this model needs; fetch the checkpoint again or add it"
            )
        return value

    def _wrong(self, key: str, rule: str, value: Any) -> ConfigError:
        return ConfigError(f"{key!r} of {self.label} must be {rule}, got {value!r:.100}; correct the file")


def read_json(path: Path) -> dict[str, Any]:
    """The keys of a JSON file of a checkpoint. Raises ConfigError where it holds no object of them."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable JSON ({str(error)[:200]}); fetch it again") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {values!r:.100}; fetch it again")
    return values


def check_heads(label: str, *, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raises ConfigError where heads cannot be grouped or rotated."""
    if num_heads % num_kv_heads:
        raise ConfigError(f"{label}: {num_heads=} must be a multiple of {num_kv_heads=}; correct the file")
    if head_dim % 2:
        raise ConfigError(f"{label}: {head_dim=} must be even to be rotated; correct the file")
