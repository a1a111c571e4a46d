"""Host. Names of topologies mean what they say, and wrong ones say what would be right."""

import importlib.util

import pytest

from jaxspec.aot.topology import CHIPS, description, missing, topology_of
from jaxspec.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "chip", "devices", "per_host"),
    [
        ("v5e:2x4", "v5e", 8, 8),
        ("v6e:2x4", "v6e", 8, 8),
        ("v6e:1", "v6e", 1, 1),
        ("v5p:2x2x2", "v5p", 8, 8),
        ("v5p:4x4x4", "v5p", 64, 64),
        ("tpu7x:2x2x1", "tpu7x", 8, 8),  # two devices a chip
        ("h100:8", "h100", 8, 8),
        ("H100", "h100", 1, 1),
        ("h200:2x8", "h200", 16, 8),
        ("b200:8", "b200", 8, 8),
    ],
)
def test_a_name_is_a_chip_and_how_many(name, chip, devices, per_host):
    topology = topology_of(name)
    assert (topology.chip.name, topology.num_devices, topology.devices_per_host) == (chip, devices, per_host)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v5:2x4", "no chip 'v5'; did you mean v5"),
        ("trillium", "known: v5e, v6e, v5p"),
        ("v5e:8x", "'8x' is no shape; say v5e:2x2"),
        ("v5e:2x2x2", "a shape of v5e has 2 sizes of 1 or more; say v5e:2x2"),
        ("v5p:2x4", "a shape of v5p has 3 sizes"),
        ("h100:2x2x2", "say h100:8 or h100:2x8"),
        ("h100:0", "1 or more"),
    ],
)
def test_a_wrong_name_says_what_is_right(name, says):
    with pytest.raises(ConfigError) as caught:
        topology_of(name)
    assert says in str(caught.value)


def test_devices_of_different_hosts_share_the_network():
    topology = topology_of("h200:2x8")
    assert topology.bandwidth_between(8) == 450e9
    assert topology.bandwidth_between(16) == 50e9
    assert topology_of("v5p:4x4x4").bandwidth_between(64) == 600e9  # one slice: links everywhere


def test_figures_are_the_makers():
    """A few that everyone knows, so that no unit slips: GB, GB/s, TFLOP/s."""
    figures = {
        name: (round(chip.memory_bytes / 1e9), round(chip.memory_bandwidth / 1e9), round(chip.bf16_flops / 1e12))
        for name, chip in CHIPS.items()
    }
    assert figures["v5e"] == (17, 819, 197)
    assert figures["v5p"] == (102, 2765, 459)
    assert figures["h100"] == (85, 3352, 989)
    assert figures["h200"] == (151, 4800, 989)
    # A chip of TPU7x is two devices.
    assert (figures["tpu7x"][0], CHIPS["tpu7x"].devices_per_chip) == (103, 2)


@pytest.mark.parametrize("name", [name for name, chip in CHIPS.items() if chip.platform == "gpu"])
def test_a_gpu_is_described_to_xla(name):
    text = description(CHIPS[name])
    assert f"device_memory_size: {CHIPS[name].memory_bytes} " in text
    assert f"major: {CHIPS[name].major} " in text
    assert "{{" not in text  # or XLA would not parse it


@pytest.mark.parametrize(("name", "extra"), [("v5e", "aot-tpu"), ("h100", "aot-gpu")])
def test_what_is_missing_is_said_with_what_to_install(monkeypatch, name, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert f"jaxspec[{extra}]" in missing(CHIPS[name])
