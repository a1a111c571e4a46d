"""Host. Accelerators that are not there, by name: what their makers publish of them, and how to compile for them.

A name is a chip and how many of it: `v5e:2x4`, `v5p:2x2x2` (a TPU slice's shape), `h100:8` (one host), `h200:2x8`
(two).
"""

import difflib
import functools
import importlib.util
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxspec.errors import ConfigError

# What libtpu and the CUDA plugin want to find before jax is first imported, where there is no device.
ENVIRONMENT: Mapping[str, str] = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Chip:
    """What one JAX device of a kind has, as published: bytes, bytes a second, floating-point operations a second.

    link_bandwidth: what it sends at most to its neighbours on a host, or in a slice, all links together, one way;
    network_bandwidth: the same to other hosts, where that is another network. cores, clock_ghz, l2_bytes, major: of
    GPUs, for XLA's description of one. dims: of the shapes that slices of a TPU have.
    """

    name: str
    title: str
    platform: Literal["tpu", "gpu"]
    memory_bytes: int
    memory_bandwidth: float
    bf16_flops: float
    link_bandwidth: float
    network_bandwidth: float | None = None
    dims: int = 0
    devices_per_chip: int = 1
    cores: int = 0
    clock_ghz: float = 0.0
    l2_bytes: int = 0
    major: int = 0


def _tpu(name: str, title: str, gib: float, bandwidth: float, flops: float, link: float, dims: int, devices: int = 1):
    return Chip(
        name, title, "tpu", int(gib * 2**30), bandwidth, flops, link, dims=dims, devices_per_chip=devices
    )  # fmt: skip


def _gpu(name: str, title: str, memory: int, bandwidth: float, flops: float, link: float, network: float, **more: Any):
    return Chip(name, title, "gpu", memory, bandwidth, flops, link, network, **more)


# Google's pages on each TPU (link: gigabits a second of a chip, /8), NVIDIA's data sheets (dense bfloat16 rates; memory
# as the device reports it; NVLink one way; the network is one 400 Gb/s adapter a GPU, as in NVIDIA's own systems).
CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v5e", "TPU v5e", 16, 819e9, 197e12, 200e9, 2),
        _tpu("v6e", "TPU v6e", 32, 1638e9, 918e12, 400e9, 2),
        _tpu("v5p", "TPU v5p", 95, 2765e9, 459e12, 600e9, 3),
        # A chip is two devices to JAX, each with half of it.
        _tpu("tpu7x", "TPU7x", 96, 3690e9, 1153.5e12, 300e9, 3, 2),
        _gpu("a100", "NVIDIA A100-SXM4-80GB", 84987740160, 2039e9, 312e12, 300e9, 25e9, cores=108, clock_ghz=1.41,
             l2_bytes=41943040, major=8),
        _gpu("h100", "NVIDIA H100 80GB HBM3", 84942979072, 3352.32e9, 989e12, 450e9, 50e9, cores=132, clock_ghz=1.98,
             l2_bytes=52428800, major=9),
        _gpu("h200", "NVIDIA H200", 151397597184, 4800e9, 989e12, 450e9, 50e9, cores=132, clock_ghz=1.98,
             l2_bytes=52428800, major=9),
        _gpu("b200", "NVIDIA B200", 191503532032, 8000e9, 2250e12, 900e9, 50e9, cores=148, clock_ghz=1.965,
             l2_bytes=132644864, major=10),
    )
}  # fmt: skip

_SHARED_MEMORY = {8: (166912, 167936), 9: (232448, 233472), 10: (232448, 233472)}  # bytes a block, opted in; a core
_GPU_DESCRIPTION = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: {shared_core} shared_memory_per_block_optin: {shared_block}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  core_count: {cores} clock_rate_ghz: {clock} memory_bandwidth: {bandwidth} l2_cache_size: {l2}
  device_memory_size: {memory} cuda_compute_capability {{ major: {major} minor: 0 }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}" """


@dataclass(frozen=True)
class Topology:
    """So many of a chip. shape: of a TPU slice in chips; of GPUs (hosts, GPUs a host)."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * self.chip.devices_per_chip

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices_per_host(self) -> int:
        """That reach each other by links: all of a slice, or the GPUs of a host."""
        return self.num_devices if self.chip.platform == "tpu" else self.shape[1]

    def bandwidth_between(self, num_devices: int) -> float:
        """Bytes a second that a device sends to the others of a group of so many, at most."""
        chip = self.chip
        if num_devices <= self.devices_per_host or chip.network_bandwidth is None:
            return chip.link_bandwidth
        return chip.network_bandwidth


def topology_of(name: str) -> Topology:
    """What a name means.

    Raises: ConfigError for a chip or a shape that is not known.

    >>> topology_of("h200:2x8").num_devices, topology_of("v5e:2x4").shape, topology_of("H100").shape
    (16, (2, 4), (1, 1))
    """
    kind, _, given = name.strip().lower().partition(":")
    if kind not in CHIPS:
        near = difflib.get_close_matches(kind, CHIPS, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(CHIPS)}"
        raise ConfigError(f"topology {name!r}: there is no chip {kind!r}; {hint}")
    chip = CHIPS[kind]
    dims = 2 if chip.platform == "gpu" else chip.dims
    example = {"gpu": f"{kind}:8 or {kind}:2x8 (hosts x GPUs)"}.get(
        chip.platform, f"{kind}:{'x'.join(['2'] * dims)} (the slice's shape in chips)"
    )
    shape = (1,) * dims
    if given:
        if not re.fullmatch(r"\d+(x\d+)*", given):
            raise ConfigError(f"topology {name!r}: {given!r} is no shape; say {example}")
        shape = tuple(map(int, given.split("x")))
        if chip.platform == "gpu" and len(shape) == 1:
            shape = (1, *shape)
        elif shape == (1,):
            shape = (1,) * dims
    if len(shape) != dims or min(shape) < 1:
        raise ConfigError(f"topology {name!r}: a shape of {kind} has {dims} sizes of 1 or more; say {example}")
    return Topology(name, chip, shape)


def missing(chip: Chip) -> str | None:
    """What this interpreter lacks to compile for a chip, and how to install it; None if nothing."""
    if chip.platform == "tpu":
        if importlib.util.find_spec("libtpu"):
            return None
        return "libtpu is not installed (the extra aot-tpu: pip install 'jaxspec[aot-tpu]')"
    if not importlib.util.find_spec("jax_cuda12_plugin"):
        return "jax's CUDA plugin is not installed (the extra aot-gpu: pip install 'jaxspec[aot-gpu]')"
    nvidia = importlib.util.find_spec("nvidia")
    places = (nvidia.submodule_search_locations if nvidia else None) or ()
    if shutil.which("ptxas") or any(Path(place, "cuda_nvcc", "bin", "ptxas").exists() for place in places):
        return None
    return "there is no ptxas (the extra aot-gpu: pip install 'jaxspec[aot-gpu]')"


def description(chip: Chip) -> str:
    """XLA's description of a GPU."""
    block, core = _SHARED_MEMORY[chip.major]
    return _GPU_DESCRIPTION.format(
        name=chip.title,
        major=chip.major,
        cores=chip.cores,
        clock=chip.clock_ghz,
        bandwidth=int(chip.memory_bandwidth),
        l2=chip.l2_bytes,
        memory=chip.memory_bytes,
        shared_block=block,
        shared_core=core,
    )


def devices(topology: Topology) -> list[Any]:
    """The devices to lower for, in a process that began with `ENVIRONMENT`.

    Raises: ConfigError for a shape that the compiler does not know.
    """
    from jax.experimental import topologies

    chip = topology.chip
    try:
        if chip.platform == "gpu":
            shape = "x".join(map(str, (1, *topology.shape)))  # slices, hosts, GPUs
            found = topologies.get_topology_desc(platform="cuda", topology=shape, target_config=description(chip))
        else:
            make = functools.partial(
                topologies.get_topology_desc,
                platform="tpu",
                topology_name=f"{chip.name}:{'x'.join(map(str, topology.shape))}",
            )
            # One chip is a part of a host, whose usual shape would not fit into it.
            found = make(chips_per_host_bounds=[1, 1, 1]) if topology.num_chips == 1 else make()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"topology {topology.name!r} is refused by the compiler: {str(error)[:300]}") from error
    return list(found.devices)
