"""Device. Attention without pages, for passes that are differentiated: whole rows, and chains and blocks of guesses.

In pass 0 a row's T tokens see each other causally. In pass i > 0 token t is the i-th guess after position t: it sees
the row's own tokens up to t, and of the guesses those of its own chain.

    pass   chain t stands at   and sees
    0      t                   pass 0 at 0..t
    i      t + i               pass 0 at 0..t, passes 1..i at chain t

Source: Li et al. 2025 (EAGLE-3), section 3.2, training-time test.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.models.base import Place
from jaxspec.types import BlockPool, ChainPool

_MASKED = -1e30  # finite: a masked score's gradient is 0, not NaN


def new_chains(num_layers: int, shape_BTGH: tuple[int, ...] | None = None) -> ChainPool:
    """For pass 0. shape_BTGH: of a layer's entries, where later passes are to read them; None keeps nothing."""
    now = None if shape_BTGH is None else jnp.zeros((num_layers, *shape_BTGH), jnp.float32)
    return ChainPool(past=(), now_LBTGH=now, num_layers=num_layers)


def next_pass(pool: ChainPool) -> ChainPool:
    """For the pass after the one that this pool came out of."""
    assert pool.now_LBTGH is not None
    return dataclasses.replace(pool, past=(*pool.past, pool.now_LBTGH), now_LBTGH=jnp.zeros_like(pool.now_LBTGH))


def attend_chains(
    q_BTQH: jax.Array,
    entries_BTGH: jax.Array,
    pool: ChainPool,
    place: Place,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    value_size: int | None,
) -> tuple[jax.Array, ChainPool]:
    """As `jaxspec.models.attention.attend`, whose arguments these are; the layer's first page is its number."""
    B, T, Q, H = q_BTQH.shape
    layer = place.page_offset
    entries_BTGH = entries_BTGH.astype(jnp.float32)
    if pool.now_LBTGH is not None:
        now_LBTGH = jax.lax.dynamic_update_index_in_dim(pool.now_LBTGH, entries_BTGH, layer, 0)
        pool = dataclasses.replace(pool, now_LBTGH=now_LBTGH)
    passes = [jax.lax.dynamic_index_in_dim(past, layer, 0, keepdims=False) for past in pool.past]
    passes.append(entries_BTGH)
    step = len(pool.past)
    if value_size is None:
        keys, values = zip(*(jnp.split(entries, 2, axis=2) for entries in passes), strict=True)
    else:
        keys, values = passes, [entries[..., :value_size] for entries in passes]
    G = keys[0].shape[2]
    q_BTGRH = (q_BTQH.astype(jnp.float32) * scale).reshape(B, T, G, Q // G, H)

    def capped(scores: jax.Array) -> jax.Array:
        return scores if softcap is None else softcap * jnp.tanh(scores / softcap)

    t_T1, s_1T = jnp.arange(T)[:, None], jnp.arange(T)[None, :]
    visible_TT = s_1T <= t_T1
    if window is not None:
        visible_TT &= t_T1 + step - s_1T < window
    scores_BGRTS = capped(jnp.einsum("btgrh,bsgh->bgrts", q_BTGRH, keys[0]))
    scores_BGRTS = jnp.where(visible_TT[None, None, None], scores_BGRTS, _MASKED)
    own = []
    for i in range(1, step + 1):
        score_BGRT = capped(jnp.einsum("btgrh,btgh->bgrt", q_BTGRH, keys[i]))
        own.append(score_BGRT if window is None or step - i < window else jnp.full_like(score_BGRT, _MASKED))
    if own:
        scores_BGRTS = jnp.concatenate([scores_BGRTS, jnp.stack(own, axis=-1)], axis=-1)
    weight_BGRTS = jax.nn.softmax(scores_BGRTS, axis=-1)
    out_BTGRU = jnp.einsum("bgrts,bsgu->btgru", weight_BGRTS[..., :T], values[0])
    for i in range(1, step + 1):
        out_BTGRU = out_BTGRU + jnp.einsum("bgrt,btgu->btgru", weight_BGRTS[..., T + i - 1], values[i])
    return out_BTGRU.reshape(B, T, Q, -1), pool


def attend_block(
    q_RTQH: jax.Array,
    entries_RTGH: jax.Array,
    pool: BlockPool,
    place: Place,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    value_size: int | None,
) -> tuple[jax.Array, BlockPool]:
    """As `attend`, of blocks of T tokens that end at each row's last position; R rows, A to a text. A query sees keys
    up to its own position, which a layer that is not causal puts at the block's end.
    """
    assert (window, softcap, value_size) == (None, None, None)
    R, T, Q, H = q_RTQH.shape
    context_BSGH = jax.lax.dynamic_index_in_dim(pool.context_LBTGH, place.page_offset, 0, keepdims=False)
    B, S, G = *context_BSGH.shape[:2], context_BSGH.shape[2] // 2
    A = R // B
    key_BSGH, value_BSGH = jnp.split(context_BSGH, 2, axis=2)
    own_key, own_value = (x.reshape(B, A, T, G, H) for x in jnp.split(entries_RTGH.astype(jnp.float32), 2, axis=2))
    q = (q_RTQH.astype(jnp.float32) * scale).reshape(B, A, T, G, Q // G, H)
    position_BAT = place.tokens.positions_BT.reshape(B, A, T)
    first_BA1 = jnp.max(position_BAT, axis=2, keepdims=True) - (T - 1)
    own_position_BAT = first_BA1 + jnp.arange(T, dtype=jnp.int32)[None, None]
    before = jnp.arange(S, dtype=jnp.int32)[None, None] < first_BA1  # [B, A, S]
    scores = jnp.einsum("batgrh,bsgh->bagrts", q, key_BSGH)
    scores = jnp.where(before[:, :, None, None, None], scores, _MASKED)
    own = jnp.einsum("batgrh,baugh->bagrtu", q, own_key)
    sees = own_position_BAT[:, :, None] <= position_BAT[:, :, :, None]  # [B, A, T, T]
    own = jnp.where(sees[:, :, None, None], own, _MASKED)
    weight = jax.nn.softmax(jnp.concatenate([scores, own], axis=-1), axis=-1)
    out = jnp.einsum("bagrts,bsgh->batgrh", weight[..., :S], value_BSGH)
    out = out + jnp.einsum("bagrtu,baugh->batgrh", weight[..., S:], own_value)
    return out.reshape(R, T, Q, H), pool
