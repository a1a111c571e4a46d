"""Device. Random keys as plain uint32 words, and the counter hash that every draw in jaxspec is made of.

A draw is named, never sequenced: which request, where in it, and what for. So it cannot depend on the row's
slot, its neighbours, how often the program ran before, or how the vocabulary is sharded.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA  # Threefish's C240, truncated: the third key word is k0 ^ k1 ^ this


class Purpose:
    """What a draw is for: draws of one token with different purposes are independent. At most 16."""

    ACCEPT = 0
    RECOVER = 1
    BONUS = 2
    DRAFT = 3
    COUPLED = 4


def threefry2x32(key_lo: Any, key_hi: Any, count_lo: Any, count_hi: Any) -> tuple[Any, Any]:
    """The Threefry-2x32 hash, 20 rounds, of two key words and two counter words.

    Args: uint32 arrays that broadcast together; all numpy (host) or all jax (device).
    Returns: two uint32 arrays of the broadcast shape.
    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    keys = (key_lo, key_hi, key_lo ^ key_hi ^ _KEY_PARITY)
    x0 = count_lo + key_lo
    x1 = count_hi + key_hi
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + (group + 1))
    return x0, x1


def request_key(seed: int, choice: int = 0) -> np.ndarray:
    """The key of one choice (of `n`) of a request, on the host: uint32[2], a function of seed (mod 2^64) and choice."""
    seed_word, seed_high, index, zero = (
        np.array([word & 0xFFFFFFFF], np.uint32) for word in (seed, seed >> 32, choice, 0)
    )
    return np.concatenate(threefry2x32(seed_word, seed_high, index, zero))


def token_key(key_B2: jax.Array, anchor: jax.Array, offset: jax.Array | int, purpose: jax.Array | int) -> jax.Array:
    """The key of one draw for one token.

    Args:
        key_B2: uint32[..., 2] request keys.
        anchor: i32, tokens committed when the round began. For COUPLED: the token's own position, and offset 0,
            so that the draw does not depend on how rounds were cut.
        offset: i32 0..K, how far past the anchor the token is.
        purpose: one of `Purpose`.
    Returns: uint32[..., 2] of the broadcast shape.
    """
    counter = jnp.asarray(offset, jnp.int32) * 16 + jnp.asarray(purpose, jnp.int32)
    words = jnp.broadcast_arrays(key_B2[..., 0], key_B2[..., 1], _as_word(anchor), _as_word(counter))
    return jnp.stack(threefry2x32(*words), axis=-1)


def uniform(key_B2: jax.Array) -> jax.Array:
    """f32[...] in (0, 1), never 0 and never 1: the midpoints of a grid of 2^23 cells. Reads the key's first word."""
    return _unit(key_B2[..., 0])


def gumbel(key_B2: jax.Array, vocab_ids: jax.Array) -> jax.Array:
    """Standard Gumbel noise for vocabulary ids under a key: argmax(log p + noise) draws from p.

    The noise of an id is a hash of (key, id) alone, so a shard of the vocabulary computes just its own part.

    Args:
        key_B2: uint32[..., 2].
        vocab_ids: i32[..., V], leading axes those of the key (or of size one).
    Returns: f32[..., V].
    """
    ids = _as_word(vocab_ids)
    word, _ = threefry2x32(key_B2[..., 0:1], key_B2[..., 1:2], ids, jnp.zeros_like(ids))
    return -jnp.log(-jnp.log(_unit(word)))


def _as_word(value: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(jnp.asarray(value, jnp.int32), jnp.uint32)


def _unit(word: jax.Array) -> jax.Array:
    cell = (word >> 9).astype(jnp.int32).astype(jnp.float32)  # through int32: no backend lacks that conversion
    return (cell + 0.5) * jnp.float32(2**-23)
