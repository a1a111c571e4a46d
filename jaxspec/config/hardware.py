"""Host. What `resolve` needs to know of the machine, as data, and how this process reads it."""

import hashlib
import os
import platform as host_platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HardwareFacts:
    """The machine a config is settled for.

    platform: "cpu", "gpu" or "tpu"; memory_bytes: memory of one device, the host's on CPU;
    cpu_features: digest of the host's instruction sets, so that compiled code is never loaded on another kind of CPU;
    cache_home: where this user's caches live, None when there is no such place.
    """

    platform: str
    memory_bytes: int
    cpu_features: str
    cache_home: str | None


def read_hardware(platform: str, device_memory_bytes: int | None = None) -> HardwareFacts:
    """The facts of this machine. `device_memory_bytes` is what the device reports; None means the host's memory."""
    memory_bytes = device_memory_bytes if device_memory_bytes is not None else host_memory_bytes()
    return HardwareFacts(platform, memory_bytes, cpu_features(), _cache_home())


def host_memory_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's limit when that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(limit_file).read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            return min(total, int(limit))
    return total


def cpu_features() -> str:
    """A short digest of the host CPU's architecture and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), host_platform.processor())
    return hashlib.sha256(f"{host_platform.machine()} {flags}".encode()).hexdigest()[:12]


def _cache_home() -> str | None:
    """The user's cache folder, by the XDG rule; None when no home is set or it cannot be written."""
    if os.environ.get("XDG_CACHE_HOME"):
        return os.environ["XDG_CACHE_HOME"]
    home = os.environ.get("HOME")
    if not home or not os.access(home, os.W_OK):
        return None
    return str(Path(home) / ".cache")
