"""Host. From a config to everything an engine runs on: weights, state, compiled programs, tokenizer."""

import functools
import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import pool_shape
from jaxspec.config.engine import EngineConfig
from jaxspec.config.hardware import read_hardware
from jaxspec.config.heads import HeadConfig
from jaxspec.config.methods import drafter_of
from jaxspec.config.model import ModelConfig
from jaxspec.config.resolve import ModelFacts, ResolvedConfig, resolve
from jaxspec.config.schedule import draft_widths
from jaxspec.engine.custom import check_custom, load_custom
from jaxspec.engine.drafting import drafts_are_free
from jaxspec.engine.drafts import FoundDraft, draft_vocabulary, find_draft
from jaxspec.engine.heads import METHODS_WITH_HEADS, head_layers, head_proposer, num_head_parameters
from jaxspec.engine.hosts import Hosts
from jaxspec.engine.own_drafts import ngram_proposer, self_proposer, with_lookup
from jaxspec.engine.placing import ON_ONE_DEVICE, ModelPlacing, Placing
from jaxspec.engine.target import empty_state, make_target
from jaxspec.errors import ConfigError, RequestError
from jaxspec.models.heads.load import load_head, open_head
from jaxspec.models.registry import family_of
from jaxspec.proposers.base import HostProposer, Proposer, no_proposer
from jaxspec.proposers.draft_model import draft_model
from jaxspec.proposers.suffix import SuffixProposer
from jaxspec.sampling.grammar import GrammarCompiler
from jaxspec.sampling.processors import LogitsProcessor
from jaxspec.step.costs import RoundCosts, measure_rounds
from jaxspec.step.executables import ExecutableStore
from jaxspec.step.pack import geometric_buckets, row_buckets
from jaxspec.step.programs import Programs, Shapes, is_first
from jaxspec.step.state import DecodeState
from jaxspec.step.target import Target
from jaxspec.text.tokenizer import Tokenizer, load_tokenizer
from jaxspec.types import ArraySpec
from jaxspec.weights.aliases import resolve_model
from jaxspec.weights.checkpoint import Checkpoint, open_checkpoint
from jaxspec.weights.int8 import Int8Put, int8_shapes
from jaxspec.weights.load import load

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineParts:
    """What `EngineCore` drives. `state` is the first state: the core takes it and passes it on, donated."""

    config: ResolvedConfig
    target: Target
    proposer: Proposer
    host_proposer: HostProposer | None
    weights: Any  # {"target": ..., "draft": ..., "vocabulary": ...}, those that there are
    state: DecodeState
    new_state: Callable[[], DecodeState]  # another one like it
    programs: Programs
    tokenizer: Tokenizer | None
    grammars: GrammarCompiler | None  # None: not enabled, or no tokenizer
    costs: RoundCosts | None = None  # None: the number of drafts is not chosen by what it pays
    hosts: Hosts | None = None  # None: this process is alone

    @property
    def is_follower(self) -> bool:
        """Whether another process decides what this one runs."""
        return self.hosts is not None and not self.hosts.leads

    def follow(self) -> None:
        """Run what process 0 runs, until it ends the job; the state is taken."""
        assert self.hosts is not None
        self.hosts.follow(self.programs, self.state, self.new_state)

    def check_one_host(self, what: str) -> None:
        """For what process 0 would run without telling the others.

        Raises:
            RequestError: there are others.
        """
        if self.hosts is not None:
            raise RequestError(f"{what} work in one process, and this engine has {self.hosts.num_hosts}; leave it out")

    def check_one_device(self, who: str) -> None:
        """For what runs the models' functions itself, over whole weights.

        Raises:
            ConfigError: the engine is split over devices.
        """
        for key in ("tensor_parallel_size", "data_parallel_size"):
            size = getattr(self.config, key)
            if size > 1:
                raise ConfigError(f"{who} runs the model on one device, got {key}={size}; set it to 1")


def build(
    config: EngineConfig,
    *,
    custom_proposer: Proposer | HostProposer | None = None,
    logits_processors: tuple[LogitsProcessor, ...] = (),
    show_progress: bool = False,
) -> EngineParts:
    """Open the checkpoints, settle the config, load, and compile every program.

    Of a job of several processes all call this; it returns when all are ready. Then one leads, and the others follow.

    Args:
        config: as the user gave it.
        custom_proposer: who guesses when the method is "custom".
        logits_processors: compiled into every round, in this order.
        show_progress: draw a bar while compiling.

    Raises:
        ConfigError, WeightsError, CapacityError: before anything is loaded, where the fault can be seen by then.
        HostError: another process cannot start, or has gone.
    """
    hosts = Hosts.join(config)
    try:
        return _build(config, hosts, custom_proposer, logits_processors, show_progress=show_progress)
    except BaseException as error:
        if hosts is not None:
            hosts.refuse(error)
        raise


def _build(
    config: EngineConfig,
    hosts: Hosts | None,
    custom_proposer: Proposer | HostProposer | None,
    logits_processors: tuple[LogitsProcessor, ...],
    *,
    show_progress: bool,
) -> EngineParts:
    check_custom(config.speculative_config, custom_proposer)
    with ExitStack() as opened:
        checkpoint = opened.enter_context(open_checkpoint(resolve_model(config.model)))
        draft = find_draft(config.speculative_config, checkpoint)
        draft_checkpoint, vocabulary, head = None, None, None
        if draft.drafter in METHODS_WITH_HEADS:
            assert config.speculative_config is not None
            streams = config.speculative_config.eagle_aux_hidden_state_layer_ids
            head = opened.enter_context(
                open_head(
                    draft.drafter,
                    draft.path,
                    checkpoint,
                    aux_layer_ids=None if streams is None else tuple(streams),
                    mask_token_id=draft.mask_token_id,
                )
            )
        elif draft.path is not None:
            draft_checkpoint = opened.enter_context(open_checkpoint(draft.path))
        tokenizer = _tokenizer(config.tokenizer, checkpoint.path)
        if draft_checkpoint is not None:
            vocabulary = draft_vocabulary(config.speculative_config, checkpoint, draft_checkpoint, tokenizer)
        platform = jax.default_backend()
        resolved = _resolve(config, platform, checkpoint, draft_checkpoint, draft, head.config if head else None)
        if hosts is not None:
            described = (checkpoint.config, draft_checkpoint and draft_checkpoint.config, head and head.config)
            resolved = hosts.agree(resolved, {"jax": jax.__version__, "models": repr(described)})
        if custom_proposer is None and drafter_of(draft.method or "") == "custom":
            custom_proposer = load_custom(resolved)
        layers = head_layers(head.config) if head else draft_checkpoint and draft_checkpoint.config
        placing = Placing.of(resolved, checkpoint.config, layers)
        own_head, has_own_vocabulary = head and head.config, vocabulary is not None
        placing.check(resolved, own_head, custom_proposer, logits_processors, has_own_vocabulary=has_own_vocabulary)
        _configure_compilation_cache(resolved)
        configs = (
            checkpoint.config,
            draft_checkpoint and draft_checkpoint.config,
            head and head.config,
            vocabulary is not None,
            draft.mask_token_id,
        )
        # The user's own code may be anything: programs that hold it are traced at every start.
        is_custom = draft.drafter == "custom" or logits_processors
        # XLA does not keep programs of several processes: these go by JAX's cache.
        store = None if is_custom or hosts is not None else _executables(resolved, configs)
        weights = {"target": _load(checkpoint, resolved.dtype, resolved.quantization, placing.target)}
        if draft_checkpoint is not None:
            weights["draft"] = _load(draft_checkpoint, resolved.dtype, where=placing.draft)
        if head is not None:
            dtype, put = jnp.dtype(resolved.dtype), placing.draft.put
            weights["draft"] = load_head(head, checkpoint.config, weights["target"], dtype, put=put)
        if vocabulary is not None:
            weights["vocabulary"] = {
                "target_to_draft_V": jnp.asarray(vocabulary.target_to_draft_V),
                "is_shared_V": jnp.asarray(vocabulary.is_shared_V),
            }
        weights = placing.whole(weights)

    drafting = resolved.speculative_config
    model = checkpoint.config.for_run(resolved.max_model_len)
    family = family_of(model.family)
    if head is not None:
        cache_heads = placing.draft.cache_heads
        proposer = head_proposer(head.config, resolved, family, model, cache_heads=cache_heads)
        host_proposer = None
    elif drafting is not None and drafting.exit_layer is not None:
        proposer, host_proposer = self_proposer(resolved, family, model), None
    else:
        proposer, host_proposer = _proposer(
            resolved,
            draft_checkpoint.config if draft_checkpoint else None,
            custom_proposer,
            vocabulary is not None,
            draft.mask_token_id,
            placing.draft.cache_heads,
        )
    proposer = with_lookup(resolved, proposer, host_proposer)
    target = make_target(resolved, family, model, platform, logits_processors)

    make_state = functools.partial(empty_state, resolved, target, proposer, cache_heads=placing.target.cache_heads)
    new_state = placing.state_maker(make_state)
    state = new_state()
    batch_rows, split_rows, chunk_tokens = _buckets(resolved)
    shapes = Shapes(
        batch_rows=batch_rows,
        split_rows=split_rows if resolved.enable_structured_outputs else (),
        chunk_tokens=chunk_tokens,
        pages_per_row=resolved.pages_per_row,
        max_rows=resolved.max_num_seqs,
        max_model_len=resolved.max_model_len,
        max_rounds=resolved.rounds_per_batch,
        num_host_drafts=host_proposer.num_tokens if host_proposer is not None else 0,
        **_draft_shapes(resolved, batch_rows, proposer),
    )
    spread = placing.spread(weights, state)
    programs = Programs(
        target, proposer, shapes, weights, state, spread=spread, store=store, show_progress=show_progress
    )
    if hosts is not None:
        hosts.ready(programs, weights)
        new_state = hosts.on_all(new_state) if hosts.leads else new_state
    costs = None
    if drafting is not None and drafting.is_adaptive and (hosts is None or hosts.leads):
        is_free = host_proposer is not None or drafts_are_free(drafting.method)
        costs = measure_rounds(programs, target, weights, state, num_pages=resolved.num_pages, is_free=is_free)
        state = new_state()  # the other was donated
    _log_plan(resolved, weights, state, programs)
    grammars = None
    if resolved.enable_structured_outputs and tokenizer is not None:
        grammars = GrammarCompiler(tokenizer, checkpoint.config.vocab_size, checkpoint.config.eos_token_ids)
    return EngineParts(
        resolved,
        target,
        proposer,
        host_proposer,
        weights,
        state,
        new_state,
        programs,
        tokenizer,
        grammars,
        costs,
        hosts,
    )


def _resolve(
    config: EngineConfig,
    platform: str,
    checkpoint: Checkpoint,
    draft_checkpoint: Checkpoint | None,
    found: FoundDraft,
    head: HeadConfig | None,
) -> ResolvedConfig:
    target = checkpoint.config
    draft = draft_checkpoint.config if draft_checkpoint is not None else None
    num_draft_parameters = _num_parameters(draft) if draft is not None else 0
    if head is not None:
        draft, num_draft_parameters = head_layers(head), num_head_parameters(head)
    memory_stats = jax.local_devices()[0].memory_stats()
    hardware = read_hardware(platform, (memory_stats or {}).get("bytes_limit"))
    int8_parameters, int8_scales = _num_int8(target)
    facts = ModelFacts(
        target,
        _num_parameters(target),
        draft,
        num_draft_parameters,
        found.method,
        found.num_tokens,
        int8_parameters,
        int8_scales,
    )
    return resolve(config, hardware, facts)


def _num_parameters(config: ModelConfig) -> int:
    specs = family_of(config.family).specs(config, np.float32)
    leaves = jax.tree.leaves(specs, is_leaf=lambda leaf: isinstance(leaf, ArraySpec))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def _num_int8(config: ModelConfig) -> tuple[int, int]:
    """(values, scales) of the parameters that `quantization: int8` keeps as integers."""
    family = family_of(config.family)
    shapes = int8_shapes(family.specs(config, np.float32), family.int8_names)
    return sum(math.prod(shape) for shape in shapes), sum(shape[0] for shape in shapes)


def _configure_compilation_cache(resolved: ResolvedConfig) -> None:
    """JAX has one cache a process; one that the user has set stays."""
    if resolved.compilation_cache_dir is None or jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", resolved.compilation_cache_dir)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _buckets(resolved: ResolvedConfig) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The sizes to compile for: rows of a batch, rows of a round in three parts, tokens of a prompt's chunk."""
    rows, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
    if resolved.exact:  # the products of one size may be summed in another order than those of the next
        return (rows,), (rows,), (tokens,)
    return row_buckets(rows), tuple(sorted({1, rows})), geometric_buckets(min(16, tokens), tokens, 4)


def _draft_shapes(resolved: ResolvedConfig, batch_rows: tuple[int, ...], proposer: Proposer) -> dict[str, Any]:
    """How many drafts rounds verify, and whether they weigh them; drafts of the host's are weighed there."""
    speculative = resolved.speculative_config
    if speculative is None or proposer.num_tokens == 0:
        return {}
    table, is_adaptive = speculative.num_speculative_tokens_per_batch_size, speculative.is_adaptive
    return {
        "widths": draft_widths(batch_rows, proposer.num_tokens, table, is_adaptive=is_adaptive),
        "num_weighed": proposer.num_tokens if is_adaptive and drafts_are_free(speculative.method) else 0,
    }


def _executables(resolved: ResolvedConfig, configs: tuple[Any, ...]) -> ExecutableStore | None:
    if resolved.compilation_cache_dir is None:
        return None
    return ExecutableStore(Path(resolved.compilation_cache_dir) / "executables", (resolved, configs), is_first)


def _tokenizer(named: str | None, checkpoint: Path) -> Tokenizer | None:
    """The one that the user named, or else the checkpoint's own, which may be missing."""
    if named is not None:
        return load_tokenizer(resolve_model(named))
    try:
        return load_tokenizer(checkpoint)
    except ConfigError as error:
        logger.warning("no tokenizer: %s; prompts must be token ids", error)
        return None


def _load(
    checkpoint: Checkpoint, dtype: str, quantization: str | None = None, where: ModelPlacing = ON_ONE_DEVICE
) -> Any:
    """A draft is loaded as it is, whatever the target's quantisation."""
    family = family_of(checkpoint.config.family)
    specs, put = family.specs(checkpoint.config, jnp.dtype(dtype)), where.put
    if quantization == "int8":
        if not family.int8_names:
            raise ConfigError(
                f"quantization 'int8' is not supported for {checkpoint.config.family} models; leave it out"
            )
        int8 = Int8Put(specs, family.int8_names, dtype, put=put, place=where.place)
        put, specs = int8, int8.specs
    return load(checkpoint.reader, specs, family.name_table(checkpoint.config, checkpoint.source), put=put)


def _proposer(
    resolved: ResolvedConfig,
    draft: ModelConfig | None,
    custom: Proposer | HostProposer | None,
    has_own_vocabulary: bool,
    mask_token_id: int | None,
    cache_heads: int | None,
) -> tuple[Proposer, HostProposer | None]:
    """The device's proposer, and the host's if drafts come from there (the device then drafts nothing)."""
    speculative = resolved.speculative_config
    if speculative is None:
        return no_proposer(), None
    num_tokens = speculative.num_speculative_tokens
    if drafter_of(speculative.method) == "custom":
        assert custom is not None
        if custom.num_tokens != num_tokens:
            raise ConfigError(
                f"the proposer drafts {custom.num_tokens=} tokens, the config says {num_tokens=}; align them"
            )
        return (custom, None) if isinstance(custom, Proposer) else (no_proposer(), custom)
    if speculative.method == "suffix":
        return no_proposer(), SuffixProposer(
            num_tokens,
            max_model_len=resolved.max_model_len,
            max_tree_depth=speculative.suffix_decoding_max_tree_depth,
            max_cached_requests=speculative.suffix_decoding_max_cached_requests,
            max_spec_factor=speculative.suffix_decoding_max_spec_factor,
            min_token_prob=speculative.suffix_decoding_min_token_prob,
        )
    if speculative.method == "ngram":
        return ngram_proposer(resolved), None
    assert draft is not None
    if mask_token_id is not None and mask_token_id >= draft.vocab_size:
        raise ConfigError(
            f"the mask token {mask_token_id} must be one of the draft's {draft.vocab_size} tokens; correct its config"
        )
    return draft_model(
        family_of(draft.family),
        draft.for_run(speculative.max_model_len),
        num_tokens=num_tokens,
        max_model_len=speculative.max_model_len,
        sample_method=speculative.draft_sample_method,
        pool_shape=pool_shape(draft, resolved.num_pages, resolved.block_size, num_heads=cache_heads),
        pool_dtype=resolved.page_dtype,
        has_own_vocabulary=has_own_vocabulary,
        mask_token_id=mask_token_id,
    ), None


def _log_plan(resolved: ResolvedConfig, weights: Any, state: DecodeState, programs: Programs) -> None:
    def megabytes(*trees: Any) -> float:
        return sum(leaf.nbytes for tree in trees for leaf in jax.tree.leaves(tree)) / 1e6

    target, drafter = weights["target"], [tree for name, tree in weights.items() if name != "target"]
    num_groups = resolved.data_parallel_size
    tables = megabytes(state) - megabytes(state.pool, state.proposer)
    logger.info(
        "plan: %d pages of %d tokens, %d in all, for %d rows of %d drafts; weights %.0f MB and the drafter's %.0f, "
        "cache %.0f MB and the drafter's state %.0f, row tables %.0f, largest scratch %.0f; groups alike: %d",
        resolved.num_pages,
        resolved.block_size,
        resolved.num_pages * resolved.block_size,
        resolved.max_num_seqs,
        resolved.num_speculative_tokens,
        megabytes(target),
        megabytes(drafter),
        megabytes(state.pool) / num_groups,
        megabytes(state.proposer) / num_groups,
        tables / num_groups,
        max(entry.temp_bytes for entry in programs.plan) / 1e6,
        num_groups,
    )
    logger.info(
        "plan: %d programs ready in %.1f s, %d of them kept from a former start",
        len(programs.plan),
        programs.compile_seconds,
        sum(entry.was_kept for entry in programs.plan),
    )
    for entry in programs.plan:
        logger.debug("plan: %s in %.1f s, scratch %d bytes", entry.name, entry.compile_seconds, entry.temp_bytes)
