"""Host. The devices that an engine runs on, as a mesh."""

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.errors import ConfigError
from jaxspec.shards import TENSOR


def make_mesh(tensor_parallel_size: int) -> Mesh | None:
    """The first devices in JAX's order, along one axis; None for one device, whose programs know of no mesh.

    Raises:
      ConfigError: there are fewer.
    """
    if tensor_parallel_size == 1:
        return None
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ConfigError(
            f"{tensor_parallel_size=} must not exceed the {len(devices)} {devices[0].platform} devices that JAX sees; "
            "lower it (on CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N of one)"
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), (TENSOR,))
