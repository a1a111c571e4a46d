"""Host. What the programs of a round know of the target beyond arrays; static in every one of them."""

from typing import NamedTuple

from jaxspec.config.engine import LogprobsMode
from jaxspec.config.model import ModelConfig
from jaxspec.models.base import Family
from jaxspec.pallas_kernels.rejection.api import Implementation
from jaxspec.rejection.verify import Rule
from jaxspec.sampling.processors import LogitsProcessor


class Target(NamedTuple):
    """The model that verifies, and how its logits are judged."""

    family: Family
    config: ModelConfig
    rule: Rule
    implementation: Implementation
    platform: str  # the mesh's: "cpu", "gpu" or "tpu"
    exact: bool = False  # rounds without drafts run the J-position forward too, so that all have one row shape
    synthetic_rates: tuple[float, ...] = ()  # of the rule "synthetic": one a draft
    max_logprobs: int = 20  # likeliest tokens kept of a position where log-probabilities are asked for
    logprobs_mode: LogprobsMode = "raw_logprobs"
    processors: tuple[LogitsProcessor, ...] = ()
