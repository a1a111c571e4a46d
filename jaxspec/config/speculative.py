"""Host. What `speculative_config` may say: vLLM's keys and defaults; an unbuilt key is refused by name."""

import logging
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from jaxspec.config.base import StrictConfig
from jaxspec.config.schedule import dense_schedule
from jaxspec.config.synthetic import checked_rates, rates_of_length
from jaxspec.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_SPECULATIVE_TOKENS = 128
DEFAULT_LOOKUP = 5
MAX_LOOKUP = 128  # the matcher unrolls a step for each token of a suffix

# Spellings people bring along, and what they mean here.
METHOD_ALIASES = {"[ngram]": "ngram", "ngram_gpu": "ngram"}
METHODS_NOT_YET = (
    "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "suffix", "dflash", "dspark", "custom_class",
)  # fmt: skip
RULE_ALIASES = {"strict": "standard"}
SYNTHETIC_KEYS = ("synthetic_acceptance_rates", "synthetic_acceptance_length", "synthetic_acceptance_rate")
# Who reads a key that not all methods read; vLLM takes it from any, so here it is accepted with a note.
READ_BY = {
    "model": ("draft_model", "ngram"),  # ngram refuses it
    "prompt_lookup_min": ("ngram",),
    "prompt_lookup_max": ("ngram",),
    "prompt_lookup_match": ("ngram",),
    "draft_sample_method": ("draft_model", "custom"),
    "max_model_len": ("draft_model",),
    "draft_tensor_parallel_size": ("draft_model",),
}


class SpeculativeConfig(StrictConfig):
    """How tokens are guessed and how guesses are judged. Keys are vLLM's where vLLM has one."""

    TITLE: ClassVar[str] = "speculative_config"
    NOT_YET: ClassVar[dict[str, Any]] = {
        "quantization": None,
        "moe_backend": None,
        "attention_backend": None,
        "kv_cache_dtype": None,
        "revision": None,
        "code_revision": None,
        "enforce_eager": None,
        "draft_load_config": None,
        "index_share_for_mtp_iteration": None,
        "disable_padded_drafter_batch": False,
        "disable_eagle_block_drop": False,
        "use_local_argmax_reduction": False,
        "use_heterogeneous_vocab": False,
        "parallel_drafting": False,
        "suffix_decoding_max_tree_depth": 24,
        "suffix_decoding_max_cached_requests": 10000,
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": 0.1,
        "enable_adaptive_verification": False,
        "dspark_draft_topk": None,
    }

    method: Literal["ngram", "draft_model", "custom"] = Field(
        description="who guesses: ngram (copies from the context), draft_model (a small model), custom (a proposer "
        "handed to the engine); by default draft_model when a model is given"
    )
    model: str | None = Field(None, description="the draft model: alias, hub name, folder or .gguf file")
    num_speculative_tokens: int = Field(
        ge=1, le=MAX_SPECULATIVE_TOKENS, description="drafts a row in a round, in tokens; required"
    )
    prompt_lookup_max: int = Field(
        DEFAULT_LOOKUP,
        ge=1,
        le=MAX_LOOKUP,
        description="ngram: longest suffix looked up, in tokens; 5, or prompt_lookup_min",
    )
    prompt_lookup_min: int = Field(
        DEFAULT_LOOKUP, ge=1, description="ngram: shortest suffix looked up, in tokens; 5, or prompt_lookup_max"
    )
    prompt_lookup_match: Literal["earliest", "latest"] = Field(
        "earliest", description="ngram: which of several equally long matches to copy from; vLLM takes the earliest"
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        "greedy", description="draft_model: take the likeliest token, or draw from the draft's distribution"
    )
    num_speculative_tokens_per_batch_size: list[list[int]] | None = Field(
        None,
        description="fewer drafts a row in larger batches: [start, end, drafts] ranges of requests in a step, from 1 "
        "on, both ends included; by default num_speculative_tokens always",
    )
    rejection_sample_method: Literal["auto", "standard", "block", "coupled", "synthetic"] = Field(
        "auto",
        description="the rule that judges sampled drafts: standard; block (weighs a round's drafts together, keeps "
        "more); coupled (a seed gives one text); synthetic (keeps drafts at given rates, whatever the text: for "
        "measuring speed); auto: coupled for point-mass drafts, else standard",
    )
    synthetic_acceptance_rates: list[float] | None = Field(
        None, description="synthetic: how often the first i + 1 drafts are all kept, in [0, 1], one a draft"
    )
    synthetic_acceptance_length: float | None = Field(
        None, description="synthetic: mean tokens a round with drafts, in [1, num_speculative_tokens + 1]"
    )
    synthetic_acceptance_rate: float | None = Field(
        None, description="synthetic, vLLM's older key: the mean of the rates, in [0, 1]"
    )
    max_model_len: int | None = Field(
        None, ge=1, description="draft_model: longest context of the draft, in tokens; the smaller of draft and target"
    )
    draft_tensor_parallel_size: int | None = Field(None, ge=1, description="devices a draft model is split over; 1")

    @classmethod
    def normalize(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "tensor_parallel_size" in data:
            raise ConfigError(
                "speculative_config key 'tensor_parallel_size' is the target's; use 'draft_tensor_parallel_size'"
            )
        data["method"] = _method(data.get("method"), data.get("model"))
        if data["method"] == "ngram" and data.get("model") in ("ngram", "[ngram]"):
            data["model"] = None  # vLLM's other way to say the same
        rule = data.get("rejection_sample_method")
        if rule == "probabilistic":
            raise ConfigError(
                "rejection_sample_method 'probabilistic' says in older vLLM how drafts are drawn; "
                "use draft_sample_method 'probabilistic', and 'standard' or 'block' here"
            )
        if isinstance(rule, str):
            data["rejection_sample_method"] = RULE_ALIASES.get(rule, rule)
        if "num_speculative_tokens" not in data:
            raise ConfigError("speculative_config needs 'num_speculative_tokens', the drafts a row; 4 is a good start")
        schedule = data.get("num_speculative_tokens_per_batch_size")
        if schedule is not None:
            dense_schedule(schedule, max_batch=0, max_tokens=0)
            data["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
        if isinstance(data.get("synthetic_acceptance_rates"), tuple):
            data["synthetic_acceptance_rates"] = list(data["synthetic_acceptance_rates"])
        for key, methods in READ_BY.items():
            if data.get(key) is not None and data["method"] not in methods:
                logger.warning("speculative_config key %r says nothing to method %r", key, data["method"])
        return _fill_lookup(data)

    @model_validator(mode="after")
    def _fits_together(self) -> "SpeculativeConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} must not exceed "
                f"prompt_lookup_max={self.prompt_lookup_max}; lower the one or raise the other"
            )
        if self.method == "draft_model" and self.model is None:
            raise ConfigError("method 'draft_model' needs 'model', the draft's alias, hub name, folder or .gguf file")
        if self.method == "ngram" and self.model is not None:
            raise ConfigError(f"method 'ngram' loads no model, got model={self.model!r}; drop one of the two")
        if self.draft_tensor_parallel_size not in (None, 1):
            raise ConfigError(
                f"draft_tensor_parallel_size={self.draft_tensor_parallel_size} is not supported yet; leave it out"
            )
        _ = self.synthetic_rates
        return self

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """How often the first i + 1 drafts are all kept, one a draft; None under the rules that look at the logits.

        Raises: ConfigError for keys that do not give them.
        """
        given = [key for key in SYNTHETIC_KEYS if getattr(self, key) is not None]
        if self.rejection_sample_method != "synthetic":
            if given:
                raise ConfigError(
                    f"{given[0]} needs rejection_sample_method 'synthetic', got {self.rejection_sample_method!r}; "
                    "drop one of the two"
                )
            return None
        if len(given) != 1:
            raise ConfigError(
                "rejection_sample_method 'synthetic' needs exactly one of synthetic_acceptance_rates and "
                f"synthetic_acceptance_length, got {given or 'neither'}"
            )
        num_tokens = self.num_speculative_tokens
        if self.synthetic_acceptance_rates is not None:
            return checked_rates(self.synthetic_acceptance_rates, num_tokens)
        if self.synthetic_acceptance_length is not None:
            return rates_of_length(self.synthetic_acceptance_length, num_tokens)
        rate = self.synthetic_acceptance_rate
        if rate is None or not 0 <= rate <= 1:
            raise ConfigError(f"synthetic_acceptance_rate must be in [0, 1], got {rate!r}; correct it")
        return rates_of_length(1 + rate * num_tokens, num_tokens)

    @property
    def drafts_are_point_mass(self) -> bool:
        """Whether a draft is the only token its proposer would have given: q(draft) = 1."""
        return self.draft_sample_method == "greedy" or self.method == "ngram"


def _method(method: Any, model: Any) -> str:
    """The method asked for, or the one the other keys imply. Names of models and folders never matter."""
    if method is None:
        if model is None:
            raise ConfigError("speculative_config needs 'method' ('ngram', 'draft_model') or 'model', a draft model")
        return "ngram" if model in ("ngram", "[ngram]") else "draft_model"
    if not isinstance(method, str):
        return method  # the field's own check refuses it
    if method in METHODS_NOT_YET or method.endswith("_mtp"):
        raise ConfigError(f"speculative method {method!r} is not supported yet; use 'ngram' or 'draft_model'")
    if method in METHOD_ALIASES:
        logger.info("speculative method %r means %r here", method, METHOD_ALIASES[method])
        return METHOD_ALIASES[method]
    return method


def _fill_lookup(data: dict[str, Any]) -> dict[str, Any]:
    """vLLM's rule: with one bound given the other equals it, with none both are 5. None means not given."""
    given = {key: data[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if data.get(key) is not None}
    for key in ("prompt_lookup_min", "prompt_lookup_max"):
        data[key] = given.get(key, next(iter(given.values()), DEFAULT_LOOKUP))
    return data
