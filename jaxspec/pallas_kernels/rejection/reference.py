"""Device. Rejection sampling in plain jnp: what CPU runs, and what the kernel is compared with."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.pallas_kernels.rejection.argmax import row_argmax, row_gumbel_argmax
from jaxspec.pallas_kernels.rejection.block import (
    joint_log_ratios,
    point_mass_residual_masses,
    residual_masses,
    thresholds,
)
from jaxspec.pallas_kernels.rejection.cutoff import row_cutoffs, scaled_logits
from jaxspec.pallas_kernels.rejection.penalties import Penalties, penalised
from jaxspec.pallas_kernels.rejection.rules import BLOCK, COUPLED, GREEDY, STANDARD


def reject(
    logits_RV: jax.Array,
    draft_logits_NV: jax.Array | None,
    draft_token_ids_N: jax.Array,
    target_rows_N: jax.Array,
    draft_rows_N: jax.Array,
    bonus_rows_B: jax.Array,
    cu_num_draft_tokens_B: jax.Array,
    rule_R: jax.Array,
    temperature_R: jax.Array,
    top_k_R: jax.Array,
    top_p_R: jax.Array,
    min_p_R: jax.Array,
    accept_uniform_R: jax.Array,
    noise_key_R2: jax.Array,
    accept_rate_N: jax.Array | None,
    penalties: Penalties | None,
    *,
    rules: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """See `api.reject`, whose arguments these are. Only what the batch's rules need is computed."""
    num_drafts, num_rows = draft_token_ids_N.shape[0], bonus_rows_B.shape[0]
    vocab_size = logits_RV.shape[-1]
    if penalties is not None:
        logits_RV = penalised(logits_RV, penalties, draft_token_ids_N, cu_num_draft_tokens_B)
    cutoff_R = row_cutoffs(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    can_draw = STANDARD in rules or BLOCK in rules
    has_drawn = jnp.any((rule_R == STANDARD) | (rule_R == BLOCK))

    pick_R = _picks(logits_RV, rule_R, temperature_R, cutoff_R, noise_key_R2, rules)

    rows_N = jnp.clip(target_rows_N, 0, logits_RV.shape[0] - 1)
    in_vocab_N = (draft_token_ids_N >= 0) & (draft_token_ids_N < vocab_size)
    nothing_N = jnp.zeros((num_drafts,), jnp.float32)

    def log_probs() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        ids_N = jnp.where(in_vocab_N, draft_token_ids_N, 0)
        log_norm_R = _log_norms(_kept_logits(logits_RV, temperature_R, cutoff_R))
        # Elements first, then the arithmetic of the whole array: [N] values are gathered, not [N, V].
        drafted_N = _kept_logits(logits_RV[rows_N, ids_N][:, None], temperature_R[rows_N], cutoff_R[rows_N])[:, 0]
        logprob_target_N = drafted_N - log_norm_R[rows_N]
        if draft_logits_NV is None:
            return logprob_target_N, nothing_N, log_norm_R, nothing_N
        draft_log_norm_N = _log_norms(_draft_logits(draft_logits_NV))
        logprob_draft_N = _draft_logits(draft_logits_NV[draft_rows_N, ids_N]) - draft_log_norm_N[draft_rows_N]
        return logprob_target_N, logprob_draft_N, log_norm_R, draft_log_norm_N

    nothing = (nothing_N, nothing_N, jnp.zeros_like(temperature_R), nothing_N)
    logprob_target_N, logprob_draft_N, log_norm_R, draft_log_norm_N = (
        lax.cond(has_drawn, log_probs, lambda: nothing) if can_draw else nothing
    )

    # A difference, not log u + log q: where p = q it is exactly 0, above log u whatever u is. NaN compares false.
    log_ratio_N = logprob_target_N - logprob_draft_N
    is_possible_N = in_vocab_N & (logprob_draft_N > -jnp.inf) & (logprob_target_N > -jnp.inf)

    def block() -> tuple[jax.Array, jax.Array]:
        # An empty segment marks what its neighbours mark too.
        is_first_N = _marks(num_drafts, cu_num_draft_tokens_B - num_drafts_B)
        is_end_N = _marks(num_drafts, jnp.where(cu_num_draft_tokens_B > 0, cu_num_draft_tokens_B - 1, num_drafts))
        before_N, after_N = joint_log_ratios(
            jnp.where(is_possible_N, log_ratio_N, -jnp.inf), is_first_N, jnp.max(num_drafts_B)
        )
        if draft_logits_NV is None:
            mass_N = jnp.where(in_vocab_N, point_mass_residual_masses(logprob_target_N, before_N), jnp.float32(0))
        else:
            x_NV = _kept_logits(logits_RV[rows_N], temperature_R[rows_N], cutoff_R[rows_N])
            y_NV = _draft_logits(draft_logits_NV[draft_rows_N])
            mass_N = residual_masses(
                x_NV - log_norm_R[rows_N][:, None], y_NV - draft_log_norm_N[draft_rows_N][:, None], before_N
            )
        # A placeholder ends the block: it was drawn from nothing, so nothing is owed for what it might have been.
        is_last_N = is_end_N | ~jnp.roll(in_vocab_N, -1)
        return before_N, thresholds(after_N, mass_N, is_last_N)

    num_drafts_B = jnp.diff(cu_num_draft_tokens_B, prepend=jnp.int32(0))
    uniform_N, rule_N, rule_B = accept_uniform_R[rows_N], rule_R[rows_N], rule_R[bonus_rows_B]
    log_joint_N = nothing_N
    if accept_rate_N is not None:
        is_accepted_N = in_vocab_N & (uniform_N < accept_rate_N)
    else:
        is_likely_N = is_possible_N & (log_ratio_N > jnp.log(uniform_N))
        is_accepted_N = jnp.where(rule_N == STANDARD, is_likely_N, in_vocab_N & (pick_R[rows_N] == draft_token_ids_N))
    num_accepted_B = _accepted_prefixes(is_accepted_N, cu_num_draft_tokens_B)
    if BLOCK in rules and num_drafts > 0:
        log_joint_N, threshold_N = lax.cond(jnp.any(rule_R == BLOCK), block, lambda: (nothing_N, nothing_N))
        longest_B = _longest_accepted(in_vocab_N & (uniform_N <= threshold_N), cu_num_draft_tokens_B)
        num_accepted_B = jnp.where(rule_B == BLOCK, longest_B, num_accepted_B)

    is_bonus_B = num_accepted_B == num_drafts_B
    if num_drafts == 0:
        cut_rows_B, cut_N = bonus_rows_B, None
    else:
        # The draft each row is cut at: its first rejected one; past them all (a bonus), any, and not looked at.
        cut_N = jnp.clip(cu_num_draft_tokens_B - num_drafts_B + num_accepted_B, 0, num_drafts - 1)
        cut_rows_B = jnp.where(is_bonus_B, bonus_rows_B, rows_N[cut_N])

    def draw() -> jax.Array:
        x_BV = _kept_logits(logits_RV[cut_rows_B], temperature_R[cut_rows_B], cutoff_R[cut_rows_B])
        key_B2 = noise_key_R2[cut_rows_B]
        if cut_N is None:
            return row_gumbel_argmax(x_BV, key_B2)
        is_drafted_BV = jnp.arange(vocab_size, dtype=jnp.int32)[None] == draft_token_ids_N[cut_N][:, None]
        if draft_logits_NV is None:
            residual_BV = jnp.where(is_drafted_BV, -jnp.inf, x_BV)
            is_whole_B = is_bonus_B
        else:
            draft_rows_B = draft_rows_N[cut_N]
            log_scale_B = jnp.where(rule_B == BLOCK, log_joint_N[cut_N], jnp.float32(0))
            logprob_target_BV = x_BV - log_norm_R[cut_rows_B][:, None] + log_scale_B[:, None]
            logprob_draft_BV = _draft_logits(draft_logits_NV[draft_rows_B]) - draft_log_norm_N[draft_rows_B][:, None]
            excess_BV = jnp.exp(logprob_target_BV) - jnp.exp(logprob_draft_BV)
            # Should rounding leave no excess at all, the target itself; below the smallest real excess till then.
            residual_BV = jnp.where(excess_BV > 0, jnp.log(excess_BV), logprob_target_BV - jnp.float32(1e4))
            # A draft that no draft distribution could have given (a placeholder) leaves the target as it is.
            is_whole_B = is_bonus_B | ~in_vocab_N[cut_N]
        return row_gumbel_argmax(jnp.where(is_whole_B[:, None], x_BV, residual_BV), key_B2)

    if not can_draw:
        return num_accepted_B, pick_R[cut_rows_B]
    drawn_B = lax.cond(has_drawn, draw, lambda: jnp.zeros((num_rows,), jnp.int32))
    return num_accepted_B, jnp.where((rule_B == STANDARD) | (rule_B == BLOCK), drawn_B, pick_R[cut_rows_B])


def _picks(logits_RV, rule_R, temperature_R, cutoff_R, noise_key_R2, rules: tuple[int, ...]) -> jax.Array:
    """What greedy and coupled rows would emit at every position; standard rows have no use for it."""

    def coupled() -> jax.Array:
        return row_gumbel_argmax(
            _kept_logits(logits_RV, temperature_R, cutoff_R), noise_key_R2, is_noised_R=rule_R == COUPLED
        )

    def greedy() -> jax.Array:
        return row_argmax(logits_RV)

    def nothing() -> jax.Array:
        return jnp.zeros(rule_R.shape, jnp.int32)

    plain = lambda: lax.cond(jnp.any(rule_R == GREEDY), greedy, nothing)  # noqa: E731
    return lax.cond(jnp.any(rule_R == COUPLED), coupled, plain) if COUPLED in rules else plain()


def _kept_logits(logits_RV: jax.Array, temperature_R: jax.Array, cutoff_R: jax.Array) -> jax.Array:
    x = scaled_logits(logits_RV, temperature_R)
    return jnp.where(x >= cutoff_R[:, None], x, -jnp.inf)


def _draft_logits(logits: jax.Array) -> jax.Array:
    y = logits.astype(jnp.float32)
    return jnp.where(jnp.isnan(y), -jnp.inf, jnp.minimum(y, jnp.finfo(jnp.float32).max))


def _log_norms(x_RV: jax.Array) -> jax.Array:
    """log sum exp; NaN for a row that holds -inf alone."""
    peak_R = x_RV.max(axis=-1)
    return peak_R + jnp.log(jnp.exp(x_RV - peak_R[:, None]).sum(axis=-1))


def _marks(num_drafts: int, places_B: jax.Array) -> jax.Array:
    """True at the places given; those past the end mark nothing."""
    return jnp.zeros((num_drafts,), jnp.bool_).at[places_B].set(True, mode="drop")


def _accepted_prefixes(is_accepted_N: jax.Array, cu_num_draft_tokens_B: jax.Array) -> jax.Array:
    """How many drafts of each segment come before its first rejected one."""
    num_drafts = is_accepted_N.shape[0]
    n = jnp.arange(num_drafts, dtype=jnp.int32)
    # The first rejected draft at or after each place, running back from the end; padding lies past every segment.
    rejected_N = lax.cummin(jnp.where(is_accepted_N, num_drafts, n), reverse=True)
    start_B = jnp.concatenate([jnp.zeros((1,), jnp.int32), cu_num_draft_tokens_B[:-1]])
    first_B = jnp.concatenate([rejected_N, jnp.full((1,), num_drafts, jnp.int32)])[start_B]
    return jnp.minimum(first_B, cu_num_draft_tokens_B) - start_B


def _longest_accepted(is_accepted_N: jax.Array, cu_num_draft_tokens_B: jax.Array) -> jax.Array:
    """How many drafts of each segment come up to and with its last accepted one."""
    n = jnp.arange(is_accepted_N.shape[0], dtype=jnp.int32)
    accepted_N = lax.cummax(jnp.where(is_accepted_N, n, -1))
    start_B = jnp.concatenate([jnp.zeros((1,), jnp.int32), cu_num_draft_tokens_B[:-1]])
    last_B = jnp.concatenate([jnp.full((1,), -1, jnp.int32), accepted_N])[cu_num_draft_tokens_B]
    return jnp.maximum(last_B + 1 - start_B, 0)
