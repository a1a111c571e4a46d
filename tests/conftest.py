"""Host. One strict JAX for the whole suite: CPU with eight devices, no silent promotion, a kept compilation cache."""

import gc
import hashlib
import os
import platform
from pathlib import Path

# NOTE: these are read once, when jax is first imported, so they come before any import of it.
if os.environ.get("JAXSPEC_TEST_DEVICE") != "1":  # scripts/test_device.sh: tests/device alone, on what is there
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Compiling is most of the suite's time, and takes half of it without LLVM's optimizations.
    os.environ["XLA_FLAGS"] = " ".join(
        (
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=8",
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_use_fusion_emitters=false",
        )
    ).strip()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import jax
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parent.parent


def _modules_with_shapes() -> list[str]:
    """The modules that write array shapes in their annotations."""
    files = (ROOT / "jaxspec").rglob("*.py")
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in files
        if "from jaxtyping import" in file.read_text(encoding="utf-8")
    ]


# Their annotations are checked at run time, under pytest and only there. Host modules check what users hand them
# themselves, and must be tested with the checks they ship. The numeric tower is a type checker's: an int is a float.
install_import_hook(_modules_with_shapes(), "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


def _cpu_features() -> str:
    """A digest of this CPU's instruction sets: compiled code of another CPU must not be loaded."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), platform.processor())
    return hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:12]


jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jaxspec_cache" / f"tests-{_cpu_features()}"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


MOST_MAPS = 25_000


@pytest.fixture(autouse=True, scope="module")
def _room_for_programs():
    """XLA maps every kernel of a CPU program by itself; a process that comes to Linux's 65530 maps crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        gc.collect()
        jax.clear_caches()


def pytest_addoption(parser):
    parser.addoption(
        "--heavy", action="store_true", help="also run tests marked heavy, as ./scripts/test.sh --all does"
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--heavy"):
        for item in items:
            if "heavy" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="heavy: needs --heavy"))
