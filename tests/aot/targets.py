"""Host. The accelerators that tests compile for, none of which need be there."""

import os
import sys
from pathlib import Path

from jaxspec.aot.topology import Topology, topology_of
from jaxspec.aot.topology import devices as devices_of
from jaxspec.aot.topology import missing as missing_for

ROOT = Path(__file__).resolve().parent.parent.parent

TOPOLOGIES: dict[str, Topology] = {
    name: topology_of(shape) for name, shape in
    {"h100": "h100:1", "b200": "b200:1", "v5e": "v5e:2x2", "v6e": "v6e:2x2"}.items()
}  # fmt: skip
GPUS = [name for name, one in TOPOLOGIES.items() if one.chip.platform == "gpu"]
TPUS = [name for name, one in TOPOLOGIES.items() if one.chip.platform == "tpu"]


def python() -> str:
    """The interpreter that has the compilers: $JAXSPEC_AOT_PYTHON, or what test.sh --all made, or this one."""
    made = ROOT / ".venv-aot" / "bin" / "python"
    return os.environ.get("JAXSPEC_AOT_PYTHON") or str(made if made.exists() else sys.executable)


def missing(target: str) -> str | None:
    """What this interpreter lacks to compile for a target; None if nothing."""
    return missing_for(TOPOLOGIES[target].chip)


def devices(target: str):
    """The devices to lower for; in a process that began with `jaxspec.aot.topology.ENVIRONMENT`."""
    return devices_of(TOPOLOGIES[target])
