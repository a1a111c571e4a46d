"""Host. The devices that an engine runs on, as a mesh."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.errors import ConfigError
from jaxspec.shards import DATA, TENSOR


def make_mesh(tensor_parallel_size: int, data_parallel_size: int = 1) -> Mesh | None:
    """The first devices in JAX's order, as many of each process; None for one device, whose programs know of no mesh.

    Raises:
      ConfigError: there are fewer, or a process would have none.
    """
    num_hosts, devices = jax.process_count(), jax.devices()
    wanted, product = tensor_parallel_size * data_parallel_size, f"{tensor_parallel_size=}"
    if data_parallel_size > 1:
        product += f" x {data_parallel_size=}"
    if wanted % num_hosts != 0:
        raise ConfigError(
            f"{product} must be a multiple of the {num_hosts} processes, so that each has a part; raise it, or start "
            "fewer"
        )
    if wanted == 1:
        return None
    if wanted > len(devices):
        raise ConfigError(
            f"{product} must not exceed the {len(devices)} {devices[0].platform} devices that JAX sees; "
            "lower it (on CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N of one)"
        )
    each = wanted // num_hosts
    own = [[device for device in devices if device.process_index == host][:each] for host in range(num_hosts)]
    if any(len(one) < each for one in own):
        raise ConfigError(f"{product} needs {each} devices of each process, got {own}; lower it")
    return mesh_of([device for one in own for device in one], tensor_parallel_size, data_parallel_size)


def mesh_of(devices: Sequence[Any], tensor_parallel_size: int, data_parallel_size: int = 1) -> Mesh:
    """Groups one behind the other, so that the devices of one are neighbours; a size of one is no axis, unless it is
    all there is."""
    sizes = {DATA: data_parallel_size, TENSOR: tensor_parallel_size}
    axes = {name: size for name, size in sizes.items() if size > 1} or {TENSOR: 1}
    return Mesh(np.array(devices).reshape(*axes.values()), tuple(axes))
