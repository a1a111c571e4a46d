"""Host. What `/v1/speculation` says: how tokens are guessed here, and how many guesses were kept since the start."""

from typing import Any

from jaxspec.config.resolve import ResolvedConfig
from jaxspec.metrics.acceptance import AcceptanceStats


def speculation_report(config: ResolvedConfig, stats: AcceptanceStats) -> dict[str, Any]:
    """enabled; config: as it was settled, None for plain decoding; acceptance: of all requests together.

    drafts_are_drawn: whether a draft is drawn from a distribution; otherwise the drafter gives it probability 1.
    """
    speculative = config.speculative_config
    acceptance = stats.as_dict()
    acceptance["acceptance_per_position"] = stats.acceptance_per_position
    return {
        "enabled": speculative is not None,
        "model": config.served_model_name,
        "config": None if speculative is None else speculative.model_dump(mode="json"),
        "drafts_are_drawn": speculative is not None and speculative.draft_sample_method == "probabilistic",
        "acceptance": acceptance,
    }
