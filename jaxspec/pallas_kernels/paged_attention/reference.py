"""Device. Paged attention in jnp: a row's blocks of pages under one loop with a running softmax; what CPU runs."""

import jax
import jax.numpy as jnp

from jaxspec import shards

_BLOCK_TOKENS = 64  # at least; measured on CPU: 64 and 128 are alike, 256 and the whole row slower (docs/log.md)
_QUERIES = 64  # of a prompt, in a piece; measured on CPU: a quarter off the attention of 256
_MASKED = -1e30  # finite, so that a row with no visible key gives zeros and not NaN


def paged_attention_reference(
    q_BTQH, pool_PGSH, pages_BM, positions_BT, *, scale, window, softcap, value_size, scale_PGS, at_once
):
    """On CPU a row after the other, each as far as it goes: a batch costs what its rows hold, not its longest row times
    their number, and XLA's CPU backend is up to twice as slow at a product batched over rows and heads (docs/log.md).
    A prompt's queries go in pieces, none of which looks past its own last. Elsewhere, or if told so, all rows at once.
    Either way a row is computed alike whatever stands beside it.

    U is the size of a value.
    """
    pages_BM = jnp.maximum(pages_BM, 0)  # never used as data: keys there are masked

    def row(q_TQH, pages_M, positions_T):
        return _row(q_TQH * scale, pool_PGSH, scale_PGS, pages_M, positions_T, window, softcap, value_size)

    def in_turn(q_BTQH, pages_BM, positions_BT):
        B, T = positions_BT.shape
        N = B * T // _QUERIES if T % _QUERIES == 0 else B
        if N == 1:  # a loop around one row costs a tenth of it
            return row(q_BTQH[0], pages_BM[0], positions_BT[0])[None]
        pieces = q_BTQH.reshape(N, -1, *q_BTQH.shape[2:]), jnp.repeat(pages_BM, N // B, 0), positions_BT.reshape(N, -1)
        out = jax.lax.map(lambda piece: row(*piece), pieces)
        return out.reshape(B, T, *out.shape[2:])

    rows, all_rows = (q_BTQH, pages_BM, positions_BT), jax.vmap(row)
    return all_rows(*rows) if at_once else jax.lax.platform_dependent(*rows, cpu=in_turn, default=all_rows)


def _row(q_TQH, pool_PGSH, scale_PGS, pages_M, positions_T, window, softcap, value_size):
    """[T, Q, U]. A block that lies wholly past the row's length is not read, or adds exact zeros."""
    T, Q, H = q_TQH.shape
    heads, S = pool_PGSH.shape[1:3]
    G, U = (heads // 2, H) if value_size is None else (heads, value_size)
    pages_per_block = max(1, _BLOCK_TOKENS // S)
    M = -(-pages_M.shape[0] // pages_per_block) * pages_per_block
    block_tokens = pages_per_block * S
    pages_M = jnp.pad(pages_M, (0, M - pages_M.shape[0]))

    R = (Q // G) * T  # the queries that share a key head
    # A pool of bits is CPU's, whose float32 products of so few rows are quicker than bfloat16's (docs/log.md).
    dtype = jnp.float32 if jnp.issubdtype(pool_PGSH.dtype, jnp.integer) else pool_PGSH.dtype
    q_GRH = q_TQH.reshape(T, G, Q // G, H).transpose(1, 2, 0, 3).reshape(G, R, H).astype(dtype)
    position_R = jnp.broadcast_to(positions_T[None, :], (Q // G, T)).reshape(R)
    last = jnp.max(positions_T)

    def block(i, carry):
        max_GR, sum_GR, out_GRU = carry
        ids = jax.lax.dynamic_slice_in_dim(pages_M, i * pages_per_block, pages_per_block)
        kv = _joined(pool_PGSH, ids)
        if kv.dtype == jnp.uint16:
            kv = jax.lax.bitcast_convert_type(kv, jnp.bfloat16)
        kv = kv.astype(dtype)
        if scale_PGS is not None:
            # A scale is constant along the features of its slot: it multiplies products, not the entries.
            entry_scale = _joined(scale_PGS, ids)[:, None]
        v = kv[G:] if value_size is None else kv[..., :U]
        key_position_S = i * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
        distance_RS = position_R[:, None] - key_position_S[None]
        visible_RS = distance_RS >= 0
        if window is not None:
            visible_RS &= distance_RS < window
        # Slots past the row's last token may hold anything, NaN included; 0 * NaN would spread it. Integers are none.
        if scale_PGS is None:
            v = jnp.where((key_position_S <= last)[None, :, None], v, jnp.zeros((), kv.dtype))
        scores = jnp.einsum("grh,gsh->grs", q_GRH, kv[:G], preferred_element_type=jnp.float32)
        if scale_PGS is not None:
            scores = scores * entry_scale[:G]
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible_RS[None], scores, _MASKED)
        new_max = jnp.maximum(max_GR, jnp.max(scores, axis=-1))
        weight = jnp.where(visible_RS[None], jnp.exp(scores - new_max[..., None]), 0.0)
        decay = jnp.exp(max_GR - new_max)
        by_value = weight.astype(v.dtype)
        if scale_PGS is not None:
            by_value = weight * jnp.where(visible_RS[None], entry_scale[-G:], 0.0)
        value = jnp.einsum("grs,gsh->grh", by_value, v, preferred_element_type=jnp.float32)
        return new_max, sum_GR * decay + jnp.sum(weight, axis=-1), out_GRU * decay[..., None] + value

    first = 0
    if window is not None:
        earliest = jnp.min(jnp.where(positions_T >= 0, positions_T, jnp.iinfo(jnp.int32).max))
        first = jnp.maximum(earliest - window + 1, 0) // block_tokens
    carry = (
        jnp.full((G, R), _MASKED, jnp.float32),
        jnp.zeros((G, R), jnp.float32),
        jnp.zeros((G, R, U), jnp.float32),
    )
    carry = shards.split_like(carry, q_TQH, pool_PGSH)
    _, sum_GR, out_GRU = jax.lax.fori_loop(first, last // block_tokens + 1, block, carry)
    out_GRU = out_GRU / jnp.maximum(sum_GR, 1e-30)[..., None]
    return out_GRU.reshape(G, Q // G, T, U).transpose(2, 0, 1, 3).reshape(T, Q, U)


def _joined(pool_PGSX, ids):
    """The pages' slots one behind the other: [heads, pages * S, ...]."""
    if ids.shape[0] == 1:  # a slice, which XLA's CPU backend copies faster than it gathers
        return jax.lax.dynamic_index_in_dim(pool_PGSX, ids[0], keepdims=False)
    pages = jnp.moveaxis(pool_PGSX[ids], 0, 1)
    return pages.reshape(pages.shape[0], -1, *pages.shape[3:])
