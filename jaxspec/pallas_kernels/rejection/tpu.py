"""Device. The rejection kernels as a TPU runs them: two sweeps over tiles of the vocabulary, logits in, tokens out.

Pass 1 visits every flattened draft: the log-probability of the draft under target and drafter, the norms of both rows,
and the arg-max (noised under the coupled rule); out comes whether the draft stands. Then the segments are walked, and
pass 2 visits one row a request, where it draws from the residual, from the target, or takes the arg-max. Noise is a
counter hash of (key, id), made where it is used: no [N, V] array exists besides the logits.

Which row a program reads is data: the index arrays are prefetched, and the block specs look them up.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxspec.pallas_kernels.rejection.rules import COUPLED, STANDARD

_TILE = 4096
_LARGEST = 3.4028234663852886e38
_NOT_AN_ID = 2.0**24  # ids travel as float32 where they are reduced: exact up to here

# What pass 2 makes of a row's logits before the arg-max.
_PLAIN, _NOISED, _WITHOUT_DRAFT, _EXCESS = 0, 1, 2, 3


def reject(
    logits_RV, draft_logits_NV, draft_token_ids_N, target_rows_N, draft_rows_N, bonus_rows_B, cu_num_draft_tokens_B,
    rule_R, temperature_R, cutoff_R, accept_uniform_R, noise_key_R2, *, interpret: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.reject`, whose arguments these are."""
    num_rows, num_drafts = bonus_rows_B.shape[0], draft_token_ids_N.shape[0]
    vocab_size = logits_RV.shape[1]
    words_R2 = lax.bitcast_convert_type(noise_key_R2, jnp.int32)
    target_rows_N = jnp.clip(target_rows_N, 0, logits_RV.shape[0] - 1)

    starts_B = cu_num_draft_tokens_B - jnp.diff(cu_num_draft_tokens_B, prepend=jnp.int32(0))
    if num_drafts == 0:
        num_accepted_B = jnp.zeros((num_rows,), jnp.int32)
        cut_rows_B, cut_draft_rows_B, cut_ids_B = bonus_rows_B, num_accepted_B, num_accepted_B
        log_norm_B = draft_log_norm_B = jnp.zeros((num_rows,), jnp.float32)
        is_bonus_B = jnp.ones((num_rows,), bool)
        draft_logits_NV = None
    else:
        stands_N, log_norm_N, draft_log_norm_N = _judge_drafts(
            logits_RV, draft_logits_NV, target_rows_N, draft_rows_N, draft_token_ids_N, rule_R, temperature_R, cutoff_R,
            words_R2[:, 0], words_R2[:, 1], jnp.log(accept_uniform_R), interpret=interpret,
        )  # fmt: skip
        num_accepted_B = _walk_segments(stands_N, starts_B, cu_num_draft_tokens_B)
        is_bonus_B = starts_B + num_accepted_B == cu_num_draft_tokens_B
        cut_B = jnp.minimum(starts_B + num_accepted_B, num_drafts - 1)
        cut_rows_B = jnp.where(is_bonus_B, bonus_rows_B, target_rows_N[cut_B])
        cut_draft_rows_B, cut_ids_B = draft_rows_N[cut_B], draft_token_ids_N[cut_B]
        log_norm_B, draft_log_norm_B = log_norm_N[cut_B], draft_log_norm_N[cut_B]

    rule_B = rule_R[cut_rows_B]
    is_placeholder_B = (cut_ids_B < 0) | (cut_ids_B >= vocab_size)
    residual = _WITHOUT_DRAFT if draft_logits_NV is None else _EXCESS
    mode_B = jnp.where(is_bonus_B | is_placeholder_B, _NOISED, residual)
    mode_B = jnp.where(rule_B == STANDARD, mode_B, jnp.where(rule_B == COUPLED, _NOISED, _PLAIN)).astype(jnp.int32)
    token_ids_B = _draw_tokens(
        logits_RV, draft_logits_NV, cut_rows_B, cut_draft_rows_B, cut_ids_B, mode_B,
        temperature_R[cut_rows_B], cutoff_R[cut_rows_B], words_R2[cut_rows_B, 0], words_R2[cut_rows_B, 1], log_norm_B,
        draft_log_norm_B, interpret=interpret,
    )  # fmt: skip
    return num_accepted_B, token_ids_B


def _walk_segments(stands_N, starts_B, ends_B) -> jax.Array:
    """How many drafts stand in each segment before the first that does not."""

    def step(state):
        at_B, is_open_B = state
        is_open_B = is_open_B & (at_B < ends_B)
        is_open_B = is_open_B & (stands_N[jnp.minimum(at_B, stands_N.shape[0] - 1)] != 0)
        return at_B + is_open_B.astype(jnp.int32), is_open_B

    at_B, _ = lax.while_loop(lambda state: jnp.any(state[1]), step, (starts_B, jnp.ones(starts_B.shape, bool)))
    return at_B - starts_B


def _judge_drafts(
    logits_RV, draft_logits_NV, target_rows_N, draft_rows_N, draft_token_ids_N, rule_R, temperature_R, cutoff_R,
    key_lo_R, key_hi_R, log_uniform_R, *, interpret: bool,
):  # fmt: skip
    num_drafts, vocab_size = draft_token_ids_N.shape[0], logits_RV.shape[1]
    prefetched = (
        target_rows_N, draft_rows_N, draft_token_ids_N, rule_R, temperature_R, cutoff_R, key_lo_R, key_hi_R,
        log_uniform_R,
    )  # fmt: skip
    tile = min(_TILE, vocab_size)
    in_specs = [pl.BlockSpec((1, 1, tile), lambda n, t, target_rows, *_: (target_rows[n], 0, t))]
    inputs = [logits_RV[:, None, :]]
    if draft_logits_NV is not None:
        in_specs.append(pl.BlockSpec((1, 1, tile), lambda n, t, _, draft_rows, *__: (draft_rows[n], 0, t)))
        inputs.append(draft_logits_NV[:, None, :])
    whole = pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.pallas_call(
        functools.partial(
            _judge_kernel, vocab_size=vocab_size, tile=tile, has_draft_logits=draft_logits_NV is not None
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(num_drafts, pl.cdiv(vocab_size, tile)),
            in_specs=in_specs,
            out_specs=[whole, whole, whole],
            scratch_shapes=[pltpu.SMEM((8,), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_drafts,), jnp.int32),
            jax.ShapeDtypeStruct((num_drafts,), jnp.float32),
            jax.ShapeDtypeStruct((num_drafts,), jnp.float32),
        ],
        interpret=interpret,
        name="judge_drafts",
    )(*prefetched, *inputs)


# Slots of pass 1's scratch: running statistics of the row at hand.
_PEAK, _SUM, _DRAFT_PEAK, _DRAFT_SUM, _DRAFTED, _DRAFT_DRAFTED, _BEST, _BEST_ID = range(8)


def _judge_kernel(
    # Prefetched
    target_rows_ref,  # i32[N]
    draft_rows_ref,  # i32[N]
    draft_token_ids_ref,  # i32[N]
    rule_ref,  # i32[R]
    temperature_ref,  # f32[R]
    cutoff_ref,  # f32[R]
    key_lo_ref,  # i32[R]
    key_hi_ref,  # i32[R]
    log_uniform_ref,  # f32[R]
    # Inputs, outputs, scratch
    *refs,  # logits f32[1, 1, tile], (draft logits [1, 1, tile]); stands i32[N], norms f32[N] twice; state f32[8]
    vocab_size: int,
    tile: int,
    has_draft_logits: bool,
):
    logits_ref, draft_logits_ref = refs[0], refs[1] if has_draft_logits else None
    stands_ref, log_norm_ref, draft_log_norm_ref, state_ref = refs[-4:]
    n, t = pl.program_id(0), pl.program_id(1)
    row, draft_id = target_rows_ref[n], draft_token_ids_ref[n]
    ids = t * tile + lax.broadcasted_iota(jnp.int32, (1, tile), 1)

    @pl.when(t == 0)
    def _():
        for slot in (_PEAK, _DRAFT_PEAK, _DRAFTED, _DRAFT_DRAFTED, _BEST):
            state_ref[slot] = -jnp.inf
        for slot in (_SUM, _DRAFT_SUM, _BEST_ID):
            state_ref[slot] = 0.0

    x = _target_tile(logits_ref, ids, vocab_size, temperature_ref[row], cutoff_ref[row])
    _add_to_norm(state_ref, _PEAK, _SUM, x)
    state_ref[_DRAFTED] = jnp.maximum(state_ref[_DRAFTED], jnp.max(jnp.where(ids == draft_id, x, -jnp.inf)))
    if has_draft_logits:
        y = _draft_tile(draft_logits_ref, ids, vocab_size)
        _add_to_norm(state_ref, _DRAFT_PEAK, _DRAFT_SUM, y)
        drafted = jnp.max(jnp.where(ids == draft_id, y, -jnp.inf))
        state_ref[_DRAFT_DRAFTED] = jnp.maximum(state_ref[_DRAFT_DRAFTED], drafted)

    @pl.when(rule_ref[row] == COUPLED)
    def _():
        _add_to_argmax(state_ref, _BEST, _BEST_ID, x + _gumbel(key_lo_ref[row], key_hi_ref[row], ids), ids)

    @pl.when(rule_ref[row] != COUPLED)
    def _():
        _add_to_argmax(state_ref, _BEST, _BEST_ID, x, ids)

    @pl.when(t == pl.num_programs(1) - 1)
    def _():
        log_norm = state_ref[_PEAK] + _log(state_ref[_SUM])
        logprob_target = state_ref[_DRAFTED] - log_norm
        draft_log_norm, logprob_draft = 0.0, 0.0
        if has_draft_logits:
            draft_log_norm = state_ref[_DRAFT_PEAK] + _log(state_ref[_DRAFT_SUM])
            logprob_draft = state_ref[_DRAFT_DRAFTED] - draft_log_norm
        is_likely = (logprob_target - logprob_draft > log_uniform_ref[row]) & (logprob_target > -jnp.inf)
        is_likely = is_likely & (logprob_draft > -jnp.inf)
        is_same = state_ref[_BEST_ID].astype(jnp.int32) == draft_id
        stands = jnp.where(rule_ref[row] == STANDARD, is_likely, is_same) & (draft_id >= 0) & (draft_id < vocab_size)
        stands_ref[n] = stands.astype(jnp.int32)
        log_norm_ref[n] = log_norm
        draft_log_norm_ref[n] = draft_log_norm


def _draw_tokens(
    logits_RV, draft_logits_NV, rows_B, draft_rows_B, draft_ids_B, mode_B, temperature_B, cutoff_B, key_lo_B, key_hi_B,
    log_norm_B, draft_log_norm_B, *, interpret: bool,
):  # fmt: skip
    num_rows, vocab_size = rows_B.shape[0], logits_RV.shape[1]
    prefetched = (
        rows_B, draft_rows_B, draft_ids_B, mode_B, temperature_B, cutoff_B, key_lo_B, key_hi_B, log_norm_B,
        draft_log_norm_B,
    )  # fmt: skip
    tile = min(_TILE, vocab_size)
    in_specs = [pl.BlockSpec((1, 1, tile), lambda b, t, rows, *_: (rows[b], 0, t))]
    inputs = [logits_RV[:, None, :]]
    if draft_logits_NV is not None:
        in_specs.append(pl.BlockSpec((1, 1, tile), lambda b, t, _, draft_rows, *__: (draft_rows[b], 0, t)))
        inputs.append(draft_logits_NV[:, None, :])
    return pl.pallas_call(
        functools.partial(_draw_kernel, vocab_size=vocab_size, tile=tile, has_draft_logits=draft_logits_NV is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(num_rows, pl.cdiv(vocab_size, tile)),
            in_specs=in_specs,
            out_specs=pl.BlockSpec(memory_space=pltpu.SMEM),
            scratch_shapes=[pltpu.SMEM((2,), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        interpret=interpret,
        name="draw_tokens",
    )(*prefetched, *inputs)


def _draw_kernel(
    # Prefetched
    rows_ref,  # i32[B], read by the block specs
    draft_rows_ref,  # i32[B], likewise
    draft_ids_ref,  # i32[B]
    mode_ref,  # i32[B]
    temperature_ref,  # f32[B]
    cutoff_ref,  # f32[B]
    key_lo_ref,  # i32[B]
    key_hi_ref,  # i32[B]
    log_norm_ref,  # f32[B]
    draft_log_norm_ref,  # f32[B]
    # Inputs, outputs, scratch
    *refs,  # logits f32[1, 1, tile], (draft logits [1, 1, tile]); token ids i32[B]; state f32[2]
    vocab_size: int,
    tile: int,
    has_draft_logits: bool,
):
    del rows_ref, draft_rows_ref
    logits_ref, draft_logits_ref = refs[0], refs[1] if has_draft_logits else None
    token_ids_ref, state_ref = refs[-2:]
    b, t = pl.program_id(0), pl.program_id(1)
    mode = mode_ref[b]
    ids = t * tile + lax.broadcasted_iota(jnp.int32, (1, tile), 1)

    @pl.when(t == 0)
    def _():
        state_ref[0] = -jnp.inf
        state_ref[1] = 0.0

    x = _target_tile(logits_ref, ids, vocab_size, temperature_ref[b], cutoff_ref[b])
    if has_draft_logits:
        logprob_target = x - log_norm_ref[b]
        logprob_draft = _draft_tile(draft_logits_ref, ids, vocab_size) - draft_log_norm_ref[b]
        excess = jnp.exp(logprob_target) - jnp.exp(logprob_draft)
        residual = jnp.where(excess > 0, jnp.log(excess), logprob_target - 1e4)
        x = jnp.where(mode == _EXCESS, residual, x)
    else:
        x = jnp.where((mode == _WITHOUT_DRAFT) & (ids == draft_ids_ref[b]), -jnp.inf, x)

    @pl.when(mode == _PLAIN)
    def _():
        _add_to_argmax(state_ref, 0, 1, x, ids)

    @pl.when(mode != _PLAIN)
    def _():
        _add_to_argmax(state_ref, 0, 1, x + _gumbel(key_lo_ref[b], key_hi_ref[b], ids), ids)

    @pl.when(t == pl.num_programs(1) - 1)
    def _():
        token_ids_ref[b] = state_ref[1].astype(jnp.int32)


def _target_tile(logits_ref, ids, vocab_size: int, temperature, cutoff):
    """The tile's kept logits: scaled, NaN and what lies past the vocabulary or below the cutoff as -inf."""
    x = logits_ref[0] / temperature
    x = jnp.where((ids < vocab_size) & (x == x), jnp.minimum(x, _LARGEST), -jnp.inf)
    return jnp.where(x >= cutoff, x, -jnp.inf)


def _draft_tile(draft_logits_ref, ids, vocab_size: int):
    y = draft_logits_ref[0].astype(jnp.float32)
    return jnp.where((ids < vocab_size) & (y == y), jnp.minimum(y, _LARGEST), -jnp.inf)


def _add_to_norm(state_ref, peak_slot: int, sum_slot: int, x) -> None:
    """Fold a tile into a running sum of exp(x - peak); nothing happens while all entries are -inf."""
    old = state_ref[peak_slot]
    peak = jnp.maximum(old, jnp.max(x))
    base = jnp.where(peak > -jnp.inf, peak, 0.0)
    total = jnp.sum(jnp.exp(x - base))
    state_ref[sum_slot] = state_ref[sum_slot] * _exp(old - base) + total
    state_ref[peak_slot] = peak


def _add_to_argmax(state_ref, best_slot: int, id_slot: int, score, ids) -> None:
    """Fold a tile into a running arg-max; the first of equals stays."""
    best = jnp.max(score)
    first = jnp.min(jnp.where(score == best, ids.astype(jnp.float32), _NOT_AN_ID))

    @pl.when(best > state_ref[best_slot])
    def _():
        state_ref[best_slot] = best
        state_ref[id_slot] = first


def _log(scalar):
    """The TPU's scalar core has no logarithm: through a vector."""
    return jnp.max(jnp.log(jnp.full((1, 128), scalar, jnp.float32)))


def _exp(scalar):
    return jnp.max(jnp.exp(jnp.full((1, 128), scalar, jnp.float32)))


def _gumbel(key_lo, key_hi, ids):
    """-log(-log u) with u from the first word of Threefry-2x32, 20 rounds, of (key, (id, 0)); in int32 arithmetic."""
    keys = (key_lo, key_hi, key_lo ^ key_hi ^ jnp.int32(0x1BD11BDA))
    a, b = ids + key_lo, jnp.full(ids.shape, key_hi, jnp.int32)
    for group, rotations in enumerate((((13, 15, 26, 6), (17, 29, 16, 24)) * 3)[:5]):
        for left in rotations:
            a = a + b
            b = a ^ (lax.shift_left(b, jnp.int32(left)) | lax.shift_right_logical(b, jnp.int32(32 - left)))
        a = a + keys[(group + 1) % 3]
        b = b + keys[(group + 2) % 3] + jnp.int32(group + 1)
    cell = lax.shift_right_logical(a, jnp.int32(9)).astype(jnp.float32)
    return -jnp.log(-jnp.log((cell + 0.5) * jnp.float32(2.0**-23)))
