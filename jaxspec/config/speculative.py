"""Host. What `speculative_config` may say: vLLM's keys, defaults and rules, and a few of jaxspec's own."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jaxspec.config.base import StrictConfig
from jaxspec.config.methods import METHODS, PARALLEL, drafter_of, initial_method
from jaxspec.config.schedule import dense_schedule
from jaxspec.config.shipped import told_shipped
from jaxspec.config.speculative_keys import KEYS, apply_keys
from jaxspec.config.support import check_built, check_support
from jaxspec.config.synthetic import checked_rates, rates_of_length
from jaxspec.errors import ConfigError

MAX_SPECULATIVE_TOKENS = 128
DEFAULT_LOOKUP = 5
MAX_LOOKUP = 128  # the matcher unrolls a step for each token of a suffix

RULE_ALIASES = {"strict": "standard"}
SYNTHETIC_KEYS = ("synthetic_acceptance_rates", "synthetic_acceptance_length", "synthetic_acceptance_rate")
# Key -> the feature of SUPPORT that a value other than the key's neutral one asks for.
FEATURE_KEYS = {
    "use_heterogeneous_vocab": "heterogeneous_vocab",
    "parallel_drafting": "parallel_drafting",
    "enable_adaptive_verification": "adaptive_verification",
    "dspark_draft_topk": "draft_topk",
    "index_share_for_mtp_iteration": "index_share",
}


class SpeculativeConfig(StrictConfig):
    """How tokens are guessed and how guesses are judged. Keys are vLLM's where vLLM has one."""

    TITLE: ClassVar[str] = "speculative_config"

    method: str | None = Field(
        None,
        description=f"who guesses: {', '.join(METHODS)}; by default what the files of `model` say, whatever its name",
    )
    model: str | None = Field(
        None, description="the draft: alias, hub name, folder or .gguf file; custom: package.module.name"
    )
    num_speculative_tokens: Annotated[int, Field(gt=0, le=MAX_SPECULATIVE_TOKENS)] | Literal["auto"] | None = Field(
        None,
        description="drafts a row in a round, in tokens; auto: as many as pay in each round, 0 included; by default "
        "what the draft's files say, suffix: the tree's depth",
    )
    parallel_drafting: bool = Field(
        False, description="eagle3, draft_model: the head or model is of the kind that drafts in one pass"
    )
    mask_token_id: int | None = Field(
        None,
        ge=0,
        description="drafters that fill masks in one pass: the mask token, where the draft's config is wrong or "
        "silent; the config's",
    )
    use_heterogeneous_vocab: bool = Field(
        False, description="draft_model: the draft has another vocabulary; only tokens that both have are drafted"
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
    eagle_aux_hidden_state_layer_ids: list[int] | None = Field(
        None,
        description="eagle3, dflash: which of the target's residual streams the head reads (stream i enters layer i), "
        "where its own config is wrong or silent; the config's, or the default of its kind",
    )
    exit_layer: int | None = Field(
        None, ge=1, description="self: how many of the target's layers draft, the first ones; about a third of them"
    )
    suffix_decoding_max_tree_depth: int = Field(
        24, description="suffix: longest suffix looked up, in tokens, 1 or more"
    )
    suffix_decoding_max_cached_requests: int = Field(
        10000, description="suffix: answers remembered over requests, the oldest leave first; 0 remembers none"
    )
    suffix_decoding_max_spec_factor: float = Field(
        1.0, description="suffix: most drafts for each token of the suffix that was found, 0 or more"
    )
    suffix_decoding_min_token_prob: float = Field(
        0.1, description="suffix: a draft is given only if it is kept at least this often by the counts, in [0, 1]"
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = Field(
        "greedy", description="drafting models: take the likeliest token, or draw from the draft's distribution"
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
        None, ge=1, description="longest context of a draft model, in tokens; the smaller of draft and target"
    )
    draft_tensor_parallel_size: int | None = Field(
        None, ge=1, description="devices a draft is split over: 1 or as many as the target; the target's"
    )

    @classmethod
    def normalize(cls, data: dict[str, Any]) -> dict[str, Any]:
        if "tensor_parallel_size" in data:
            raise ConfigError(
                "speculative_config key 'tensor_parallel_size' is the target's; use 'draft_tensor_parallel_size'"
            )
        if not isinstance(data.get("method"), str | None):
            return data  # the field's own check refuses it
        model = data.get("model")
        if data.get("method") is None and model is None:
            raise ConfigError(f"speculative_config needs 'method' ({', '.join(METHODS)}) or 'model', a draft's files")
        method = initial_method(data.get("method"), model)
        if data.get("method") == "custom_class" and model is None:
            raise ConfigError("method 'custom_class' needs 'model', a dotted path to a proposer")
        if method == "ngram" and model in ("ngram", "[ngram]"):
            data["model"] = None  # vLLM's other way to say the same
        is_told = data.get("method") is None and method == "draft_model"  # by the draft's files, later
        if not is_told:
            asked = {key for key in FEATURE_KEYS if data.get(key) not in (None, False)}
            check_support(method, [FEATURE_KEYS[key] for key in FEATURE_KEYS if key in asked])
            if data.get("parallel_drafting") is True:
                method = PARALLEL.get(method, method)
        data = apply_keys(data, None if is_told else method)
        data["method"] = None if is_told else method
        if not is_told and method in PARALLEL.values():
            data["parallel_drafting"] = True
        rule = data.get("rejection_sample_method")
        if rule == "probabilistic":
            raise ConfigError(
                "rejection_sample_method 'probabilistic' says in older vLLM how drafts are drawn; "
                "use draft_sample_method 'probabilistic', and 'standard' or 'block' here"
            )
        if isinstance(rule, str):
            data["rejection_sample_method"] = RULE_ALIASES.get(rule, rule)
        schedule = data.get("num_speculative_tokens_per_batch_size")
        if schedule is not None:
            dense_schedule(schedule, max_batch=0, max_tokens=0)
            data["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
        if isinstance(data.get("synthetic_acceptance_rates"), tuple):
            data["synthetic_acceptance_rates"] = list(data["synthetic_acceptance_rates"])
        # None of any key is its default.
        return _fill_lookup({key: value for key, value in data.items() if value is not None or key not in KEYS})

    @model_validator(mode="after")
    def _fits_together(self) -> "SpeculativeConfig":
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} must be <= prompt_lookup_max={self.prompt_lookup_max}; "
                "lower the one or raise the other"
            )
        self._check_suffix()
        if self.method is not None and drafter_of(self.method) in ("ngram", "self") and self.model is not None:
            raise ConfigError(f"method {self.method!r} loads no model, got model={self.model!r}; drop one of the two")
        if isinstance(self.num_speculative_tokens, int):
            _ = self.synthetic_rates(self.num_speculative_tokens)
        if self.method is None:
            return self
        if METHODS[self.method].num_tokens == "needed" and self.num_speculative_tokens is None:
            raise ConfigError("num_speculative_tokens must be provided, the drafts a row in a round; 4 is a good start")
        check_built(self.method)
        if METHODS[self.method].needs in ("model", "head") and self.model is None:
            raise ConfigError(
                f"method {self.method!r} needs 'model', the draft's alias, hub name, folder or .gguf file; with the "
                f"package comes {told_shipped()}, which an engine finds where speculative_config is a dict or JSON"
            )
        return self

    def _check_suffix(self) -> None:
        for name, least, most in (
            ("max_tree_depth", 1, None),
            ("max_cached_requests", 0, None),
            ("max_spec_factor", 0, None),
            ("min_token_prob", 0, 1),
        ):
            value = getattr(self, f"suffix_decoding_{name}")
            if not (least <= value and (most is None or value <= most)) or value == float("inf"):
                rule = f"must be in [{least}, {most}]" if most is not None else f"must be >= {least}"
                raise ConfigError(f"suffix_decoding_{name}={value} {rule}; correct it")

    def synthetic_rates(self, num_tokens: int) -> tuple[float, ...] | None:
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
        if self.synthetic_acceptance_rates is not None:
            return checked_rates(self.synthetic_acceptance_rates, num_tokens)
        if self.synthetic_acceptance_length is not None:
            return rates_of_length(self.synthetic_acceptance_length, num_tokens)
        rate = self.synthetic_acceptance_rate
        if rate is None or not 0 <= rate <= 1:
            raise ConfigError(f"synthetic_acceptance_rate must be in [0, 1], got {rate!r}; correct it")
        return rates_of_length(1 + rate * num_tokens, num_tokens)


def _fill_lookup(data: dict[str, Any]) -> dict[str, Any]:
    """vLLM's rule: with one bound given the other equals it, with none both are 5."""
    given = {key: data[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in data}
    for key in ("prompt_lookup_min", "prompt_lookup_max"):
        data[key] = given.get(key, next(iter(given.values()), DEFAULT_LOOKUP))
    return data
