"""Host. A config settled for devices that are not there."""

from jaxspec.aot.describe import Described
from jaxspec.aot.topology import Topology
from jaxspec.config.engine import EngineConfig
from jaxspec.config.hardware import HardwareFacts
from jaxspec.config.model import ModelConfig
from jaxspec.config.resolve import ModelFacts, ResolvedConfig, resolve
from jaxspec.engine.heads import head_layers

# More than any machine has: what fits is reported here (`memory.py`), not refused.
BOUNDLESS = 2**60


def settle(config: EngineConfig, described: Described, topology: Topology) -> ResolvedConfig:
    """As an engine on such devices would resolve it, but for their memory: rows and lengths are as the config says, or
    as the model allows.

    Raises:
        ConfigError: what the engine would refuse, too.
    """
    drafter = described.drafter
    layers = drafter if isinstance(drafter, ModelConfig) or drafter is None else head_layers(drafter)
    facts = ModelFacts(described.target, 0, layers, 0, described.method, described.draft_tokens)
    return resolve(config, HardwareFacts(topology.chip.platform, BOUNDLESS, "", None), facts)
