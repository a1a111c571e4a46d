"""Host. Several processes as one job: `jax.distributed` brings them together, and each then sees the devices of all."""

from typing import Literal

import jax

from jaxspec.errors import ConfigError


def start(nnodes: int | Literal["auto"], node_rank: int | None, master_addr: str | None, master_port: int) -> None:
    """Join the job; nothing for one process, or once this process has joined. Before JAX looks for devices.

    Args:
        nnodes: processes of the job; "auto": as many as the cluster says. What is None, too, the cluster says, where
            JAX knows its kind: Cloud TPU, SLURM, Open MPI and MPICH, Kubernetes.
        node_rank: this process's number, from 0.
        master_addr, master_port: where process 0 is reached by the others.

    Raises:
        ConfigError: something is not told and cannot be found out, or the processes did not come together.
    """
    if nnodes == 1 or jax.distributed.is_initialized():
        return
    address = None if master_addr is None else f"{master_addr}:{master_port}"
    told = f"{nnodes=}, {node_rank=}, {master_addr=}, {master_port=}"
    try:
        jax.distributed.initialize(address, None if nnodes == "auto" else nnodes, node_rank)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the processes of a job must find each other, got {told}, and JAX says: {error}; give nnodes, node_rank "
            "and master_addr to each, or nnodes: auto where the cluster tells them, and start all of them"
        ) from error
    if nnodes not in ("auto", jax.process_count()):
        raise ConfigError(f"{nnodes=} must be the processes of the job, which are {jax.process_count()}; correct it")
