"""Host. The programs of an engine over arrays that do not exist: shapes of weights and state in place of them."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.aot.describe import Described
from jaxspec.cache.pages import new_pool, pool_shape
from jaxspec.config.heads import EagleConfig, HeadConfig, MedusaConfig, MlpSpeculatorConfig
from jaxspec.config.methods import METHODS, drafter_of
from jaxspec.config.model import ModelConfig
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.config.schedule import draft_widths
from jaxspec.engine.heads import head_proposer
from jaxspec.engine.own_drafts import ngram_proposer, self_proposer, with_lookup
from jaxspec.errors import ConfigError
from jaxspec.models.base import Family, at_highest_precision
from jaxspec.models.heads.load import specs_of
from jaxspec.models.registry import family_of
from jaxspec.proposers.base import Proposer, no_proposer
from jaxspec.proposers.draft_model import draft_model
from jaxspec.step import pack, rounds
from jaxspec.step.prefill import prefill
from jaxspec.step.state import DecodeState, initial_state
from jaxspec.step.target import Target
from jaxspec.types import ArraySpec, Drafts, Int8Weight


@dataclass(frozen=True)
class Parts:
    """What programs are made of. weights, state: trees of ShapeDtypeStruct."""

    target: Target
    proposer: Proposer
    weights: Any
    state: DecodeState
    resolved: ResolvedConfig
    num_host_drafts: int

    def programs(self) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
        """{name: (function, arguments)} of the largest round and the largest chunk of a prompt; each takes the state
        second, donated."""
        resolved = self.resolved
        rows, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
        guard = resolved.max_num_seqs
        batch = pack.pack_batch([], [], rows, guard, resolved.pages_per_row)
        chunk = pack.pack_chunk(0, 0, 0, [], resolved.pages_per_row)
        programs = {
            f"prefill[T={tokens}]": (
                functools.partial(prefill, self.target, self.proposer, tokens),
                (self.weights, self.state, chunk),
            )
        }
        if self.num_host_drafts:
            drafts = Drafts(
                token_ids_BK=jax.ShapeDtypeStruct((rows, self.num_host_drafts), jnp.int32),  # pyright: ignore[reportArgumentType]
                counts_B=jax.ShapeDtypeStruct((rows,), jnp.int32),  # pyright: ignore[reportArgumentType]
            )
            run = functools.partial(rounds.verify_commit, self.target, self.proposer)
            programs[f"verify_commit[B={rows},K={self.num_host_drafts}]"] = (
                run,
                (self.weights, self.state, batch, drafts),
            )
            return programs
        widths = None
        if self.proposer.num_tokens and resolved.speculative_config is not None:
            table = resolved.speculative_config.num_speculative_tokens_per_batch_size
            (widths,) = draft_widths([rows], self.proposer.num_tokens, table, is_adaptive=False)
        run = functools.partial(rounds.decode_round, self.target, self.proposer, widths=widths)
        programs[f"decode_round[B={rows}]"] = (run, (self.weights, self.state, batch))
        return programs


def last_layers(model: ModelConfig, number: int) -> ModelConfig:
    """The model with its last layers alone: of the kind that most of them are."""
    moe = None if model.moe is None else model.moe.model_copy(update={"layers": model.moe.layers[-number:]})
    windows = model.sliding_window_layers[-number:]
    return model.model_copy(update={"num_layers": number, "sliding_window_layers": windows, "moe": moe})


def shorten(described: Described, number: int) -> Described:
    """The same models with so many layers, those of a draft model too; heads read streams that there are."""
    target, drafter = last_layers(described.target, number), described.drafter
    if isinstance(drafter, ModelConfig):
        drafter = last_layers(drafter, min(number, drafter.num_layers))
    elif drafter is not None and drafter.aux_streams:
        streams = tuple(min(stream, number) for stream in drafter.aux_streams)
        drafter = drafter.model_copy(update={"aux_streams": streams})
    return dataclasses.replace(described, target=target, drafter=drafter)


def make_parts(described: Described, resolved: ResolvedConfig, platform: str) -> Parts:
    """The parts of the engine that `resolved` describes.

    Args:
        platform: of the devices that programs are for, "gpu" or "tpu".

    Raises:
        ConfigError: a proposer of the user's own, whose code is not at hand here.
    """
    model = described.target.for_run(resolved.max_model_len)
    family, drafting = family_of(model.family), resolved.speculative_config
    drafter = described.drafter
    num_host_drafts = 0
    if drafting is None:
        proposer = no_proposer()
    elif METHODS[drafting.method].is_on_host:
        proposer, num_host_drafts = no_proposer(), drafting.num_speculative_tokens
    elif drafting.exit_layer is not None:
        proposer = self_proposer(_with_exit(resolved, model), family, model)
    elif drafting.method == "ngram":
        proposer = ngram_proposer(resolved)
    elif isinstance(drafter, ModelConfig):
        proposer = _draft_model(drafter, described, resolved)
    elif drafter is not None:
        proposer = head_proposer(drafter, resolved, family, model)
    else:
        raise ConfigError(f"method {drafting.method!r} runs code of yours, which is not compiled here; take another")
    proposer = with_lookup(resolved, proposer, None)
    target = Target(
        at_highest_precision(family) if resolved.exact else family,
        model,
        drafting.rejection_sample_method if drafting is not None else "coupled",
        resolved.implementation,
        platform,
        exact=resolved.exact,
        synthetic_rates=drafting.synthetic_rates or () if drafting is not None else (),
        max_logprobs=resolved.max_logprobs,
        logprobs_mode=resolved.logprobs_mode,
    )

    def new_state() -> DecodeState:
        return initial_state(
            max_rows=resolved.max_num_seqs,
            max_model_len=resolved.max_model_len,
            vocab_size=model.vocab_size,
            pool=new_pool(pool_shape(model, resolved.num_pages, resolved.block_size), resolved.kv_cache_dtype),
            proposer_state=proposer.init(resolved.max_num_seqs + 1),
        )

    weights = {"target": _abstract(family, model, resolved)}
    if drafter is not None:
        weights["draft"] = _abstract_drafter(drafter, weights["target"], resolved)
    return Parts(target, proposer, weights, jax.eval_shape(new_state), resolved, num_host_drafts)


def table_bytes(state: DecodeState) -> int:
    """Bytes of everything in a state but pages."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not any(getattr(key, "name", "") == "pool" for key in path):
            total += leaf.size * leaf.dtype.itemsize
    return total


def _with_exit(resolved: ResolvedConfig, model: ModelConfig) -> ResolvedConfig:
    """Of a model with fewer layers, an exit that it has."""
    drafting = resolved.speculative_config
    assert drafting is not None
    assert drafting.exit_layer is not None
    layer = min(drafting.exit_layer, model.num_layers)
    return resolved.model_copy(update={"speculative_config": drafting.model_copy(update={"exit_layer": layer})})


def _draft_model(draft: ModelConfig, described: Described, resolved: ResolvedConfig) -> Proposer:
    drafting = resolved.speculative_config
    assert drafting is not None
    return draft_model(
        family_of(draft.family),
        draft.for_run(drafting.max_model_len),
        num_tokens=drafting.num_speculative_tokens,
        max_model_len=drafting.max_model_len,
        sample_method=drafting.draft_sample_method,
        pool_shape=pool_shape(draft, resolved.num_pages, resolved.block_size),
        pool_dtype=resolved.kv_cache_dtype,
        mask_token_id=described.mask_token_id if drafter_of(drafting.method) == "pard" else None,
    )


def _shapes(specs: Any) -> Any:
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        specs,
        is_leaf=lambda leaf: isinstance(leaf, ArraySpec),
    )


def _abstract(family: Family, model: ModelConfig, resolved: ResolvedConfig) -> Any:
    specs = family.specs(model, jnp.dtype(resolved.dtype))
    if resolved.quantization != "int8":
        return _shapes(specs)

    def shape(path: Any, spec: ArraySpec) -> Any:
        if getattr(path[-1], "key", None) not in family.int8_names:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype)
        return Int8Weight(
            values_oi=jax.ShapeDtypeStruct(spec.shape, np.int8),  # pyright: ignore[reportArgumentType]
            scale_o=jax.ShapeDtypeStruct(spec.shape[:1], np.float32),  # pyright: ignore[reportArgumentType]
            dtype=resolved.dtype,
        )

    return jax.tree_util.tree_map_with_path(shape, specs, is_leaf=lambda leaf: isinstance(leaf, ArraySpec))


def _abstract_drafter(drafter: ModelConfig | HeadConfig, target: Any, resolved: ResolvedConfig) -> Any:
    """As `jaxspec.models.heads.load.load_head` leaves it: with what it shares with the target."""
    dtype = jnp.dtype(resolved.dtype)
    if isinstance(drafter, ModelConfig):
        return _shapes(family_of(drafter.family).specs(drafter, dtype))
    weights = _shapes(specs_of(drafter, dtype))
    if not isinstance(drafter, MedusaConfig | MlpSpeculatorConfig):
        for module in weights.get("modules", [weights]):
            module.setdefault("embed", target["embed"])
            if isinstance(drafter, EagleConfig) and drafter.is_head_tied:
                module["head"] = module["embed"]
    if (ids := weights.pop("id_map", None)) is not None:
        weights["target_ids"] = jax.ShapeDtypeStruct(ids.shape, jnp.int32)
    return weights
