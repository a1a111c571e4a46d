"""Host. One pure function that settles every "auto" of a config for one machine and one model, and logs each choice."""

import logging
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from jaxspec.config.detect import (
    DraftTokens,
    settle_draft_max_model_len,
    settle_draft_tensor_parallel,
    settle_num_tokens,
)
from jaxspec.config.engine import EngineConfig, LogprobsMode
from jaxspec.config.hardware import HardwareFacts
from jaxspec.config.methods import METHODS, PARALLEL, drafter_of
from jaxspec.config.model import ModelConfig
from jaxspec.config.schedule import dense_schedule
from jaxspec.config.speculative import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from jaxspec.config.speculative_keys import KEYS
from jaxspec.config.support import check_built, check_support
from jaxspec.errors import CapacityError, ConfigError

logger = logging.getLogger(__name__)

AUTO_TOKENS = 8  # drafts a row at most under `num_speculative_tokens: auto`, where the draft's files say nothing
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# Arrays of float32 logits that a round holds at once: the jnp form of rejection makes copies (docs/log.md has them).
LOGITS_AT_ONCE = {"reference": 3, "pallas": 1}
Dtype = Literal["float32", "bfloat16"]
PageDtype = Literal["float32", "bfloat16", "int8"]
Rule = Literal["standard", "block", "coupled", "synthetic"]


@dataclass(frozen=True)
class ModelFacts:
    """The models a config is settled for: their descriptions, and how many parameters each has.

    method: what the draft's files say they are for, where the config does not say; draft_tokens: how many drafts a row
    they speak of. Of the target's parameters, int8_parameters are those that `quantization: int8` keeps as integers,
    and int8_scales how many scales come with them.
    """

    target: ModelConfig
    num_parameters: int
    draft: ModelConfig | None = None
    num_draft_parameters: int = 0
    method: str | None = None
    draft_tokens: DraftTokens | None = None
    int8_parameters: int = 0
    int8_scales: int = 0


class ResolvedSpeculative(BaseModel):
    """A `SpeculativeConfig` with nothing left open; fields mean what they mean there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    model: str | None
    num_speculative_tokens: int  # the most
    is_adaptive: bool  # as many as pay in each round
    parallel_drafting: bool
    use_heterogeneous_vocab: bool
    prompt_lookup_min: int
    prompt_lookup_max: int
    prompt_lookup_match: Literal["earliest", "latest"]
    exit_layer: int | None  # None: the target's layers do not draft
    suffix_decoding_max_tree_depth: int
    suffix_decoding_max_cached_requests: int
    suffix_decoding_max_spec_factor: float
    suffix_decoding_min_token_prob: float
    draft_sample_method: Literal["greedy", "probabilistic"]
    rejection_sample_method: Rule
    synthetic_rates: tuple[float, ...] | None  # how often the first i + 1 drafts are all kept; None: by their logits
    num_speculative_tokens_per_batch_size: tuple[int, ...] | None  # by requests in a step, 0..max_num_seqs
    max_model_len: int
    draft_tensor_parallel_size: int


class ResolvedConfig(BaseModel):
    """An `EngineConfig` with nothing left open; fields mean what they mean there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    platform: str
    model: str
    tokenizer: str
    served_model_name: str
    dtype: Dtype
    quantization: Literal["int8"] | None = None
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_queued_requests: int | None = None
    block_size: int
    kv_cache_dtype: PageDtype
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    num_pages: int
    seed: int
    speculative_config: ResolvedSpeculative | None
    rounds_per_batch: int
    async_scheduling: bool
    exact: bool
    max_logprobs: int
    logprobs_mode: LogprobsMode
    enable_structured_outputs: bool
    compilation_cache_dir: str | None
    implementation: Literal["reference", "pallas"]

    @property
    def pages_per_row(self) -> int:
        """Pages that the longest possible request fills."""
        return -(-self.max_model_len // self.block_size)

    @property
    def page_dtype(self) -> str:
        """What arrays of pages have. XLA's CPU backend would convert a whole bfloat16 cache to write into it: there
        integers hold the same bits."""
        return "uint16" if self.platform == "cpu" and self.kv_cache_dtype == "bfloat16" else self.kv_cache_dtype

    @property
    def num_speculative_tokens(self) -> int:
        """Drafts a row in a round; 0 without speculation."""
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0


def resolve(config: EngineConfig, hardware: HardwareFacts, models: ModelFacts) -> ResolvedConfig:
    """Settle `config` for this machine and these models.

    Raises: ConfigError for a value that contradicts the model, CapacityError when not one request fits in memory.
    """
    on_cpu = hardware.platform == "cpu"
    dtype: Dtype = config.dtype if config.dtype != "auto" else _dtype(models.target)
    max_num_seqs = config.max_num_seqs or _chose("max_num_seqs", 8 if on_cpu else 64, hardware.platform)
    block_size = config.block_size or _chose("block_size", 64 if on_cpu else 16, hardware.platform)
    kv_cache_dtype: PageDtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    implementation = (
        _chose("implementation", _implementation(hardware.platform), hardware.platform)
        if config.implementation == "auto"
        else config.implementation
    )
    num_draft_devices = _draft_devices(config, models)
    num_tokens = _num_tokens(config, models)
    # Devices made of one host share its memory, which then holds what all of them have.
    devices = (1, 1) if on_cpu else (config.tensor_parallel_size, num_draft_devices)
    copies = config.data_parallel_size if on_cpu else 1
    page_bytes = copies * block_size * _token_bytes(models, kv_cache_dtype, devices)
    logits_bytes = _logits_bytes(config, models.target.vocab_size, max_num_seqs, num_tokens, implementation)
    logits_bytes = -(-copies * logits_bytes // devices[0])
    weight_bytes = copies * _weight_bytes(models, ITEM_BYTES[dtype], config.quantization, devices)
    most_pages = _pages_in_memory(config, hardware, weight_bytes, page_bytes, logits_bytes)
    max_model_len = _max_model_len(config, models.target, most_pages, block_size)
    speculative = _speculative(config, models, max_model_len, max_num_seqs, num_tokens, num_draft_devices)
    is_on_host = speculative is not None and METHODS[speculative.method].is_on_host
    return ResolvedConfig(
        platform=hardware.platform,
        model=config.model,
        tokenizer=config.tokenizer or config.model,
        served_model_name=config.served_model_name or config.model,
        dtype=dtype,
        quantization=config.quantization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_max_num_batched_tokens(config, hardware, max_model_len),
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        max_queued_requests=config.max_queued_requests,
        block_size=block_size,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        data_parallel_size=config.data_parallel_size,
        enable_expert_parallel=config.enable_expert_parallel,
        num_pages=_num_pages(config, max_num_seqs * -(-max_model_len // block_size), most_pages),
        seed=config.seed,
        speculative_config=speculative,
        rounds_per_batch=(
            _chose("rounds_per_batch", 1 if on_cpu or is_on_host else 8, hardware.platform)
            if config.rounds_per_batch == "auto"
            else config.rounds_per_batch
        ),
        async_scheduling=(
            _chose("async_scheduling", not on_cpu, hardware.platform)
            if config.async_scheduling is None
            else config.async_scheduling
        ),
        exact=config.exact,
        max_logprobs=(
            models.target.vocab_size
            if config.max_logprobs == -1
            else min(config.max_logprobs, models.target.vocab_size)
        ),
        logprobs_mode=config.logprobs_mode,
        enable_structured_outputs=config.enable_structured_outputs,
        compilation_cache_dir=_compilation_cache_dir(config, hardware),
        implementation=implementation,
    )


def _implementation(platform: str) -> Literal["reference", "pallas"]:
    """Kernels where there are some: TPU and CUDA GPUs (which JAX calls "gpu")."""
    return "pallas" if platform in ("tpu", "gpu", "cuda") else "reference"


def _draft_devices(config: EngineConfig, models: ModelFacts) -> int:
    given = config.speculative_config
    if given is None:
        return 1
    drafter = drafter_of(_method(given, models))
    return settle_draft_tensor_parallel(given.draft_tensor_parallel_size, config.tensor_parallel_size, drafter)


def _token_bytes(models: ModelFacts, dtype: PageDtype, devices: tuple[int, int] = (1, 1)) -> int:
    """Bytes of one token's cache entries over all layers on a device; target's and draft's are split over so many. A
    draft's pool has as many pages as the target's."""

    def entry_bytes(size: int) -> int:
        return size + ITEM_BYTES["float32"] if dtype == "int8" else size * ITEM_BYTES[dtype]

    total = 0
    for model, num_devices in zip((models.target, models.draft), devices, strict=True):
        if model is not None:
            heads, size = model.cache_heads
            own = heads if model.mla is not None else 2 * -(-heads // 2 // num_devices)  # latents are not split
            total += model.num_layers * own * entry_bytes(size)
    return total


def _chose(key, value, because):
    logger.info("%s: %s (%s)", key, value, because)
    return value


def _dtype(target: ModelConfig) -> Dtype:
    return _chose("dtype", "float32" if target.dtype == "float32" else "bfloat16", f"checkpoint is {target.dtype}")


def _pages_in_memory(
    config: EngineConfig,
    hardware: HardwareFacts,
    weight_bytes: int,
    page_bytes: int,
    logits_bytes: int,
) -> int:
    """Pages (of a group) that fit beside the weights, drafts' too, and the logits of a full round."""
    # A host is shared with whatever else runs on it; an accelerator is ours.
    share = config.gpu_memory_utilization or (0.4 if hardware.platform == "cpu" else 0.9)
    plan_bytes = int(hardware.memory_bytes * share)
    num_pages = (plan_bytes - weight_bytes - logits_bytes) // page_bytes
    if num_pages < 1:
        raise CapacityError(
            f"weights of {weight_bytes} bytes, logits of {logits_bytes} and one page of {page_bytes} exceed the "
            f"{plan_bytes} bytes planned ({share} of {hardware.memory_bytes}); raise gpu_memory_utilization, lower "
            "max_num_seqs or take a smaller model"
        )
    return num_pages


def _logits_bytes(
    config: EngineConfig, vocab_size: int, max_num_seqs: int, num_tokens: int, implementation: str
) -> int:
    """Of a round in which every row has all its drafts: max_num_seqs x (K + 1) rows of logits, and those that drafts
    are drawn from."""
    rows = LOGITS_AT_ONCE[implementation] * max_num_seqs * (num_tokens + 1)
    if config.speculative_config is not None and config.speculative_config.draft_sample_method == "probabilistic":
        rows += max_num_seqs * num_tokens
    return rows * vocab_size * ITEM_BYTES["float32"]


def _weight_bytes(models: ModelFacts, item_bytes: int, quantization: str | None, devices: tuple[int, int]) -> int:
    """On a device; norms and the like, which are not split, are small."""
    draft_bytes = -(-models.num_draft_parameters * item_bytes // devices[1])
    if quantization is None:
        return -(-models.num_parameters * item_bytes // devices[0]) + draft_bytes
    scale_bytes = models.int8_scales * ITEM_BYTES["float32"]
    kept_bytes = (models.num_parameters - models.int8_parameters) * item_bytes
    return -(-(kept_bytes + models.int8_parameters + scale_bytes) // devices[0]) + draft_bytes


def _max_model_len(config: EngineConfig, target: ModelConfig, most_pages: int, block_size: int) -> int:
    limit = target.max_position_embeddings
    most_tokens = (min(most_pages, config.num_pages) if config.num_pages else most_pages) * block_size
    if config.max_model_len is None:
        because = "the model's limit" if limit <= most_tokens else "what one row can hold in the pages there are"
        return _chose("max_model_len", min(limit, most_tokens), because)
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} must not exceed the model's limit of {limit} positions; lower it"
        )
    if config.max_model_len > most_tokens:
        raise CapacityError(
            f"max_model_len={config.max_model_len} needs more than the {most_tokens} tokens that the cache can hold; "
            f"lower it, or raise num_pages or gpu_memory_utilization"
        )
    return config.max_model_len


def _max_num_batched_tokens(config: EngineConfig, hardware: HardwareFacts, max_model_len: int) -> int:
    if config.max_num_batched_tokens is not None:
        return min(config.max_num_batched_tokens, max_model_len)
    most = 256 if hardware.platform == "cpu" else 2048
    return _chose("max_num_batched_tokens", min(most, max_model_len), hardware.platform)


def _num_pages(config: EngineConfig, wanted: int, most_pages: int) -> int:
    if config.num_pages is not None:
        if config.num_pages > most_pages:
            raise CapacityError(
                f"num_pages={config.num_pages} exceeds the {most_pages} pages that fit in memory; lower it"
            )
        return config.num_pages
    because = "every row at full length" if wanted <= most_pages else "what fits in memory"
    return _chose("num_pages", min(wanted, most_pages), because)


def _num_tokens(config: EngineConfig, models: ModelFacts) -> int:
    """Drafts a row at most; 0 without speculation."""
    given = config.speculative_config
    if given is None:
        return 0
    method = _method(given, models)
    num_tokens = None if given.num_speculative_tokens == "auto" else given.num_speculative_tokens
    if given.num_speculative_tokens == "auto" and models.draft_tokens is None:
        num_tokens = _chose("num_speculative_tokens", AUTO_TOKENS, "the most that is tried")
    elif num_tokens is None and METHODS[method].num_tokens == "depth":
        depth = min(given.suffix_decoding_max_tree_depth, MAX_SPECULATIVE_TOKENS)
        num_tokens = _chose("num_speculative_tokens", depth, "the suffix tree's depth")
    elif num_tokens is None and models.draft_tokens is not None:
        num_tokens = _chose("num_speculative_tokens", models.draft_tokens.num_tokens, "the draft's files")
    return settle_num_tokens(num_tokens, models.draft_tokens)


def _method(given: SpeculativeConfig, models: ModelFacts) -> str:
    method = models.method or given.method or "draft_model"
    check_built(method)
    drafter = drafter_of(method)
    if drafter == "draft_model" and models.draft is None:
        raise ConfigError("method 'draft_model' needs the draft's description; load its config first")
    return method


def _speculative(
    config: EngineConfig,
    models: ModelFacts,
    max_model_len: int,
    max_num_seqs: int,
    num_tokens: int,
    draft_devices: int,
) -> ResolvedSpeculative | None:
    given = config.speculative_config
    if given is None:
        return None
    method = _method(given, models)
    drafter = drafter_of(method)
    schedule = given.num_speculative_tokens_per_batch_size
    is_auto = given.num_speculative_tokens == "auto"
    draft_limit = models.draft.max_position_embeddings if models.draft else max_model_len
    rule: Rule
    if given.rejection_sample_method == "auto":
        # q(draft) = 1: the only token that its proposer would have given.
        point_mass = given.draft_sample_method == "greedy" or method not in KEYS["draft_sample_method"].methods
        because = "drafts are a point mass" if point_mass else "drafts come with their distribution"
        rule = _chose("rejection_sample_method", "coupled" if point_mass else "standard", because)
    else:
        rule = given.rejection_sample_method
    asked = {
        "heterogeneous_vocab": given.use_heterogeneous_vocab,
        "parallel_drafting": given.parallel_drafting,
        "draft_tensor_parallel": (given.draft_tensor_parallel_size or 1) > 1,
        "batch_size_schedule": schedule is not None,
        "adaptive_tokens": is_auto,
        "exact": config.exact,
        "several_rounds": config.rounds_per_batch not in ("auto", 1),
        rule: rule != "standard",
    }
    check_support(method, [feature for feature, is_asked in asked.items() if is_asked])
    return ResolvedSpeculative(
        method=method,
        model=given.model,
        num_speculative_tokens=num_tokens,
        is_adaptive=is_auto and schedule is None,  # what a schedule says stands
        parallel_drafting=given.parallel_drafting or method in PARALLEL.values(),
        use_heterogeneous_vocab=given.use_heterogeneous_vocab,
        prompt_lookup_min=given.prompt_lookup_min,
        prompt_lookup_max=given.prompt_lookup_max,
        prompt_lookup_match=given.prompt_lookup_match,
        exit_layer=_exit_layer(given.exit_layer, models.target.num_layers) if drafter == "self" else None,
        suffix_decoding_max_tree_depth=given.suffix_decoding_max_tree_depth,
        suffix_decoding_max_cached_requests=given.suffix_decoding_max_cached_requests,
        suffix_decoding_max_spec_factor=given.suffix_decoding_max_spec_factor,
        suffix_decoding_min_token_prob=given.suffix_decoding_min_token_prob,
        draft_sample_method=given.draft_sample_method,
        rejection_sample_method=rule,
        synthetic_rates=given.synthetic_rates(num_tokens),
        num_speculative_tokens_per_batch_size=(
            None if schedule is None else dense_schedule(schedule, max_batch=max_num_seqs, max_tokens=num_tokens)
        ),
        max_model_len=settle_draft_max_model_len(given.max_model_len, draft_limit, max_model_len),
        draft_tensor_parallel_size=draft_devices,
    )


def _exit_layer(asked: int | None, num_layers: int) -> int:
    """How many of the target's layers draft."""
    if asked is None:
        return _chose("exit_layer", max(1, round(num_layers / 3)), f"about a third of the target's {num_layers} layers")
    if asked > num_layers:
        raise ConfigError(f"exit_layer={asked} must not exceed the target's {num_layers} layers; lower it")
    return asked


def _compilation_cache_dir(config: EngineConfig, hardware: HardwareFacts) -> str | None:
    """One folder a CPU feature set: XLA's compiled CPU code must not be loaded on a lesser CPU."""
    if config.compilation_cache_dir is None:
        return None
    root = config.compilation_cache_dir
    if root == "auto":
        if hardware.cache_home is None:
            return _chose("compilation_cache_dir", None, "no cache folder to write to")
        root = _chose("compilation_cache_dir", f"{hardware.cache_home}/jaxspec", "the user's cache folder")
    return f"{root}/{hardware.platform}-{hardware.cpu_features}"
