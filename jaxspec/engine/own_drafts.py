"""Host. An engine's proposers that need no files of their own: the context's lookup, and the target's first layers."""

from typing import Any

from jaxspec.config.methods import looks_up
from jaxspec.config.model import ModelConfig
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.errors import ConfigError
from jaxspec.models.base import Family
from jaxspec.proposers.base import HostProposer, Proposer
from jaxspec.proposers.lookup_first import lookup_first
from jaxspec.proposers.ngram import ngram
from jaxspec.proposers.self_draft import self_draft


def _lookup(resolved: ResolvedConfig) -> dict[str, Any]:
    speculative = resolved.speculative_config
    assert speculative is not None
    return {
        "min_n": speculative.prompt_lookup_min,
        "max_n": speculative.prompt_lookup_max,
        "match_rule": speculative.prompt_lookup_match,
        "max_model_len": resolved.max_model_len,
    }


def ngram_proposer(resolved: ResolvedConfig) -> Proposer:
    """Prompt lookup alone."""
    return ngram(num_tokens=resolved.num_speculative_tokens, **_lookup(resolved))


def with_lookup(resolved: ResolvedConfig, proposer: Proposer, host_proposer: HostProposer | None) -> Proposer:
    """The device's proposer, behind prompt lookup where the method says so.

    Raises: ConfigError where drafts would come from the host.
    """
    speculative = resolved.speculative_config
    if speculative is None or speculative.method == "ngram" or not looks_up(speculative.method):
        return proposer
    if host_proposer is not None:
        raise ConfigError(
            f"method {speculative.method!r} needs a proposer that drafts on the device, behind the lookup there, got "
            f"{type(host_proposer).__name__} for the host; say method 'custom', or give a Proposer"
        )
    return lookup_first(proposer, **_lookup(resolved))


def self_proposer(resolved: ResolvedConfig, family: Family, target: ModelConfig) -> Proposer:
    """The target's first layers as a `Proposer`."""
    speculative = resolved.speculative_config
    assert speculative is not None
    assert speculative.exit_layer is not None
    return self_draft(
        family,
        target,
        exit_layer=speculative.exit_layer,
        num_tokens=speculative.num_speculative_tokens,
        max_model_len=speculative.max_model_len,
        sample_method=speculative.draft_sample_method,
        block_size=resolved.block_size,
    )
