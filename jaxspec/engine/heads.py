"""Host. Draft heads for an engine: which method is one, what it costs, and the proposer it makes."""

import math

import jax
import numpy as np

from jaxspec.cache.pages import pool_shape
from jaxspec.config.heads import DflashConfig, EagleConfig, HeadConfig, MedusaConfig, MlpSpeculatorConfig, MtpConfig
from jaxspec.config.model import ModelConfig
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.errors import ConfigError
from jaxspec.models.base import Family
from jaxspec.models.heads import eagle as eagle_head
from jaxspec.models.heads import mtp as mtp_head
from jaxspec.models.heads.load import specs_of
from jaxspec.proposers.base import Proposer
from jaxspec.proposers.dflash import dflash
from jaxspec.proposers.eagle import eagle
from jaxspec.proposers.medusa import medusa
from jaxspec.proposers.mlp_speculator import mlp_speculator
from jaxspec.proposers.mtp_modules import mtp_modules
from jaxspec.types import ArraySpec

METHODS_WITH_HEADS = ("eagle", "eagle3", "p_eagle", "mtp", "medusa", "mlp_speculator", "dflash", "dspark")


def num_head_parameters(config: HeadConfig) -> int:
    """Parameters in the head's files."""
    leaves = jax.tree.leaves(specs_of(config, np.float32), is_leaf=lambda leaf: isinstance(leaf, ArraySpec))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def head_layers(config: HeadConfig) -> ModelConfig | None:
    """The head's layers as a model, whose pages and length an engine plans for; None where it has no cache."""
    return None if isinstance(config, MedusaConfig | MlpSpeculatorConfig) else config.model


def _check_num_tokens(config: HeadConfig, num_speculative_tokens: int, method: str) -> None:
    """Raises: ConfigError where the head cannot make so many drafts a row."""
    most = config.num_steps if isinstance(config, MlpSpeculatorConfig) else None
    most = config.num_heads if isinstance(config, MedusaConfig) else most
    if most is not None and num_speculative_tokens > most:
        raise ConfigError(
            f"{num_speculative_tokens=} must not exceed the {most} that this {method} checkpoint was trained for; "
            "lower it"
        )
    modules = config.num_modules if isinstance(config, MtpConfig) else 1
    if num_speculative_tokens > modules and num_speculative_tokens % modules:
        raise ConfigError(
            f"{num_speculative_tokens=} must be divisible by the {modules} MTP modules that the files hold; "
            f"give a multiple, or less than {modules}"
        )


def head_proposer(
    config: HeadConfig,
    resolved: ResolvedConfig,
    family: Family,
    target: ModelConfig,
    *,
    cache_heads: int | None = None,
) -> Proposer:
    """The head as a `Proposer` for this target. cache_heads: as `pool_shape` takes num_heads.

    Raises: ConfigError where it cannot make as many drafts as are asked for.
    """
    speculative = resolved.speculative_config
    assert speculative is not None
    num_tokens = speculative.num_speculative_tokens
    _check_num_tokens(config, num_tokens, speculative.method)

    def target_logits(weights, hidden_BTD: jax.Array) -> jax.Array:
        return family.logits(weights, target, hidden_BTD)

    common = {
        "num_tokens": num_tokens,
        "max_model_len": speculative.max_model_len,
        "sample_method": speculative.draft_sample_method,
    }
    vocabulary = {"target_logits": target_logits, "vocab_size": target.vocab_size}
    if isinstance(config, MedusaConfig):
        return medusa(config, **vocabulary, **common)
    if isinstance(config, MlpSpeculatorConfig):
        return mlp_speculator(config, **common)
    pool = {
        "hidden_size": target.hidden_size,
        "pool_shape": pool_shape(config.model, resolved.num_pages, resolved.block_size, num_heads=cache_heads),
        "pool_dtype": resolved.page_dtype,
    }
    if isinstance(config, DflashConfig):
        return dflash(config, **vocabulary, **common, **pool)
    assert isinstance(config, EagleConfig | MtpConfig)
    if isinstance(config, MtpConfig) and config.num_modules > 1:
        return mtp_modules(config, **vocabulary, **common, **pool)
    head = mtp_head.HEAD if isinstance(config, MtpConfig) else eagle_head.HEAD
    return eagle(head, config, **vocabulary, **common, **pool)
