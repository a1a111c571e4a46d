"""Device. Paged attention in jnp: blocks of pages under one loop with a running softmax; what CPU runs."""

import jax
import jax.numpy as jnp

from jaxspec import shards

_BLOCK_TOKENS = 64  # at least; measured on CPU: 64 and 128 are alike, 256 and the whole row slower (docs/log.md)
_MASKED = -1e30  # finite, so that a row with no visible key gives zeros and not NaN


def paged_attention_reference(
    q_BTQH, pool_PGSH, pages_BM, positions_BT, *, scale, window, softcap=None, value_size=None, scale_PGS=None
):
    """The loop's length is the longest row's, so short contexts cost little whatever the table's width.

    A block that lies wholly past a row's length adds exact zeros to it: a row never depends on its neighbours.
    U is the size of a value.
    """
    B, T, Q, H = q_BTQH.shape
    heads, S = pool_PGSH.shape[1:3]
    G, U = (heads // 2, H) if value_size is None else (heads, value_size)
    pages_per_block = max(1, _BLOCK_TOKENS // S)
    M = -(-pages_BM.shape[1] // pages_per_block) * pages_per_block
    block_tokens = pages_per_block * S
    pages_BM = jnp.pad(pages_BM, ((0, 0), (0, M - pages_BM.shape[1])), constant_values=-1)
    pages_BM = jnp.maximum(pages_BM, 0)  # never used as data: keys there are masked

    R = (Q // G) * T  # the queries that share a key head
    q_BGRH = (q_BTQH * scale).reshape(B, T, G, Q // G, H).transpose(0, 2, 3, 1, 4).reshape(B, G, R, H)
    dtype = pool_PGSH.dtype if scale_PGS is None else jnp.float32
    q_BGRH = q_BGRH.astype(dtype)
    position_BR = jnp.broadcast_to(positions_BT[:, None, :], (B, Q // G, T)).reshape(B, R)
    last_B1 = jnp.max(positions_BT, axis=1, keepdims=True)

    def block(i, carry):
        max_BGR, sum_BGR, out_BGRU = carry
        ids = jax.lax.dynamic_slice_in_dim(pages_BM, i * pages_per_block, pages_per_block, axis=1)
        # [B, pages, heads, S, H]; with one page a block the transposition is none.
        kv = pool_PGSH[ids].astype(dtype).transpose(0, 2, 1, 3, 4).reshape(B, heads, block_tokens, H)
        if scale_PGS is not None:
            # A scale is constant along the features of its slot: it multiplies products, not the entries.
            entry_scale = scale_PGS[ids].transpose(0, 2, 1, 3).reshape(B, heads, 1, block_tokens)
        v = kv[:, G:] if value_size is None else kv[..., :U]
        key_position_1S = (i * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32))[None, :]
        distance_BRS = position_BR[:, :, None] - key_position_1S[:, None, :]
        visible_BRS = distance_BRS >= 0
        if window is not None:
            visible_BRS &= distance_BRS < window
        # Slots past the row's last token may hold anything, NaN included; 0 * NaN would spread it. Integers are none.
        if scale_PGS is None:
            v = jnp.where((key_position_1S <= last_B1)[:, None, :, None], v, jnp.zeros((), kv.dtype))
        scores = jnp.einsum("bgrh,bgsh->bgrs", q_BGRH, kv[:, :G], preferred_element_type=jnp.float32)
        if scale_PGS is not None:
            scores = scores * entry_scale[:, :G]
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible_BRS[:, None], scores, _MASKED)
        new_max = jnp.maximum(max_BGR, jnp.max(scores, axis=-1))
        weight = jnp.where(visible_BRS[:, None], jnp.exp(scores - new_max[..., None]), 0.0)
        decay = jnp.exp(max_BGR - new_max)
        by_value = weight.astype(v.dtype)
        if scale_PGS is not None:
            by_value = weight * jnp.where(visible_BRS[:, None], entry_scale[:, -G:], 0.0)
        value = jnp.einsum("bgrs,bgsh->bgrh", by_value, v, preferred_element_type=jnp.float32)
        return new_max, sum_BGR * decay + jnp.sum(weight, axis=-1), out_BGRU * decay[..., None] + value

    first = 0
    if window is not None:
        earliest = jnp.min(jnp.where(positions_BT >= 0, positions_BT, jnp.iinfo(jnp.int32).max))
        first = jnp.maximum(earliest - window + 1, 0) // block_tokens
    end = jnp.max(positions_BT) // block_tokens + 1
    carry = (
        jnp.full((B, G, R), _MASKED, jnp.float32),
        jnp.zeros((B, G, R), jnp.float32),
        jnp.zeros((B, G, R, U), jnp.float32),
    )
    carry = shards.split_like(carry, q_BTQH, pool_PGSH)
    _, sum_BGR, out_BGRU = jax.lax.fori_loop(first, end, block, carry)
    out_BGRU = out_BGRU / jnp.maximum(sum_BGR, 1e-30)[..., None]
    return out_BGRU.reshape(B, G, Q // G, T, U).transpose(0, 3, 1, 2, 4).reshape(B, T, Q, U)
