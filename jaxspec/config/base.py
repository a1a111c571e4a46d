"""Host. The strictness configs share: frozen, no unknown key, errors that name key, value and remedy."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from jaxspec.errors import ConfigError


class StrictConfig(BaseModel):
    """Base without fields: a config built from bad input raises ConfigError, never pydantic's own error.

    NOT_YET holds keys that users know from vLLM and that do not work here yet, each with its neutral value: at that
    value the key asks for nothing and is accepted, at any other it is refused by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    TITLE: ClassVar[str] = "config"
    SECRETS: ClassVar[frozenset[str]] = frozenset()  # keys whose values no message shows
    NOT_YET: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, data: Any, handler):
        if isinstance(data, Mapping):
            data = cls.normalize(cls._without_neutral(dict(data)))
            reject_unknown(data, cls.model_fields, cls.TITLE)
        try:
            return handler(data)
        except ValidationError as error:
            raise ConfigError(describe(error, cls.TITLE, cls.SECRETS)) from None

    @classmethod
    def normalize(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Rewrite what the user gave into this config's own keys; the default changes nothing."""
        return data

    @classmethod
    def _without_neutral(cls, data: dict[str, Any]) -> dict[str, Any]:
        kept = {}
        for key, value in data.items():
            if key not in cls.NOT_YET:
                kept[key] = value
            elif value != cls.NOT_YET[key] or isinstance(value, bool) != isinstance(cls.NOT_YET[key], bool):
                raise ConfigError(
                    f"{cls.TITLE} key '{key}' is not supported yet, got {value!r}; "
                    f"leave it out or at its neutral value {cls.NOT_YET[key]!r}"
                )
        return kept


def reject_unknown(data: Mapping[str, Any], known: Iterable[str], title: str) -> None:
    """Raise ConfigError for the first key of data that is not known, with the nearest known ones."""
    known = sorted(known)
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=3, cutoff=0.6)
            remedy = (
                f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known keys: {', '.join(known)}"
            )
            raise ConfigError(f"unknown {title} key {key!r}; {remedy}")


def describe(error: ValidationError, title: str, secrets: Collection[str] = ()) -> str:
    """One line a fault: the key, the rule broken, and the value that broke it, unless the key is secret."""
    lines = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"] if isinstance(part, int | str)) or title
        line = f"{title} key '{where}': {fault['msg'].removeprefix('Value error, ')}"
        is_shown = fault["type"] != "missing" and where.split(".")[0] not in secrets
        lines.append(f"{line}, got {fault['input']!r}" if is_shown else line)
    return "; ".join(lines)
