"""Host. `jaxspec inspect SRC`: what a checkpoint is, and what jaxspec would do with it; no weight is read."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config.detect import Drafter, detect, has_mtp_modules, settle_method
from jaxspec.config.fields import read_json
from jaxspec.config.support import check_built
from jaxspec.errors import ConfigError, JaxspecError
from jaxspec.models.registry import family_of
from jaxspec.text.tokenizer import load_tokenizer
from jaxspec.weights import orbax, safetensors, torch_zip
from jaxspec.weights.aliases import resolve_model
from jaxspec.weights.checkpoint import Checkpoint, find_checkpoint, main_dtype, open_checkpoint, open_tensors
from jaxspec.weights.gguf import GgufReader
from jaxspec.weights.load import check
from jaxspec.weights.reader import Reader

READERS = {
    GgufReader: "gguf",
    safetensors.SafetensorsReader: "safetensors",
    torch_zip.TorchReader: "torch",
    orbax.OrbaxReader: "orbax",
}
MAX_SHOWN = 8  # ignored tensors spelled out for people; JSON has them all


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect a checkpoint. Returns the exit status: 0, or 1 when it is not one or would be refused."""
    parser = argparse.ArgumentParser(
        "jaxspec inspect",
        description="Says what a checkpoint is, and what jaxspec would do with it.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="alias, hub name, folder or .gguf file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    try:
        found = inspect(args.source)
    except JaxspecError as error:
        found = {"source": args.source, "refused_because": str(error)}
    print(json.dumps(found) if args.json else _for_people(found))
    return 1 if found["refused_because"] else 0


def inspect(source: str) -> dict[str, Any]:
    """What `source` is and what loading it would do.

    Returns:
        A dictionary of plain values. loads_as is what it would be used for, ignored the tensors that would stay
        unread, refused_because the error that loading would end with, or None.

    Raises:
        ConfigError, WeightsError: no weights can be found or listed there.
    """
    path = find_checkpoint(resolve_model(source))
    config: dict[str, Any] = {}
    if path.is_file():
        reader: Reader = GgufReader(path)
        config = reader.metadata
    else:
        config = read_json(path / "config.json")
        quantization = config.get("quantization_config")
        reader = open_tensors(path, quantization if isinstance(quantization, dict) else None)
    with reader:
        return _describe(source, path, config, reader)


def _describe(source: str, path: Path, config: dict[str, Any], reader: Reader) -> dict[str, Any]:
    sizes = {name: math.prod(info.shape) for name, info in reader.tensors.items()}
    dtypes = Counter[str]()
    for name, info in reader.tensors.items():
        dtypes["quantized" if info.is_quantized else info.dtype.name] += sizes[name]
    shapes = {name: info.shape for name, info in reader.tensors.items()}
    drafter = detect(config, shapes)
    found: dict[str, Any] = {
        "source": source,
        "path": str(path),
        "format": next((name for kind, name in READERS.items() if isinstance(reader, kind)), "safetensors, float8"),
        "architecture": _architecture(config, reader),
        "num_tensors": len(sizes),
        "num_parameters": sum(sizes.values()),
        "values_by_dtype": dict(dtypes),
        "dtype": main_dtype(reader),
        "num_bytes": _num_bytes(path),
        "drafter": None if drafter is None else drafter.method,
        "has_mtp_modules": drafter is None and has_mtp_modules(shapes),
        "tokenizer": _tokenizer(path),
        "family": None,
        "loads_as": None,
        "ignored": [],
        "refused_because": None,
    }
    if drafter is not None:
        found["loads_as"] = f"drafter of method {drafter.method!r} ({drafter.because})"
        found["refused_because"] = _refusal_of_method(drafter, str(path))
        return found
    try:
        with open_checkpoint(path) as checkpoint:
            found |= _as_target(checkpoint)
    except JaxspecError as error:
        found["refused_because"] = str(error)
    return found


def _as_target(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checks of loading, without the loading."""
    config = checkpoint.config
    family = family_of(config.family)
    dtype = "float32" if config.dtype == "float32" else "bfloat16"
    specs = family.specs(config, np.dtype(np.float32))
    ignored = check(checkpoint.reader, specs, family.name_table(config, checkpoint.source))
    return {
        "family": config.family,
        "loads_as": f"target model, {config.num_layers} layers, vocabulary {config.vocab_size}, dtype {dtype}",
        "ignored": ignored,
    }


def _refusal_of_method(drafter: Drafter, path: str) -> str | None:
    """What the engine would say to a drafter of this kind: a method may be known and not built."""
    try:
        check_built(settle_method(None, path, drafter))
    except ConfigError as error:
        return str(error)
    return None


def _architecture(config: dict[str, Any], reader: Reader) -> str | None:
    if isinstance(reader, GgufReader):
        return str(reader.metadata.get("general.architecture"))
    names = config.get("architectures") or config.get("model_type")
    return ", ".join(map(str, names)) if isinstance(names, list) else None if names is None else str(names)


def _num_bytes(path: Path) -> int:
    """Bytes of the weight files."""
    if path.is_file():
        return path.stat().st_size
    shards = [file for folder in path.glob("orbax-*") for file in folder.rglob("*")]
    files = shards or [file for file in path.iterdir() if file.suffix in (".safetensors", *torch_zip.SUFFIXES)]
    return sum(file.stat().st_size for file in files if file.is_file())


def _tokenizer(path: Path) -> dict[str, Any] | None:
    """Its size and special tokens; None where there is none, which drafters and bare targets may lack."""
    try:
        tokenizer = load_tokenizer(path)
    except ConfigError as error:
        return None if "no tokenizer.json" in str(error) else {"error": str(error)}
    return {
        "vocab_size": tokenizer.vocab_size,
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "has_chat_template": tokenizer.chat_template is not None,
    }


def _for_people(found: dict[str, Any]) -> str:
    if "path" not in found:
        return f"{found['source']}: refused because {found['refused_because']}"
    lines = [f"{'path':<12} {found['path']}"]
    what = f"{found['format']}, {found['num_tensors']} tensors, {found['num_bytes'] / 1e6:.1f} MB"
    values = ", ".join(f"{size / 1e6:.1f} M {name}" for name, size in found["values_by_dtype"].items())
    lines += [f"{'weights':<12} {what}", f"{'parameters':<12} {found['num_parameters'] / 1e6:.1f} M: {values}"]
    lines.append(f"{'architecture':<12} {found['architecture']}" + (", with MTP modules" * found["has_mtp_modules"]))
    tokenizer = found["tokenizer"]
    if tokenizer is None:
        told = "none; prompts must be token ids"
    elif "error" in tokenizer:
        told = f"unreadable: {tokenizer['error']}"
    else:
        template = "with a chat template" if tokenizer["has_chat_template"] else "no chat template"
        told = f"{tokenizer['vocab_size']} tokens, {template}"
    lines.append(f"{'tokenizer':<12} {told}")
    if found["loads_as"]:
        lines.append(f"{'loads as':<12} {found['loads_as']}")
    if ignored := found["ignored"]:
        more = f" and {len(ignored) - MAX_SHOWN} more" if len(ignored) > MAX_SHOWN else ""
        lines.append(f"{'ignores':<12} {', '.join(ignored[:MAX_SHOWN])}{more}")
    if found["refused_because"]:
        lines.append(f"{'refused':<12} because {found['refused_because']}")
    return "\n".join(lines)
