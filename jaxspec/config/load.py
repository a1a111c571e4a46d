"""Host. From YAML files, environment variables and flags to checked configs: every config field is each of the three.

Variables win over files, flags over variables, and of files and flags the later ones.
"""

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError

from jaxspec.config.base import StrictConfig, describe, reject_unknown
from jaxspec.config.methods import METHODS, canonical_method
from jaxspec.errors import ConfigError

Config = TypeVar("Config", bound=StrictConfig)

VARIABLE_PREFIX = "JAXSPEC_"
OTHER_VARIABLES = ("JAXSPEC_TEST_DEVICE", "JAXSPEC_AOT_PYTHON")  # what else of the project reads such a name

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
        data = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_OneKeyOnce)
    except OSError as error:
        raise ConfigError(f"cannot read config file {str(path)!r} ({error.strerror}); give an existing file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {str(path)!r} is not YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"config file {str(path)!r} must hold 'key: value' lines, got {type(data).__name__}")
    return {key.replace("-", "_"): value for key, value in data.items()}


class _OneKeyOnce(yaml.SafeLoader):
    """YAML in which a key that stands twice in a mapping is an error; PyYAML lets the last one win, silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or key == "<<":
                continue
            if (key := key.replace("-", "_")) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice in one mapping; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


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


def gather(
    kinds: Sequence[type[StrictConfig]], args: argparse.Namespace, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The keys that files, variables and flags set together, for `pick` to build configs from.

    environ: where to look for JAXSPEC_ variables, of the fields' names in capitals; None looks nowhere.
    Raises: ConfigError for a file that cannot be read and for a key that none of `kinds` knows.
    """
    data: dict[str, Any] = {}
    for path in args.config:
        data |= read_yaml(path)
    data |= _variable_values(kinds, environ or {})
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


def as_yaml(configs: Sequence[StrictConfig]) -> str:
    """Configs as one YAML file that says the same again, but for secrets, which are left out."""
    lines: dict[str, Any] = {}
    left_out: list[str] = []
    for config in configs:
        for name in type(config).model_fields:
            value = getattr(config, name)
            if isinstance(value, StrictConfig):
                value = value.model_dump(mode="json", exclude_defaults=True)
            if name in config.SECRETS and value is not None:
                left_out.append(f"# {name} is set, and not shown\n")
            else:
                lines[name] = value
    return yaml.safe_dump(lines, sort_keys=False, allow_unicode=True) + "".join(left_out)


def pick(kind: type[Config], data: Mapping[str, Any]) -> Config:
    """The config of that kind from keys that several kinds share a namespace in."""
    return kind(**{key: value for key, value in data.items() if key in _keys(kind)})


def _keys(kind: type[StrictConfig]) -> set[str]:
    return {*kind.model_fields, *kind.NOT_YET}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _flag_values(kinds: Sequence[type[StrictConfig]], args: Mapping[str, Any]) -> dict[str, Any]:
    """Text of the flags that were given -> values of their fields' types."""
    return {
        name: _value(kind, name, args[name], _flag(name))
        for kind in kinds
        for name in kind.model_fields
        if name in args
    }


def _variable_values(kinds: Sequence[type[StrictConfig]], environ: Mapping[str, str]) -> dict[str, Any]:
    """The same of the environment. A name that is nearly a field's is an error; others are somebody else's."""
    values = {}
    fields = {VARIABLE_PREFIX + name.upper(): (kind, name) for kind in kinds for name in kind.model_fields}
    for variable, text in environ.items():
        if variable in fields:
            kind, name = fields[variable]
            values[name] = _value(kind, name, text, variable)
        elif variable.startswith(VARIABLE_PREFIX) and variable not in OTHER_VARIABLES:
            near = difflib.get_close_matches(variable, fields, n=3, cutoff=0.85)
            if near:
                raise ConfigError(f"unknown variable {variable!r}; did you mean {' or '.join(near)}?")
    return values


def _value(kind: type[StrictConfig], name: str, text: str, source: str) -> Any:
    """source: the flag or variable, for messages."""
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
                f"{source} must be JSON or a YAML block ({error}), got {text!r}; quote it for the shell"
            ) from None
    if any(get_origin(one) is list for one in (field.annotation, *get_args(field.annotation))):
        return _list_value(text)
    try:
        # Lax, since flags are text; the config's own strict check and its bounds come after.
        return TypeAdapter(field.rebuild_annotation()).validate_python(text, strict=False)
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe(error, kind.TITLE)}") from None


def _list_value(text: str) -> Any:
    """A list as JSON, or with commas between."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError:
        values = None
    return values if isinstance(values, list) else [part for part in map(str.strip, text.split(",")) if part]


def _with_shorthands(base: Mapping[str, Any], shorthands: Mapping[str, str]) -> dict[str, Any]:
    """`base` with the shorthands' keys; a draft model named on the command line outweighs a file's method."""
    merged = dict(base)
    if "model" in shorthands and "method" not in shorthands:
        merged.pop("method", None)
    return merged | {key: int(text) if key != "model" and text.isdigit() else text for key, text in shorthands.items()}
