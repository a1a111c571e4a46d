"""jaxspec: speculative decoding in JAX. What is listed here is promised; the rest is reachable but may change."""

from jaxspec.config.engine import EngineConfig as EngineConfig
from jaxspec.config.speculative import SpeculativeConfig as SpeculativeConfig
from jaxspec.engine.async_engine import AsyncEngine as AsyncEngine
from jaxspec.engine.engine import Engine as Engine
from jaxspec.engine.outputs import CompletionOutput as CompletionOutput
from jaxspec.engine.outputs import RequestOutput as RequestOutput
from jaxspec.errors import CapacityError as CapacityError
from jaxspec.errors import ConfigError as ConfigError
from jaxspec.errors import EngineDeadError as EngineDeadError
from jaxspec.errors import JaxspecError as JaxspecError
from jaxspec.errors import RequestError as RequestError
from jaxspec.errors import WeightsError as WeightsError
from jaxspec.proposers.base import HostProposer as HostProposer
from jaxspec.proposers.base import Proposer as Proposer
from jaxspec.sampling.params import SamplingParams as SamplingParams
from jaxspec.sampling.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"
