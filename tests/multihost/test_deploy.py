"""Host. The manifests in configs/deploy/ parse, and every flag and variable in them is one of ours."""

import argparse
import os
import re
from pathlib import Path

import pytest
import yaml

from jaxspec.config.engine import EngineConfig
from jaxspec.config.load import add_flags, gather, parse_flags, pick
from jaxspec.config.server import ServerConfig

ROOT = Path(__file__).resolve().parents[2]
KINDS = (EngineConfig, ServerConfig)


def containers(node):
    """Every container that a manifest describes, wherever it stands."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key == "containers":
            yield from value
        elif isinstance(value, dict | list):
            yield from containers(value)


def config_of(flags, variables):
    parser = argparse.ArgumentParser()
    add_flags(parser, KINDS)
    data = gather(KINDS, parse_flags(parser, flags), variables)
    pick(ServerConfig, data)
    return pick(EngineConfig, data)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "deploy").glob("*.yaml")), ids=lambda path: path.name)
def test_manifests(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = [one for document in yaml.safe_load_all(path.read_text()) for one in containers(document)]
    assert found
    for container in found:
        assert container["command"] == ["python", "-m", "jaxspec.serve"]
        variables = {one["name"]: one.get("value", "0") for one in container.get("env", [])}
        config = config_of(container["args"], variables)
        assert {name for name in variables if name.startswith("JAXSPEC_")} <= {
            f"JAXSPEC_{name.upper()}" for name in config.model_fields_set
        }
        devices = next(iter(container["resources"]["limits"].values()))
        text = path.read_text()
        num_pods = int(re.search(r"parallelism: (\d+)", text).group(1)) if "JobSet" in text else 1
        assert config.tensor_parallel_size == num_pods * devices
        assert config.nnodes in ("auto", num_pods)


def test_the_script(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "configs" / "deploy" / "slurm.sh").read_text()
    assert os.access(ROOT / "configs" / "deploy" / "slurm.sh", os.X_OK)
    numbers = {name: int(value) for name, value in re.findall(r"#SBATCH --([\w-]+)=(\d+)", text)}
    command = text[text.index("jaxspec.serve") :].replace("\\\n", " ").split()[1:]
    config = config_of(command, {})
    assert config.nnodes == "auto"
    assert config.tensor_parallel_size == numbers["nodes"] * numbers["gpus-per-node"]
    assert numbers["ntasks-per-node"] == numbers["gpus-per-node"]
