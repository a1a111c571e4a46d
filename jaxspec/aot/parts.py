"""Host. The programs of an engine over arrays that do not exist: shapes of weights and state in place of them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.aot.describe import Described
from jaxspec.cache.pages import pool_shape
from jaxspec.config.heads import EagleConfig, HeadConfig, MedusaConfig, MlpSpeculatorConfig
from jaxspec.config.methods import METHODS, drafter_of
from jaxspec.config.model import ModelConfig
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.config.schedule import draft_widths
from jaxspec.distributed import Split, mesh_of
from jaxspec.engine.heads import head_layers, head_proposer
from jaxspec.engine.own_drafts import ngram_proposer, self_proposer, with_lookup
from jaxspec.engine.placing import ModelPlacing, Placing
from jaxspec.engine.target import empty_state, make_target
from jaxspec.errors import ConfigError
from jaxspec.models.base import Family
from jaxspec.models.heads.load import specs_of as head_specs
from jaxspec.models.registry import family_of
from jaxspec.proposers.base import Proposer, no_proposer
from jaxspec.proposers.draft_model import draft_model
from jaxspec.step import pack, rounds
from jaxspec.step.prefill import prefill
from jaxspec.step.spread import Role, Spread, specs_of
from jaxspec.step.state import DecodeState
from jaxspec.step.target import Target
from jaxspec.types import ArraySpec, Drafts, Int8Weight


@dataclass(frozen=True)
class Program:
    """A function of an engine, and what it is called with; the state, the second, is donated."""

    function: Callable[..., Any]
    roles: tuple[Role, ...]
    arguments: tuple[Any, ...]
    mesh: Mesh
    spread: Spread

    def lower(self) -> Any:
        """For the devices of its mesh."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())

        def placed(leaf: Any) -> Any:
            sharding = getattr(leaf, "sharding", None) or (everywhere if self.spread.mesh is None else None)
            return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)

        arguments = jax.tree.map(placed, self.arguments)
        with jax.set_mesh(self.mesh):  # kernels ask the mesh what chip they are for
            return self.spread.jit(self.function, self.roles, ("state", "small"), donate=1).lower(*arguments)


@dataclass(frozen=True)
class Parts:
    """What programs are made of. weights, state: trees of ShapeDtypeStruct; mesh None: of no device."""

    target: Target
    proposer: Proposer
    weights: Any
    state: DecodeState
    resolved: ResolvedConfig
    num_host_drafts: int
    mesh: Mesh | None

    def programs(self) -> dict[str, Program]:
        """{name: program} of the largest round and the largest chunk of a prompt."""
        resolved, mesh = self.resolved, self.mesh
        assert mesh is not None
        spread = Spread() if mesh.size == 1 else Spread(mesh, specs_of(self.weights), specs_of(self.state))
        rows, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
        batch = spread.shapes(pack.pack_batch([], [], rows, rows, resolved.pages_per_row))
        chunk = spread.shapes(pack.pack_chunk(0, 0, 0, [], resolved.pages_per_row))

        def program(function: Callable[..., Any], last: Any, *more: Any) -> Program:
            roles: tuple[Role, ...] = ("weights", "state", "small", *["drafts" for _ in more])
            return Program(
                functools.partial(function, self.target, self.proposer),
                roles,
                (self.weights, self.state, last, *more),
                mesh,
                spread,
            )

        def fill(target: Target, proposer: Proposer, *arguments: Any) -> Any:
            return prefill(target, proposer, tokens, *arguments)

        programs = {f"prefill[T={tokens}]": program(fill, chunk)}
        if K := self.num_host_drafts:
            drafts = Drafts(
                token_ids_BK=jax.ShapeDtypeStruct((rows, K), jnp.int32),  # pyright: ignore[reportArgumentType]
                counts_B=jax.ShapeDtypeStruct((rows,), jnp.int32),  # pyright: ignore[reportArgumentType]
            )
            return programs | {f"verify_commit[B={rows},K={K}]": program(rounds.verify_commit, batch, drafts)}
        widths = None
        if self.proposer.num_tokens and resolved.speculative_config is not None:
            table = resolved.speculative_config.num_speculative_tokens_per_batch_size
            (widths,) = draft_widths([rows], self.proposer.num_tokens, table, is_adaptive=False)
        run = functools.partial(rounds.decode_round, widths=widths)
        return programs | {f"decode_round[B={rows}]": program(run, batch)}


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


def make_parts(
    described: Described, resolved: ResolvedConfig, platform: str, *, devices: Sequence[Any] | None = None
) -> Parts:
    """The parts of the engine that `resolved` describes.

    Args:
        platform: of the devices that programs are for, "gpu" or "tpu".
        devices: to compile for, as many as the config's groups have together; None: shapes alone, of one group.

    Raises:
        ConfigError: a proposer of the user's own, whose code is not at hand here.
    """
    model = described.target.for_run(resolved.max_model_len)
    family, drafting = family_of(model.family), resolved.speculative_config
    drafter = described.drafter
    mesh = None
    if devices is not None:
        mesh = mesh_of(devices, resolved.tensor_parallel_size, resolved.data_parallel_size)
    placing = _placing(described, resolved, mesh)
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
        proposer = _draft_model(drafter, described, resolved, placing.draft.cache_heads)
    elif drafter is not None:
        proposer = head_proposer(drafter, resolved, family, model, cache_heads=placing.draft.cache_heads)
    else:
        raise ConfigError(f"method {drafting.method!r} runs code of yours, which is not compiled here; take another")
    proposer = with_lookup(resolved, proposer, None)
    target = make_target(resolved, family, model, platform)

    make_state = functools.partial(empty_state, resolved, target, proposer, cache_heads=placing.target.cache_heads)
    weights = {"target": _abstract(family, model, resolved, placing.target)}
    if drafter is not None:
        weights["draft"] = _abstract_drafter(drafter, weights["target"], resolved, placing.draft)
    state = jax.eval_shape(placing.state_maker(make_state))
    return Parts(target, proposer, weights, state, resolved, num_host_drafts, mesh)


def _placing(described: Described, resolved: ResolvedConfig, mesh: Mesh | None) -> Placing:
    """Where weights and state lie on a mesh of more than one device; anywhere else they are whole."""
    if mesh is None or mesh.size == 1:
        return Placing(None, ModelPlacing(None), ModelPlacing(None))
    drafter, drafting = described.drafter, resolved.speculative_config
    layers = drafter if isinstance(drafter, ModelConfig) or drafter is None else head_layers(drafter)
    by_expert, own = resolved.enable_expert_parallel, None
    if layers is not None and drafting is not None:
        own = Split(layers, drafting.draft_tensor_parallel_size, by_expert)
    split = Split(described.target, resolved.tensor_parallel_size, by_expert)
    return Placing(mesh, ModelPlacing(mesh, split), ModelPlacing(mesh, own))


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


def _draft_model(
    draft: ModelConfig, described: Described, resolved: ResolvedConfig, cache_heads: int | None
) -> Proposer:
    drafting = resolved.speculative_config
    assert drafting is not None
    return draft_model(
        family_of(draft.family),
        draft.for_run(drafting.max_model_len),
        num_tokens=drafting.num_speculative_tokens,
        max_model_len=drafting.max_model_len,
        sample_method=drafting.draft_sample_method,
        pool_shape=pool_shape(draft, resolved.num_pages, resolved.block_size, num_heads=cache_heads),
        pool_dtype=resolved.page_dtype,
        mask_token_id=described.mask_token_id if drafter_of(drafting.method) == "pard" else None,
    )


def _shape(spec: ArraySpec, where: ModelPlacing) -> jax.ShapeDtypeStruct:
    """As it lies."""
    if where.mesh is None:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    if where.split is None:
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=NamedSharding(where.mesh, PartitionSpec()))
    layout = where.split.layout(spec)
    return jax.ShapeDtypeStruct(layout.shape, spec.dtype, sharding=NamedSharding(where.mesh, layout.spec))


def _shapes(specs: Any, where: ModelPlacing) -> Any:
    return jax.tree.map(
        lambda spec: _shape(spec, where), specs, is_leaf=lambda leaf: isinstance(leaf, ArraySpec)
    )  # fmt: skip


def _abstract(family: Family, model: ModelConfig, resolved: ResolvedConfig, where: ModelPlacing) -> Any:
    specs = family.specs(model, jnp.dtype(resolved.dtype))
    if resolved.quantization != "int8":
        return _shapes(specs, where)

    def shape(path: Any, spec: ArraySpec) -> Any:
        if getattr(path[-1], "key", None) not in family.int8_names:
            return _shape(spec, where)
        scales = dataclasses.replace(spec, shape=spec.shape[:1], axes=spec.axes[:1], dtype=np.float32)
        return Int8Weight(
            values_oi=_shape(dataclasses.replace(spec, dtype=np.int8), where),  # pyright: ignore[reportArgumentType]
            scale_o=_shape(scales, where),  # pyright: ignore[reportArgumentType]
            dtype=resolved.dtype,
        )

    return jax.tree_util.tree_map_with_path(shape, specs, is_leaf=lambda leaf: isinstance(leaf, ArraySpec))


def _abstract_drafter(
    drafter: ModelConfig | HeadConfig, target: Any, resolved: ResolvedConfig, where: ModelPlacing
) -> Any:
    """As `jaxspec.models.heads.load.load_head` leaves it: with what it shares with the target."""
    dtype = jnp.dtype(resolved.dtype)
    if isinstance(drafter, ModelConfig):
        return _shapes(family_of(drafter.family).specs(drafter, dtype), where)
    weights = _shapes(head_specs(drafter, dtype), where)
    if not isinstance(drafter, MedusaConfig | MlpSpeculatorConfig):
        for module in weights.get("modules", [weights]):
            module.setdefault("embed", target["embed"])
            if isinstance(drafter, EagleConfig) and drafter.is_head_tied:
                module["head"] = module["embed"]
    if (ids := weights.pop("id_map", None)) is not None:
        sharding = None if where.mesh is None else NamedSharding(where.mesh, PartitionSpec())
        weights["target_ids"] = jax.ShapeDtypeStruct(ids.shape, jnp.int32, sharding=sharding)
    return weights
