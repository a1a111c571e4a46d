"""Device. The axis key, and the pytrees that cross rooms.

Axis letters, everywhere: an array's name ends in its axes, in this order.

    B  rows (requests in a batch)      L  layers
    K  drafts per row                  D  model width
    J  verified positions, K + 1       F  feed-forward width
    N  flattened drafts (padded)       Q  query heads
    T  tokens of a row in one pass     G  key/value heads
    V  vocabulary                      H  head size
    P  pages in the pool               S  slots in a page
    M  pages a row may hold            C  tokens a row may hold
    R  flattened verified positions, B * J; in the engine's row tables, their rows
    W  stop ids a row may have         E  entries of a row's logit_bias
    Z  bad words a row may have        Y  tokens of a bad word
    U  32-bit words of a mask over V   X  what a docstring says
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import struct


@dataclass(frozen=True)
class ArraySpec:
    """One parameter before it exists: shardings, random weights, loading and memory estimates derive from it.

    shape: sizes; dtype: a numpy/JAX dtype; axes: one logical axis name per dimension;
    init_scale: standard deviation of random weights, 0.0 meaning ones (norms);
    parts: of a first axis that joins several, their logical axes and sizes in order.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]
    init_scale: float = 0.02
    parts: tuple[tuple[str, int], ...] = ()


@struct.dataclass
class Int8Weight:
    """A linear map kept as integers: weight = values * scale, a scale an output channel. `linear` multiplies with it.

    dtype is what the products are taken in; every int8 is exact in bfloat16 and in float32.
    """

    values_oi: jax.Array  # i8, -127..127
    scale_o: jax.Array  # f32, above 0
    dtype: str = struct.field(pytree_node=False)  # "bfloat16" or "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """[o, i], as of the weight it stands for."""
        return self.values_oi.shape


@struct.dataclass
class Int8Pool:
    """A page pool kept as integers: entry = values * scale, a scale a slot and head; `write_entries` rounds
    what it is given."""

    values_PGSH: jax.Array  # i8, -127..127
    scale_PGS: jax.Array  # f32, above 0 where a slot was written

    @property
    def shape(self) -> tuple[int, ...]:
        """[P, heads, S, H], as of the pool it stands for."""
        return self.values_PGSH.shape


@struct.dataclass
class ChainPool:
    """What passes that are differentiated keep in place of pages: each token's entries, as they are.

    A row holds T chains side by side. A chain's first token is the row's at its own place; a later pass has one more
    token of every chain (training-time test), and sees what `jaxspec.models.chains` says.
    """

    past: tuple[jax.Array, ...]  # f32[L, B, T, heads, H] of each pass that is over
    now_LBTGH: jax.Array | None  # f32, of the pass that runs; None where no later pass will read it
    num_layers: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a pool that has a page a layer, so that a layer's first page is its number."""
        return self.num_layers, 0, 0, 0


@struct.dataclass
class BlockPool:
    """What passes over blocks of guesses see when they are differentiated: of a row's tokens those before the block,
    and all of the block. Row r of such a pass is the block r % (rows / B) of the text r // (rows / B)."""

    context_LBTGH: jax.Array  # f32, entries of B texts' tokens at positions 0..T-1
    num_layers: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a `ChainPool`."""
        return self.num_layers, 0, 0, 0


Pool = jax.Array | Int8Pool  # pages of one cache, [P, heads, S, H]
OpenPool = ChainPool | BlockPool  # in its place where gradients are to flow through attention


@struct.dataclass
class Drafts:
    """What a proposer guessed, at most K tokens a row.

    logits_BKV is None when the drafts are a point mass (n-gram, greedy): q(draft) = 1. Otherwise
    softmax(logits_BKV) is exactly the distribution the drafts were drawn from.
    """

    token_ids_BK: jax.Array  # i32, -1 past the row's count, never used as an index
    counts_B: jax.Array  # i32, 0..K
    logits_BKV: jax.Array | None = None


@struct.dataclass
class Verdict:
    """What the target made of the drafts."""

    token_ids_BJ: jax.Array  # i32: accepted drafts, then the recovered or bonus token, then -1
    num_accepted_B: jax.Array  # i32, 0..counts_B


@struct.dataclass
class SamplingTable:
    """How each row draws its tokens: the part of its sampling parameters that shapes a distribution, and its key."""

    temperature_B: jax.Array  # f32, 0 = a greedy row (top_k, top_p, min_p and the key are then not looked at)
    top_k_B: jax.Array  # i32, 0 = off
    top_p_B: jax.Array  # f32 in (0, 1], 1 = off
    min_p_B: jax.Array  # f32 in [0, 1], 0 = off
    presence_B: jax.Array  # f32, taken from the logit of each id that the output holds; 0 = off (greedy rows too)
    frequency_B: jax.Array  # f32, the same for each time it occurs; 0 = off
    repetition_B: jax.Array  # f32 > 0, divides a positive logit of an id in prompt or output, else multiplies; 1 = off
    key_B2: jax.Array  # u32, the request's key


@struct.dataclass
class TokenLogprobs:
    """Log-probabilities at J positions a row; what was not asked for holds zeros. X: the likeliest tokens kept."""

    chosen_BJ: jax.Array  # f32, of the token emitted at the position
    rank_BJ: jax.Array  # i32, 1 = no token is likelier
    top_ids_BJX: jax.Array  # i32, likeliest first
    top_BJX: jax.Array  # f32
