"""Host. The one table of which method works with which feature, and where it does not, why; checks and docs read it."""

from collections.abc import Collection, Mapping

from jaxspec.config.methods import METHODS, PARALLEL, drafter_of
from jaxspec.errors import ConfigError

# feature -> the setting that asks for it
FEATURES = {
    "heterogeneous_vocab": "use_heterogeneous_vocab",
    "parallel_drafting": "parallel_drafting",
    "adaptive_verification": "enable_adaptive_verification",
    "draft_topk": "dspark_draft_topk",
    "index_share": "index_share_for_mtp_iteration",
    "draft_tensor_parallel": "draft_tensor_parallel_size",
    "batch_size_schedule": "num_speculative_tokens_per_batch_size",
    "adaptive_tokens": "num_speculative_tokens: auto",
    "block": "rejection_sample_method: block",
    "coupled": "rejection_sample_method: coupled",
    "synthetic": "rejection_sample_method: synthetic",
    "exact": "exact",
    "several_rounds": "rounds_per_batch",
    "pipeline_parallel": "pipeline_parallel_size",
    "expert_load_balancing": "enable_eplb",
}
_ONLY_FOR = {
    "heterogeneous_vocab": ("draft_model",),
    "parallel_drafting": tuple(name for name in PARALLEL if drafter_of(name) == name),
    "adaptive_verification": ("dspark",),
    "draft_topk": ("dspark",),
    "index_share": ("mtp",),
    "draft_tensor_parallel": tuple(
        name for name, method in METHODS.items() if method.needs in ("model", "head") and drafter_of(name) == name
    ),
}


def _refusal(method: str, feature: str) -> str | None:
    method = drafter_of(method)  # looking up first is refused with nothing
    if method == "model":
        method = "draft_model"  # what it may be before its files are looked at; later they have told
    if feature == "pipeline_parallel":
        return "a target split into stages cannot be verified and drafted for in one program"
    if feature == "several_rounds" and METHODS[method].is_on_host:
        return "it guesses on the host, between rounds"
    if (method, feature) == ("medusa", "expert_load_balancing"):
        return "experts may not move under it, as in vLLM, whose Medusa asserts so"
    methods = _ONLY_FOR.get(feature, METHODS)
    if method not in methods:
        named = " or ".join(f"method={name!r}" for name in methods)
        return f"{FEATURES[feature]} only works with {named}"
    return None


# method -> feature -> why it is refused, or None where it works once the method is built
SUPPORT: Mapping[str, Mapping[str, str | None]] = {
    method: {feature: _refusal(method, feature) for feature in FEATURES} for method in METHODS
}


def check_support(method: str, features: Collection[str]) -> None:
    """Raises: ConfigError for the first of the features that this method is refused with."""
    for feature in features:
        reason = SUPPORT[method][feature]
        if reason is not None:
            raise ConfigError(f"method {method!r} is refused with {FEATURES[feature]}: {reason}; drop one of the two")


def check_built(method: str) -> None:
    """Raises: ConfigError for a method that is known and not built yet."""
    if not METHODS[method].is_built:
        built = ", ".join(name for name, one in METHODS.items() if one.is_built)
        raise ConfigError(f"speculative method {method!r} is not supported yet; there are {built}")
