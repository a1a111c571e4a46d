"""Host. Where an engine's weights and state lie: on one device, or on a mesh, target and draft each in their way."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.config.heads import EagleConfig, HeadConfig
from jaxspec.config.model import ModelConfig
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.distributed import Layout, Split, make_mesh
from jaxspec.errors import ConfigError
from jaxspec.proposers.base import Proposer
from jaxspec.shards import DATA
from jaxspec.step.spread import Spread, specs_of
from jaxspec.step.state import DecodeState
from jaxspec.types import ArraySpec
from jaxspec.weights.laid_out import on_mesh, place_on_mesh
from jaxspec.weights.load import Put


@dataclass(frozen=True)
class ModelPlacing:
    """Of one model, or of a drafter without layers of its own (split None)."""

    mesh: Mesh | None
    split: Split | None = None

    @property
    def put(self) -> Put | None:
        """As `load` takes it."""
        return None if self.mesh is None else on_mesh(self.mesh, self._layout)

    @property
    def place(self) -> Callable[[ArraySpec, np.ndarray], jax.Array] | None:
        """The same for what is in memory."""
        return None if self.mesh is None else place_on_mesh(self.mesh, self._layout)

    @property
    def cache_heads(self) -> int | None:
        """As `pool_shape` takes num_heads."""
        return None if self.mesh is None or self.split is None else self.split.cache_heads

    @property
    def pool_spec(self) -> PartitionSpec:
        """Of its page pool."""
        return PartitionSpec() if self.split is None else self.split.pool_spec

    def _layout(self, spec: ArraySpec) -> Layout:
        return Layout(PartitionSpec(), spec.shape) if self.split is None else self.split.layout(spec)


ON_ONE_DEVICE = ModelPlacing(None)


@dataclass(frozen=True)
class Placing:
    """Where everything of an engine lies."""

    mesh: Mesh | None
    target: ModelPlacing
    draft: ModelPlacing

    @classmethod
    def of(cls, resolved: ResolvedConfig, target: ModelConfig, draft: ModelConfig | None) -> "Placing":
        """draft: the drafter's layers, if it has any.

        Raises:
          ConfigError: too few devices, or sizes that cannot be split so.
        """
        num_devices, by_expert = resolved.tensor_parallel_size, resolved.enable_expert_parallel
        split = Split(target, num_devices, by_expert)
        split.check()
        own = None
        if draft is not None:
            speculative = resolved.speculative_config
            own = Split(draft, speculative.draft_tensor_parallel_size if speculative is not None else 1, by_expert)
            try:
                own.check()
            except ConfigError as error:
                raise ConfigError(f"the draft: {error}, or set draft_tensor_parallel_size to 1") from None
        mesh = make_mesh(num_devices, resolved.data_parallel_size)
        return cls(mesh, ModelPlacing(mesh, split), ModelPlacing(mesh, own))

    def check(
        self,
        resolved: ResolvedConfig,
        head: HeadConfig | None,
        custom: Any,
        logits_processors: tuple[Any, ...],
        *,
        has_own_vocabulary: bool,
    ) -> None:
        """Raises ConfigError for what does not work over a model that is split.

        custom: a proposer of the user's own; has_own_vocabulary: a draft model's ids are not the target's.
        """
        if resolved.tensor_parallel_size == 1:
            return
        size = f"tensor_parallel_size={resolved.tensor_parallel_size}"
        if logits_processors:
            raise ConfigError(f"logits_processors need the whole vocabulary, which {size} splits; leave out either")
        if isinstance(custom, Proposer):
            raise ConfigError(
                f"a custom proposer on the device is not supported with {size}; give a HostProposer, or leave it at 1"
            )
        split = self.draft.split
        if split is None or not split.is_split:
            return
        speculative = resolved.speculative_config
        assert speculative is not None
        remedy = "set draft_tensor_parallel_size to 1"
        if has_own_vocabulary:
            raise ConfigError(f"a draft model with a vocabulary of its own needs all its logits on a device; {remedy}")
        if isinstance(head, EagleConfig) and head.id_map is not None:
            if head.draft_vocab_size % split.num_devices != 0:
                raise ConfigError(
                    f"the draft vocabulary of {head.draft_vocab_size} must be a multiple of the devices; {remedy}"
                )
            if speculative.draft_sample_method == "probabilistic":
                raise ConfigError(f"drawn drafts over a draft vocabulary of its own cannot be split; {remedy}")

    def whole(self, weights: Any) -> Any:
        """The same, with what no `put` has brought to the mesh on every device of it."""
        if self.mesh is None:
            return weights
        everywhere = NamedSharding(self.mesh, PartitionSpec())

        def place(leaf: jax.Array) -> jax.Array:
            is_there = isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == self.mesh
            if is_there:
                return leaf
            value = np.asarray(leaf)  # every process has all of it, and hands each of its devices a copy
            return jax.make_array_from_callback(value.shape, everywhere, lambda index: value[index])

        return jax.tree.map(place, weights)

    def state_maker(self, make: Callable[[], DecodeState]) -> Callable[[], DecodeState]:
        """Makes states where they are to lie: pages with their heads, everything else on every device of a group, and
        of each group its own, along an axis in front."""
        mesh = self.mesh
        if mesh is None:
            return make
        groups = (DATA,) if DATA in mesh.axis_names else ()

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            del leaf
            names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
            is_pool, is_draft = "pool" in names, names[0] == "proposer"
            spec = (self.draft if is_draft else self.target).pool_spec if is_pool else PartitionSpec()
            return NamedSharding(mesh, PartitionSpec(*groups, *spec))

        def make_all() -> DecodeState:
            sizes = tuple(mesh.shape[name] for name in groups)
            return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*sizes, *leaf.shape)), make())

        return jax.jit(make_all, out_shardings=jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(make)))

    def spread(self, weights: Any, state: DecodeState) -> Spread:
        """How programs over them run."""
        return Spread() if self.mesh is None else Spread(self.mesh, specs_of(weights), specs_of(state))
