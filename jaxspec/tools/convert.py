"""Host. `jaxspec convert SRC DST`: a checkpoint written anew as a Hugging Face folder, of safetensors or Orbax."""

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.config.fields import read_json
from jaxspec.errors import ConfigError, JaxspecError, WeightsError
from jaxspec.models.registry import family_of
from jaxspec.text.tokenizer import load_tokenizer
from jaxspec.weights.aliases import resolve_model
from jaxspec.weights.checkpoint import find_checkpoint, main_dtype, open_checkpoint, open_tensors
from jaxspec.weights.export import renamed
from jaxspec.weights.export_config import as_folder, hf_configs
from jaxspec.weights.load import check
from jaxspec.weights.reader import Reader
from jaxspec.weights.write import planned_dtypes, write_shards

FORMS = ("safetensors", "orbax")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEFAULT_SHARD_BYTES = 5 * 10**9
# Beside the weights: whatever describes the model and its tokenizer, or says under which terms it may be used.
_CARRIED = re.compile(r".*\.(json|jinja|txt|model|md)|LICENSE.*|NOTICE.*|USE_POLICY.*", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Conversion:
    """What was written. notes: what a user should know of it."""

    destination: Path
    shards: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    notes: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a checkpoint. Returns the exit status: 0, or 1 when it cannot be done."""
    parser = argparse.ArgumentParser(
        "jaxspec convert", description="Writes a checkpoint anew, as safetensors or Orbax.", allow_abbrev=False
    )
    parser.add_argument("source", metavar="SRC", help="alias, hub name, folder or .gguf file")
    parser.add_argument("destination", metavar="DST", type=Path, help="folder to write; it must not exist")
    parser.add_argument("--format", choices=FORMS, default="safetensors", help="form of the weights; safetensors")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of floats; auto: as they are, bfloat16 for quantised ones"
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest shard, as 500MB; 5GB")
    args = parser.parse_args(argv)
    try:
        done = convert(
            args.source,
            args.destination,
            form=args.format,
            dtype=args.dtype,
            max_shard_bytes=parse_size(args.max_shard_size),
        )
    except JaxspecError as error:
        print(f"jaxspec convert: {error}", file=sys.stderr)
        return 1
    for note in done.notes:
        print(f"note: {note}")
    shards = f"{len(done.shards)} shard{'s' if len(done.shards) > 1 else ''}"
    print(f"wrote {done.destination}: {done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB, {shards}")
    return 0


def convert(
    source: str,
    destination: Path,
    *,
    form: str = "safetensors",
    dtype: str = "auto",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Conversion:
    """Write `source` to the new folder `destination`; nothing is there before all of it is.

    Args:
        source: alias, hub name, folder (of a model or a drafter) or .gguf file.
        destination: a folder that does not exist.
        form: "safetensors" or "orbax".
        dtype: of floats; "auto" keeps each, and takes bfloat16 for what was quantised.
        max_shard_bytes: a shard holds no more, unless one tensor alone does.

    Raises:
        ConfigError, WeightsError: the source cannot be read, or the destination exists.
    """
    if destination.exists():
        raise ConfigError(f"{destination} exists, and convert never overwrites; name a new folder")
    path = find_checkpoint(resolve_model(source))
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{destination.name}-", dir=destination.parent) as scratch:
        folder = Path(scratch) / "folder"
        folder.mkdir()
        write = _from_gguf if path.is_file() else _from_folder
        reader, notes = write(path, folder, dtype)
        with reader:
            dtypes = planned_dtypes(reader, dtype)
            try:
                shards = write_shards(reader, folder, form, dtypes, max_shard_bytes)
                folder.rename(destination)
            except OSError as error:
                raise WeightsError(
                    f"cannot write {destination}: {error.strerror or error}; make room for it"
                ) from error
        num_bytes = sum(file.stat().st_size for file in destination.rglob("*") if file.is_file())
    return Conversion(destination, tuple(shards), len(dtypes), num_bytes, tuple(notes))


def parse_size(text: str) -> int:
    """Bytes of "500MB", "5GB" or a plain number.

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B?)", text.strip().upper())
    size = int(float(match[1]) * _UNITS.get(match[2], _UNITS.get(match[2] + "B", 0))) if match else 0
    if size < 1:
        raise ConfigError(f"a size is a number of bytes, or of KB, MB or GB, got {text!r}; write it as 500MB")
    return size


def _from_folder(path: Path, folder: Path, dtype: str) -> tuple[Reader, list[str]]:
    """The tensors as they are named, and every file beside them; works for drafters as for targets."""
    config = read_json(path / "config.json")
    quantization = config.get("quantization_config")
    reader = open_tensors(path, quantization if isinstance(quantization, dict) else None)
    notes = []
    for file in sorted(path.iterdir()):
        if file.is_file() and _CARRIED.fullmatch(file.name) and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    if any(info.is_quantized for info in reader.tensors.values()):
        config.pop("quantization_config", None)
        notes.append("quantised weights are written in full; quantization_config is dropped from config.json")
    for key in ("torch_dtype", "dtype"):
        if key in config:
            config[key] = main_dtype(reader) if dtype == "auto" else dtype
    _write_json(folder / "config.json", config)
    return reader, notes


def _from_gguf(path: Path, folder: Path, dtype: str) -> tuple[Reader, list[str]]:
    """The tensors by their Hugging Face names, with config and tokenizer files made from the file's keys."""
    checkpoint = open_checkpoint(path)
    try:
        family = family_of(checkpoint.config.family)
        specs = family.specs(checkpoint.config, np.dtype(np.float32))
        found = family.name_table(checkpoint.config, "gguf")
        check(checkpoint.reader, specs, found)
        reader = renamed(checkpoint.reader, specs, found, family.name_table(as_folder(checkpoint.config), "hf"))
        config = checkpoint.config if dtype == "auto" else checkpoint.config.model_copy(update={"dtype": dtype})
        values, generation = hf_configs(config, reader.tensors)
    except JaxspecError:
        checkpoint.reader.close()
        raise
    _write_json(folder / "config.json", values)
    _write_json(folder / "generation_config.json", generation)
    notes = []
    if checkpoint.config.num_mtp_layers:
        notes.append("the multi-token-prediction module is not written")
    try:
        _write_tokenizer(path, folder)
    except ConfigError as error:
        notes.append(f"no tokenizer is written: {error}")
    return reader, notes


def _write_tokenizer(path: Path, folder: Path) -> None:
    tokenizer = load_tokenizer(path)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    bare, framed = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "add_bos_token": framed[: len(bare)] != bare,
        "add_eos_token": framed[-len(bare) :] != bare,
        "chat_template": tokenizer.chat_template,
    }
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in values.items() if value is not None})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
