"""Host. The one table of which logical axis is split along which axis of the mesh, and what each device gets of it.

A device's part is whole by itself: of queries, keys and values its own heads one behind the other, of gate and up its
own features, so that its program is the one that a single device would run of a smaller model. What does not divide is
filled up with zeros, which add nothing; key heads that are fewer than the devices are repeated.
"""

from dataclasses import dataclass

import numpy as np
from jax.sharding import PartitionSpec

from jaxspec.config.model import ModelConfig
from jaxspec.errors import ConfigError
from jaxspec.shards import TENSOR
from jaxspec.types import ArraySpec

# Logical axis of an array -> axis of the mesh. What is not here every device has whole. Experts are split either by
# their number or by their width, as `enable_expert_parallel` says.
RULES = {
    "vocab": TENSOR,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "ffn": TENSOR,
    "expert": TENSOR,
    "expert_ffn": TENSOR,
}
_UNUSED = {True: "expert_ffn", False: "expert"}  # by whether whole experts are split among devices

Stretch = tuple[int, int, int]  # from, to, and how many zeros behind


@dataclass(frozen=True)
class Layout:
    """How one array lies on the mesh.

    spec: of the array as it lies; shape: its sizes then, what it is filled up with included. axis: the one that is
    split, None where it is not; stretches: for each device the pieces of that axis that it holds, in order.
    """

    spec: PartitionSpec
    shape: tuple[int, ...]
    axis: int | None = None
    stretches: tuple[tuple[Stretch, ...], ...] = ()


@dataclass(frozen=True)
class Split:
    """A model over a number of devices."""

    config: ModelConfig
    num_devices: int
    by_expert: bool = False

    @property
    def is_split(self) -> bool:
        return self.num_devices > 1

    @property
    def cache_heads(self) -> int:
        """Entries a token of one layer's cache, over all devices; latents are not split, for every head reads them."""
        if self.config.mla is not None or not self.is_split:
            return self.config.cache_heads[0]
        return 2 * sum(len(own) for own in self._kv_heads())

    @property
    def pool_spec(self) -> PartitionSpec:
        """Of a page pool [P, heads, S, H], and of the scales beside it."""
        return PartitionSpec() if self.config.mla is not None or not self.is_split else PartitionSpec(None, TENSOR)

    def layout(self, spec: ArraySpec) -> Layout:
        """Where the parts of an array go."""
        unused = _UNUSED[self.by_expert]
        split = [at for at, name in enumerate(spec.axes) if RULES.get(name) is not None and name != unused]
        if not self.is_split or not split:
            return Layout(PartitionSpec(), spec.shape)
        (axis,) = split
        parts = spec.parts if axis == 0 and spec.parts else ((spec.axes[axis], spec.shape[axis]),)
        devices = range(self.num_devices)
        stretches = tuple(
            tuple(piece for name, size, start in _with_starts(parts) for piece in self._pieces(name, size, start, at))
            for at in devices
        )
        lengths = {sum(end - start + zeros for start, end, zeros in own) for own in stretches}
        assert len(lengths) == 1, f"{spec=} gives devices parts of {lengths=}"
        shape = (*spec.shape[:axis], lengths.pop() * self.num_devices, *spec.shape[axis + 1 :])
        return Layout(PartitionSpec(*[None] * axis, TENSOR), shape, axis, stretches)

    def check(self) -> None:
        """Raises ConfigError for sizes that neither divide nor can be filled up to some use."""
        n, heads, groups = self.num_devices, self.config.num_heads, self._num_groups
        rule = None
        if heads < n:
            rule = f"must not exceed the model's {heads} attention heads; take {heads} or fewer"
        elif groups < n and (n % groups or heads % n):
            rule = (
                f"is more than the model's {groups} key heads, so it must be a multiple of them that divides its "
                f"{heads} heads; take {groups} or fewer"
            )
        elif self.by_expert and self.config.moe is not None and self.config.moe.num_experts < n:
            rule = f"must not exceed the {self.config.moe.num_experts} experts with enable_expert_parallel; take fewer"
        if rule is not None:
            raise ConfigError(f"tensor_parallel_size={n} {rule}")

    def _pieces(self, name: str, size: int, start: int, device: int) -> list[Stretch]:
        """What a device gets of an axis `name` that lies at start in the array's."""
        if name in ("heads", "kv_heads"):
            all_heads = self._heads() if name == "heads" else self._kv_heads()
            count = self._num_groups if name == "kv_heads" else self.config.num_heads
            unit = size // count
            return _joined([_stretch(head * unit, unit, size, start) for head in all_heads[device]])
        block = -(-size // self.num_devices)
        return [_stretch(device * block, block, size, start)]

    @property
    def _num_groups(self) -> int:
        return self.config.num_heads if self.config.mla is not None else self.config.num_kv_heads

    def _kv_heads(self) -> list[list[int]]:
        """Each device's key heads; numbers past the last are heads of zeros."""
        groups, n = self._num_groups, self.num_devices
        if groups < n and n % groups == 0 and self.config.num_heads % n == 0:
            return [[device * groups // n] for device in range(n)]
        each = -(-groups // n)
        return [list(range(device * each, (device + 1) * each)) for device in range(n)]

    def _heads(self) -> list[list[int]]:
        """Each device's query heads, those of its key heads."""
        groups, n, heads = self._num_groups, self.num_devices, self.config.num_heads
        if groups < n and n % groups == 0 and heads % n == 0:
            each = heads // n
            return [list(range(device * each, (device + 1) * each)) for device in range(n)]
        shared = heads // groups
        return [[group * shared + at for group in own for at in range(shared)] for own in self._kv_heads()]


def _with_starts(parts: tuple[tuple[str, int], ...]):
    starts = np.cumsum([0, *(size for _, size in parts)]).tolist()
    return [(name, size, start) for (name, size), start in zip(parts, starts, strict=False)]


def _stretch(first: int, length: int, size: int, start: int) -> Stretch:
    """`length` entries from `first` on of `size`, the ones past the end as zeros; counted from `start`."""
    first, last = min(first, size), min(first + length, size)
    return start + first, start + last, length - (last - first)


def _joined(pieces: list[Stretch]) -> list[Stretch]:
    """Neighbours as one piece: fewer reads."""
    out: list[Stretch] = []
    for start, end, zeros in pieces:
        if out and ((out[-1][1] == start and out[-1][2] == 0) or start == end):
            before = out.pop()
            out.append((before[0], end if start < end else before[1], before[2] + zeros))
        else:
            out.append((start, end, zeros))
    return out
