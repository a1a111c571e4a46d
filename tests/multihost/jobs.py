"""Host. Jobs of several processes on this machine, for tests: started here, talking over loopback with Gloo."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 240  # of a job, on a machine where all its processes may share one core


class Job:
    """Processes 0 to n - 1 of `words`, each told who it is by JAXSPEC_ variables."""

    def __init__(self, num_processes: int, words: list[str], num_devices: int = 1):
        """num_devices: of each."""
        flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
        flags = f"{flags} --xla_force_host_platform_device_count={num_devices}"
        names = {"NNODES": num_processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        shared = {f"JAXSPEC_{name}": str(value) for name, value in names.items()}
        cache = jax.config.values["jax_compilation_cache_dir"] or ""
        shared |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
        shared |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), "JAX_COMPILATION_CACHE_DIR": cache}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env=os.environ | shared | {"JAXSPEC_NODE_RANK": str(rank)},
            )
            for rank in range(num_processes)
        ]  # fmt: skip
        self.said = [""] * num_processes
        self.answers: list = []  # one for each line that process 0 has printed

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait(self, but: tuple[int, ...] = ()) -> list[int]:
        """The exit statuses, of all `but` those that never end."""
        for rank, process in enumerate(self.processes):
            if rank not in but:
                out, self.said[rank] = process.communicate(timeout=LONGEST_S)
                if rank == 0:
                    self.answers = [
                        json.loads(line) for line in out.splitlines() if line.startswith("[[")
                    ]  # Gloo speaks too
        return [process.returncode for rank, process in enumerate(self.processes) if rank not in but]

    def last_line(self, rank: int) -> str:
        """What a process has said of its end."""
        return next(line for line in reversed(self.said[rank].splitlines()) if line.startswith("jaxspec: "))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
