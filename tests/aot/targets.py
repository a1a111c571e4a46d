"""Host. Accelerators that are not there: what each is made of, and what must be installed to compile for it.

Figures are the makers' published ones, under the names of XLA's device description.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

# What libtpu and the CUDA plugin want to find before jax is first imported, where there is no device.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

_GPU = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: {cores} clock_rate_ghz: {clock} memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  device_memory_size: {memory} cuda_compute_capability {{ major: {major} minor: 0 }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}" """

GPUS = {
    "h100": _GPU.format(
        name="NVIDIA H100 80GB HBM3", major=9, cores=132, clock=1.98, bandwidth=3352320000000, l2=52428800,
        memory=84942979072,
    ),
    "b200": _GPU.format(
        name="NVIDIA B200", major=10, cores=148, clock=1.965, bandwidth=8000000000000, l2=132644864,
        memory=191503532032,
    ),
}  # fmt: skip
TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}


def python() -> str:
    """The interpreter that has the compilers: $JAXSPEC_AOT_PYTHON, or what test.sh --all made, or this one."""
    made = ROOT / ".venv-aot" / "bin" / "python"
    return os.environ.get("JAXSPEC_AOT_PYTHON") or str(made if made.exists() else sys.executable)


def missing(target: str) -> str | None:
    """What this interpreter lacks to compile for a target; None if nothing."""
    if target in TPUS:
        return None if importlib.util.find_spec("libtpu") else "libtpu is not installed (the extra aot-tpu)"
    if not importlib.util.find_spec("jax_cuda12_plugin"):
        return "jax's CUDA plugin is not installed (the extra aot-gpu)"
    nvidia = importlib.util.find_spec("nvidia")
    places = (nvidia.submodule_search_locations if nvidia else None) or ()
    if shutil.which("ptxas") or any(Path(place, "cuda_nvcc", "bin", "ptxas").exists() for place in places):
        return None
    return "there is no ptxas (the extra aot-gpu)"


def devices(target: str):
    """The devices to lower for; in a process that began with `ENVIRONMENT`."""
    from jax.experimental import topologies

    if target in TPUS:
        return topologies.get_topology_desc(platform="tpu", topology_name=TPUS[target]).devices
    return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=GPUS[target]).devices
