"""Host. Configs on paper, for tests: those that ship, with their descriptions."""

import json
from pathlib import Path

from jaxspec.aot.describe import describe
from jaxspec.aot.settle import settle
from jaxspec.aot.topology import topology_of
from jaxspec.config.engine import EngineConfig
from jaxspec.config.load import pick, read_yaml
from tests.aot.targets import ROOT

CONFIGS = ROOT / "configs"
MODELS = CONFIGS / "models"
SHIPPED = (
    "llama3.1-8b-eagle3",
    "llama3.1-70b-draft",
    "v6e-8-draft-model",
    "qwen3-32b-eagle3",
    "qwen3-30b-a3b",
    "deepseek-v3-mtp",
)


def on_paper(name: str, topology: str = "h100:8", **more):
    """(config, described, resolved) of a config that ships."""
    config = pick(EngineConfig, read_yaml(CONFIGS / f"{name}.yaml") | more)
    described = describe(config, [MODELS])
    return config, described, settle(config, described, topology_of(topology))


def fields(name: str) -> dict:
    """A description as it stands, to count by hand from."""
    return json.loads((MODELS / f"{name}.json").read_text())


def write_json(path: Path, values: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path
