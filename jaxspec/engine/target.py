"""Host. What the config makes of a target: how its logits are judged, and the state that its rounds go on from."""

from jaxspec.cache.pages import new_pool, pool_shape
from jaxspec.config.model import ModelConfig
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.models.base import Family, at_highest_precision
from jaxspec.proposers.base import Proposer
from jaxspec.sampling.processors import LogitsProcessor
from jaxspec.step.state import DecodeState, initial_state
from jaxspec.step.target import Target


def make_target(
    resolved: ResolvedConfig,
    family: Family,
    model: ModelConfig,
    platform: str,
    processors: tuple[LogitsProcessor, ...] = (),
) -> Target:
    """The model that verifies.

    Args:
        platform: of the devices that programs are for.
        processors: compiled into every round.
    """
    drafting = resolved.speculative_config
    return Target(
        at_highest_precision(family) if resolved.exact else family,
        model,
        # Without speculation as under "coupled": a seed then gives one text, whoever drafts.
        drafting.rejection_sample_method if drafting is not None else "coupled",
        resolved.implementation,
        platform,
        exact=resolved.exact,
        synthetic_rates=drafting.synthetic_rates or () if drafting is not None else (),
        max_logprobs=resolved.max_logprobs,
        logprobs_mode=resolved.logprobs_mode,
        processors=processors,
    )


def empty_state(
    resolved: ResolvedConfig, target: Target, proposer: Proposer, *, cache_heads: int | None = None
) -> DecodeState:
    """The state of an engine that nobody has asked anything. cache_heads: entries a token in a layer, the model's own
    unless it is filled up over devices."""
    shape = pool_shape(target.config, resolved.num_pages, resolved.block_size, num_heads=cache_heads)
    return initial_state(
        max_rows=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        vocab_size=target.config.vocab_size,
        pool=new_pool(shape, resolved.page_dtype),
        proposer_state=proposer.init(resolved.max_num_seqs + 1),
        processors=target.processors,
    )
