"""Device. Programs of one device, or the same programs side by side on the devices of a mesh.

On a mesh a program is what one device runs over its parts (`jax.shard_map`), and the exchanges in it are those that
the functions themselves ask for (`jaxspec.shards`): the partitioner has nothing to guess, and gathers nothing. Along
the data axis nobody asks for any: each group of devices runs the program over rows and pages of its own, as if it were
alone. Its weights are the same; everything else that it is handed and gives has an axis of groups in front.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.shards import DATA, TENSOR
from jaxspec.types import Drafts

# What an argument or a result of a program is: large trees that lie where they lie, logits over the vocabulary, drafts
# whose logits are such, what stays with its group for another program, and small things that the host sends or reads.
# But for logits, weights and state, every device of a group has all of it.
Role = Literal["weights", "state", "logits", "drafts", "held", "small"]


@dataclass(frozen=True)
class Spread:
    """Where weights and state lie; mesh None: on one device."""

    mesh: Mesh | None = None
    weights: Any = None  # trees of PartitionSpec
    state: Any = None

    @property
    def num_groups(self) -> int:
        """Of devices, each with rows of its own."""
        return 1 if self.mesh is None else self.mesh.shape.get(DATA, 1)

    @property
    def has_far_groups(self) -> bool:
        """Whether a group may have no device in this process."""
        return self.mesh is not None and self.num_groups > 1 and self.mesh.is_multi_process

    def join(self, parts: Sequence[Any]) -> Any:
        """What a program takes, of what each group is handed: numpy."""
        if self.num_groups == 1:
            (only,) = parts
            return only
        return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)

    def same(self, part: Any) -> Any:
        """The same for every group."""
        return self.join([part] * self.num_groups)

    def shapes(self, part: Any) -> Any:
        """The same, before there is anything but shapes."""
        if self.num_groups == 1:
            return part
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((self.num_groups, *leaf.shape), leaf.dtype), part)

    def part(self, joined: Any, group: int) -> Any:
        """A group's part of what a program gave."""
        return joined if self.num_groups == 1 else jax.tree.map(lambda leaf: np.asarray(leaf)[group], joined)

    def jit(
        self, function: Callable, arguments: Sequence[Role], results: Role | Sequence[Role], *, donate: Any = ()
    ) -> Any:
        """`jax.jit` of a function that takes and returns what the roles say; `donate`: numbers of arguments.

        The function is one group's: it sees no axis of groups.
        """
        mesh = self.mesh
        if mesh is None:
            return jax.jit(function, donate_argnums=donate)

        def of(find: Callable[[Role], Any]) -> tuple[Any, Any]:
            given = find(results) if isinstance(results, str) else tuple(find(role) for role in results)
            return tuple(find(role) for role in arguments), given

        specs, out = of(self._spec)
        mapped = function if self.num_groups == 1 else _of_group(function, arguments)
        for axis in reversed(mesh.axis_names):  # groups outside, where what varies is no part of a type: it all does
            mapped = jax.shard_map(
                mapped,
                mesh=mesh if axis == mesh.axis_names[0] else None,
                in_specs=_along(axis, specs),
                out_specs=_along(axis, out),
                axis_names={axis},
                check_vma=axis == TENSOR,
            )
        lying, lying_out = of(self._spec_outside)
        return jax.jit(
            mapped, donate_argnums=donate, in_shardings=self._on(lying), out_shardings=self._on(lying_out)
        )  # fmt: skip

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
        assert self.mesh is not None
        first = () if self.num_groups == 1 else (DATA,)
        small = PartitionSpec(*first)
        logits = PartitionSpec(*first, None, None, TENSOR) if TENSOR in self.mesh.axis_names else small
        if role == "drafts":
            return Drafts(small, small, logits)  # pyright: ignore[reportArgumentType]
        trees = {"weights": self.weights, "state": self.state, "logits": logits}
        return trees.get(role, small)

    def _spec_outside(self, role: Role) -> Any:
        """Where it lies before and after the program: what process 0 sends or reads of groups that are not its own,
        every device has whole."""
        spec = self._spec(role)
        if not self.has_far_groups or role not in ("small", "drafts"):
            return spec
        whole = PartitionSpec()
        return Drafts(whole, whole, spec.logits_BKV) if role == "drafts" else whole  # pyright: ignore[reportArgumentType]

    def _on(self, specs: Any) -> Any:
        mesh = self.mesh
        assert mesh is not None
        return _of_specs(lambda spec: NamedSharding(mesh, spec), specs)


def specs_of(tree: Any) -> Any:
    """Where the arrays of a tree lie on their mesh."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, tree)


def _of_group(function: Callable, arguments: Sequence[Role]) -> Callable:
    """The function with an axis of one group in front of what it takes, but for weights, and of what it gives."""

    def run(*args: Any) -> Any:
        own = (
            arg if role == "weights" else jax.tree.map(lambda leaf: lax.squeeze(leaf, (0,)), arg)
            for role, arg in zip(arguments, args, strict=True)
        )
        return jax.tree.map(lambda leaf: lax.expand_dims(leaf, (0,)), function(*own))

    return run


def _along(axis: str, specs: Any) -> Any:
    """What the specs say of one axis of the mesh."""
    return _of_specs(lambda spec: PartitionSpec(*(name if name == axis else None for name in spec)), specs)


def _of_specs(change: Callable[[PartitionSpec], Any], specs: Any) -> Any:
    return jax.tree.map(change, specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
