"""Device. Programs of one device, or the same programs side by side on the devices of a mesh.

On a mesh a program is what one device runs over its parts (`jax.shard_map`), and the exchanges in it are those that
the functions themselves ask for (`jaxspec.shards`): the partitioner has nothing to guess, and gathers nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.shards import TENSOR
from jaxspec.types import Drafts

# What an argument or a result of a program is: large trees that lie where they lie, logits over the vocabulary, drafts
# whose logits are such, and small things, which every device has whole.
Role = Literal["weights", "state", "logits", "drafts", "small"]


@dataclass(frozen=True)
class Spread:
    """Where weights and state lie; mesh None: on one device."""

    mesh: Mesh | None = None
    weights: Any = None  # trees of PartitionSpec
    state: Any = None

    def jit(
        self, function: Callable, arguments: Sequence[Role], results: Role | Sequence[Role], *, donate: Any = ()
    ) -> Any:
        """`jax.jit` of a function that takes and returns what the roles say; `donate`: numbers of arguments."""
        if self.mesh is None:
            return jax.jit(function, donate_argnums=donate)
        specs = tuple(self._spec(role) for role in arguments)
        out = self._spec(results) if isinstance(results, str) else tuple(self._spec(role) for role in results)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out)
        return jax.jit(mapped, donate_argnums=donate, in_shardings=self._on(specs), out_shardings=self._on(out))

    def abstract(self, tree: Any, role: Literal["weights", "state"]) -> Any:
        """The tree's shapes, and where they lie."""
        if self.mesh is None:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            tree,
            self._on(self._spec(role)),
        )

    def _spec(self, role: Role) -> Any:
        logits = PartitionSpec(None, None, TENSOR)
        if role == "drafts":
            return Drafts(PartitionSpec(), PartitionSpec(), logits)  # pyright: ignore[reportArgumentType]
        return {"weights": self.weights, "state": self.state, "logits": logits, "small": PartitionSpec()}[role]

    def _on(self, specs: Any) -> Any:
        mesh = self.mesh
        assert mesh is not None
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )


def specs_of(tree: Any) -> Any:
    """Where the arrays of a tree lie on their mesh."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)
