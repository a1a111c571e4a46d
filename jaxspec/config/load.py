"""Host. From YAML files and command-line flags to checked configs: every config field is a flag, later words win."""

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import TypeAdapter, ValidationError

from jaxspec.config.base import StrictConfig, describe, reject_unknown
from jaxspec.config.methods import METHODS, canonical_method
from jaxspec.errors import ConfigError

Config = TypeVar("Config", bound=StrictConfig)

# Flags known from vLLM's articles and scripts -> the key of speculative_config they set.
SPECULATIVE_FLAGS = {
    "--draft-model": "model",
    "--speculative-method": "method",
    "--num-speculative-tokens": "num_speculative_tokens",
    "--ngram-prompt-lookup-max": "prompt_lookup_max",
    "--ngram-prompt-lookup-min": "prompt_lookup_min",
}


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The keys of one YAML file, written with underscores or, as on the command line, with dashes."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read config file {str(path)!r} ({error.strerror}); give an existing file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"config file {str(path)!r} must hold 'key: value' lines, got {type(data).__name__}")
    return {key.replace("-", "_"): value for key, value in data.items()}


def add_flags(parser: argparse.ArgumentParser, kinds: Sequence[type[StrictConfig]]) -> None:
    """Add `--config FILE` (repeatable), one flag for each field of `kinds`, and the speculative shorthands."""
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="YAML file of these keys; later files win"
    )
    for kind in kinds:
        group = parser.add_argument_group(kind.TITLE)
        for name, field in kind.model_fields.items():
            help_text = (field.description or "").replace("%", "%%")
            group.add_argument(_flag(name), dest=name, default=argparse.SUPPRESS, metavar="VALUE", help=help_text)
    if any("speculative_config" in kind.model_fields for kind in kinds):
        group = parser.add_argument_group("shorthands for keys of --speculative-config")
        for flag, key in SPECULATIVE_FLAGS.items():
            group.add_argument(
                flag,
                dest=f"speculative.{key}",
                default=argparse.SUPPRESS,
                metavar="VALUE",
                help=f"{key}: {', '.join(METHODS)}" if key == "method" else key,
                type=canonical_method if key == "method" else str,
                choices=list(METHODS) if key == "method" else None,
            )


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse argv; a flag that does not exist is a ConfigError with near matches."""
    args, unknown = parser.parse_known_args(argv)
    for word in unknown:
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {word!r}; values belong to flags, see --help")
        flag = word.partition("=")[0]
        flags = sorted(flag for action in parser._actions for flag in action.option_strings)
        near = difflib.get_close_matches(flag, flags, n=3, cutoff=0.6)
        raise ConfigError(f"unknown flag {flag!r}; {f'did you mean {near}?' if near else 'see --help'}")
    return args


def gather(kinds: Sequence[type[StrictConfig]], args: argparse.Namespace) -> dict[str, Any]:
    """The keys that files and flags set together, for `pick` to build configs from.

    Raises: ConfigError for a file that cannot be read and for a key that none of `kinds` knows.
    """
    data: dict[str, Any] = {}
    for path in args.config:
        data |= read_yaml(path)
    data |= _flag_values(kinds, vars(args))
    given = {key: vars(args).get(f"speculative.{key}") for key in SPECULATIVE_FLAGS.values()}
    shorthands = {key: text for key, text in given.items() if text is not None}
    if shorthands:
        base = data.get("speculative_config") or {}
        if not isinstance(base, Mapping):
            raise ConfigError(f"speculative_config must hold 'key: value' pairs, got {base!r}")
        data["speculative_config"] = _with_shorthands(base, shorthands)
    reject_unknown(data, set().union(*(_keys(kind) for kind in kinds)), "config")
    return data


def pick(kind: type[Config], data: Mapping[str, Any]) -> Config:
    """The config of that kind from keys that several kinds share a namespace in."""
    return kind(**{key: value for key, value in data.items() if key in _keys(kind)})


def _keys(kind: type[StrictConfig]) -> set[str]:
    return {*kind.model_fields, *kind.NOT_YET}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flag_values(kinds: Sequence[type[StrictConfig]], args: Mapping[str, Any]) -> dict[str, Any]:
    """Text of the flags that were given -> values of their fields' types."""
    return {name: _value(kind, name, args[name]) for kind in kinds for name in kind.model_fields if name in args}


def _value(kind: type[StrictConfig], name: str, text: str) -> Any:
    field = kind.model_fields[name]
    if text in ("null", "None") and type(None) in get_args(field.annotation):
        return None
    if name == "speculative_config":
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            pass
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"{_flag(name)} must be JSON or a YAML block ({error}), got {text!r}; quote it for the shell"
            ) from None
    try:
        # Lax, since flags are text; the config's own strict check and its bounds come after.
        return TypeAdapter(field.rebuild_annotation()).validate_python(text, strict=False)
    except ValidationError as error:
        raise ConfigError(f"{_flag(name)}: {describe(error, kind.TITLE)}") from None


def _with_shorthands(base: Mapping[str, Any], shorthands: Mapping[str, str]) -> dict[str, Any]:
    """`base` with the shorthands' keys; a draft model named on the command line outweighs a file's method."""
    merged = dict(base)
    if "model" in shorthands and "method" not in shorthands:
        merged.pop("method", None)
    return merged | {key: int(text) if key != "model" and text.isdigit() else text for key, text in shorthands.items()}
