"""Host. Checkpoints of many files: the index that names them, and tables of tensors joined without contradiction."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxspec.errors import WeightsError

Entry = TypeVar("Entry")
MAX_LISTED = 20  # contradictions spelled out
MAX_INDEX_BYTES = 100_000_000


def indexed_files(
    folder: Path, index_name: str, is_there: Callable[[Path], bool] = Path.is_file
) -> tuple[list[Path], dict[str, str]]:
    """The shards that an index names, all of them there, and its map from tensor to file name.

    Raises:
      WeightsError: no index can be read, it points outside the folder, or a shard is missing.
    """
    weight_map = _read_index(folder / index_name)
    names = sorted(set(weight_map.values()))
    if missing := [name for name in names if not is_there(folder / name)]:
        raise WeightsError(f"{folder} lacks shards that {index_name} names: {', '.join(missing)}; fetch them")
    return [folder / name for name in names], weight_map


def join_tables(
    files: list[Path], read_table: Callable[[Path], Mapping[str, Entry]], folder: Path
) -> dict[str, tuple[Path, Entry]]:
    """{tensor name: (its file, its entry)} over all files.

    Raises:
      WeightsError: a name occurs in two of them, or `read_table` refuses one.
    """
    joined: dict[str, tuple[Path, Entry]] = {}
    for file in files:
        for name, entry in read_table(file).items():
            if name in joined:
                raise WeightsError(
                    f"tensor {name!r} is in both {joined[name][0].name} and {file.name}; "
                    f"one name may occur once: remove the stale file from {folder}"
                )
            joined[name] = (file, entry)
    return joined


def check_index(index: Path, weight_map: Mapping[str, str], files: Mapping[str, Path]) -> None:
    """Raises WeightsError where the index says other than the shards do. files: {tensor name: where it is}."""
    wrong = [
        f"{name!r} should be in {file}" + ("" if name not in files else f", is in {files[name].name}")
        for name, file in weight_map.items()
        if name not in files or files[name].name != file
    ]
    wrong += [f"{name!r} is in {file.name}" for name, file in files.items() if name not in weight_map]
    if wrong:
        more = f"; and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
        raise WeightsError(
            f"{index} contradicts the shards: {'; '.join(wrong[:MAX_LISTED])}{more}; fetch the checkpoint again"
        )


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object of which no name occurs twice: an object_pairs_hook."""
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"name {twice!r} occurs twice")
    return table


def corrupt(path: Path, problem: str) -> WeightsError:
    """The error of a file that contradicts itself."""
    return WeightsError(f"{path}: {problem}; the file is truncated or corrupt, fetch it again")


def _read_index(path: Path) -> dict[str, str]:
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise corrupt(path, f"an index of {path.stat().st_size} bytes is longer than {MAX_INDEX_BYTES}")
        weight_map = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_pairs)["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise corrupt(
            path, f"no weight_map can be read from it ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    # A shard is a file of this folder: an index from the network must not point anywhere else.
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and name == Path(name).name and "\0" not in name and name not in ("", "..")
        for name in weight_map.values()
    ):
        raise corrupt(path, "weight_map must map tensor names to plain file names")
    return weight_map
