"""Host. The devices that an engine runs on, as a mesh."""

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.errors import ConfigError
from jaxspec.shards import TENSOR


def make_mesh(tensor_parallel_size: int) -> Mesh | None:
    """The first devices in JAX's order, as many of each process, along one axis; None for one device, whose programs
    know of no mesh.

    Raises:
      ConfigError: there are fewer, or a process would have none.
    """
    num_hosts, devices = jax.process_count(), jax.devices()
    if tensor_parallel_size % num_hosts != 0:
        raise ConfigError(
            f"{tensor_parallel_size=} must be a multiple of the {num_hosts} processes, so that each has a part; raise "
            "it, or start fewer"
        )
    if tensor_parallel_size == 1:
        return None
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            f"{tensor_parallel_size=} must not exceed the {len(devices)} {devices[0].platform} devices that JAX sees; "
            "lower it (on CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N of one)"
        )
    each = tensor_parallel_size // num_hosts
    own = [[device for device in devices if device.process_index == host][:each] for host in range(num_hosts)]
    if any(len(one) < each for one in own):
        raise ConfigError(f"{tensor_parallel_size=} needs {each} devices of each process, got {own}; lower it")
    return Mesh(np.array([device for one in own for device in one]), (TENSOR,))
