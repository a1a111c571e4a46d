"""Device. Rejection sampling in plain jnp: what CPU runs, and what the kernel is compared with.

Drafts are judged front to back, a few rows of logits at a time, and what follows a rejected draft is never looked at:
a round costs what it commits, not B * (K + 1) rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import shards
from jaxspec.pallas_kernels.rejection.argmax import (
    finish_rows,
    gumbel_argmax,
    gumbel_argmax_among,
    row_argmax,
)
from jaxspec.pallas_kernels.rejection.block import (
    joint_log_ratios,
    point_mass_residual_masses,
    residual_masses,
    thresholds,
)
from jaxspec.pallas_kernels.rejection.candidates import candidates, entries_at
from jaxspec.pallas_kernels.rejection.cutoff import cutoffs_among, is_filtered, scaled_logits
from jaxspec.pallas_kernels.rejection.penalties import Penalties, penalised
from jaxspec.pallas_kernels.rejection.rules import BLOCK, COUPLED, GREEDY, STANDARD
from jaxspec.pallas_kernels.rejection.walk import walk

_FEW_ROWS = 8  # of logits: one request, say


class _Seen(NamedTuple):
    """What is known of rows of logits; of rows that nobody looked at, that their draft has no probability."""

    pick_R: jax.Array  # i32, what a greedy or coupled row would emit
    # Arrays too; None where no rule draws tokens
    cutoff_R: Any = None
    log_norm_R: Any = None  # of what the filters leave
    logprob_R: Any = None  # of the row's draft, by the target
    # None for point masses
    draft_log_norm_R: Any = None
    draft_logprob_R: Any = None  # of the row's draft, by the drafter


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
    edit: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    is_plain: jax.Array | None = None,
    *,
    rules: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """See `api.reject`, whose arguments these are. Only what the batch's rules need is computed."""
    num_drafts, num_requests = draft_token_ids_N.shape[0], bonus_rows_B.shape[0]
    num_rows, vocab_size = logits_RV.shape[0], shards.whole_size(logits_RV)
    can_draw = STANDARD in rules or BLOCK in rules

    rows_N = jnp.clip(target_rows_N, 0, num_rows - 1)
    in_vocab_N = (draft_token_ids_N >= 0) & (draft_token_ids_N < vocab_size)
    num_drafts_B = jnp.diff(cu_num_draft_tokens_B, prepend=jnp.int32(0))
    start_B, has_drafts = cu_num_draft_tokens_B - num_drafts_B, cu_num_draft_tokens_B[-1] > 0
    uniform_N, rule_N, rule_B = accept_uniform_R[rows_N], rule_R[rows_N], rule_R[bonus_rows_B]
    nothing_N = jnp.zeros((num_drafts,), jnp.float32)

    def paid(rows_X: jax.Array) -> jax.Array:
        """Rows of logits after edits and penalties."""

        def changed() -> jax.Array:
            x_XV = logits_RV[rows_X] if edit is None else edit(logits_RV[rows_X], rows_X)
            if penalties is None:
                return x_XV
            of_rows = penalties._replace(request_R=penalties.request_R[rows_X], offset_R=penalties.offset_R[rows_X])
            return penalised(x_XV, of_rows, draft_token_ids_N, cu_num_draft_tokens_B)

        return changed() if is_plain is None else lax.cond(is_plain, lambda: logits_RV[rows_X], changed)

    def scaled(rows_X: jax.Array) -> jax.Array:
        return scaled_logits(paid(rows_X), temperature_R[rows_X])

    def look(rows_X: jax.Array, n_X: jax.Array, is_on_X: jax.Array) -> _Seen:
        """Rows that judge the drafts n, or give a bonus; is_on_X: those that matter."""
        rule_X = jnp.where(is_on_X, rule_R[rows_X], GREEDY)
        filters = (
            jnp.where(is_on_X, top_k_R[rows_X], 0),
            jnp.where(is_on_X, top_p_R[rows_X], jnp.float32(1)),
            jnp.where(is_on_X, min_p_R[rows_X], jnp.float32(0)),
        )
        is_coupled_X = rule_X == COUPLED
        is_drawn_X = (rule_X == STANDARD) | (rule_X == BLOCK)
        key_X2, paid_XV = noise_key_R2[rows_X], paid(rows_X)
        off_X, zeros_X = jnp.full(rows_X.shape, -jnp.inf, jnp.float32), jnp.zeros(rows_X.shape, jnp.float32)

        def sampled() -> _Seen:
            x_XV = scaled_logits(paid_XV, temperature_R[rows_X])

            def among() -> tuple[jax.Array, ...]:
                """Cutoffs, and by the largest entries picks and log-norms, and which of those are right."""
                found = candidates(x_XV)
                cutoff_X = cutoffs_among(x_XV, found, *filters)
                kept_XC, beyond_X = _kept(found.x_RC, cutoff_X), _kept(found.floor_R, cutoff_X)
                pick_X, is_sure_X = no_picks
                if COUPLED in rules:
                    pick_X, is_sure_X = gumbel_argmax_among(kept_XC, found, key_X2, beyond_X, is_coupled_X)
                log_norm_X = _log_norms(kept_XC) if can_draw else zeros_X
                return cutoff_X, pick_X, is_sure_X, log_norm_X, beyond_X == -jnp.inf

            # Without a filter too much is possible for a few entries to tell.
            no_picks = jnp.zeros(rows_X.shape, jnp.int32), jnp.zeros(rows_X.shape, bool)
            cutoff_X, pick_X, is_sure_X, log_norm_X, has_norm_X = lax.cond(
                jnp.any(is_filtered(*filters)), among, lambda: (off_X, *no_picks, zeros_X, no_picks[1])
            )
            if COUPLED in rules:
                pick_X = finish_rows(
                    pick_X,
                    is_sure_X | is_drawn_X | ~is_on_X,
                    lambda x: gumbel_argmax(_kept(x_XV[x], cutoff_X[x]), key_X2[x], is_coupled_X[x]),
                )
            else:
                pick_X = lax.cond(jnp.any(is_on_X & ~is_drawn_X), lambda: row_argmax(x_XV), lambda: no_picks[0])
            if can_draw:
                log_norm_X = lax.cond(
                    jnp.any(is_drawn_X & ~has_norm_X), lambda: _log_norms(_kept(x_XV, cutoff_X)), lambda: log_norm_X
                )
            else:
                return _Seen(pick_X)
            if num_drafts == 0:
                return unseen_of(rows_X)._replace(pick_R=pick_X, cutoff_R=cutoff_X, log_norm_R=log_norm_X)
            ids_X1 = jnp.where(in_vocab_N[n_X], draft_token_ids_N[n_X], 0)[:, None]
            drafted_X = _kept(shards.entries(x_XV, ids_X1)[:, 0], cutoff_X)
            seen = _Seen(pick_X, cutoff_X, log_norm_X, drafted_X - log_norm_X)
            if draft_logits_NV is None:
                return seen
            all_NV = draft_logits_NV

            def weigh() -> tuple[jax.Array, jax.Array]:
                y_XV = _draft_logits(all_NV[draft_rows_N[n_X]])
                draft_log_norm_X = _log_norms(y_XV)
                return draft_log_norm_X, shards.entries(y_XV, ids_X1)[:, 0] - draft_log_norm_X

            draft_log_norm_X, draft_logprob_X = lax.cond(has_drafts, weigh, lambda: (zeros_X, zeros_X))
            return seen._replace(draft_log_norm_R=draft_log_norm_X, draft_logprob_R=draft_logprob_X)

        def greedy() -> _Seen:
            return unseen_of(rows_X)._replace(pick_R=row_argmax(paid_XV))

        return lax.cond(jnp.any(rule_X != GREEDY), sampled, greedy) if rules != (GREEDY,) else greedy()

    def log_ratio(seen: _Seen) -> jax.Array:
        """log p / q of each row's draft, where it has one; -inf if it can not stand."""
        # A difference, not log u + log q: where p = q it is exactly 0, above log u whatever u is. NaN compares false.
        if seen.draft_logprob_R is None:
            return jnp.where(seen.logprob_R > -jnp.inf, seen.logprob_R, -jnp.inf)
        is_possible_X = (seen.draft_logprob_R > -jnp.inf) & (seen.logprob_R > -jnp.inf)
        return jnp.where(is_possible_X, seen.logprob_R - seen.draft_logprob_R, -jnp.inf)

    def stands(seen: _Seen, n_X: jax.Array) -> jax.Array:
        """Whether the draft n that its row has seen may be followed by others; what it is of no draft says nothing."""
        in_vocab_X = in_vocab_N[n_X]
        if accept_rate_N is not None:
            return in_vocab_X & (uniform_N[n_X] < accept_rate_N[n_X])
        is_picked_X = in_vocab_X & (seen.pick_R == draft_token_ids_N[n_X])
        if not can_draw:
            return is_picked_X
        # Block verification may keep a draft for what follows it.
        least_X = jnp.where(rule_N[n_X] == BLOCK, -jnp.inf, jnp.log(uniform_N[n_X]))
        is_drawn_X = (rule_N[n_X] == STANDARD) | (rule_N[n_X] == BLOCK)
        return jnp.where(is_drawn_X, in_vocab_X & (log_ratio(seen) > least_X), is_picked_X)

    def unseen_of(rows_X: jax.Array) -> _Seen:
        zeros_X, off_X = jnp.zeros(rows_X.shape, jnp.float32), jnp.full(rows_X.shape, -jnp.inf, jnp.float32)
        unseen = _Seen(jnp.zeros(rows_X.shape, jnp.int32))
        if can_draw:
            unseen = unseen._replace(cutoff_R=off_X, log_norm_R=zeros_X, logprob_R=off_X)
        if can_draw and draft_logits_NV is not None and num_drafts:
            unseen = unseen._replace(draft_log_norm_R=zeros_X, draft_logprob_R=zeros_X)
        return unseen

    unseen = unseen_of(rule_R)

    def walked() -> _Seen:
        return walk(look, stands, unseen, logits_RV.shape[1], rows_N, bonus_rows_B, start_B, num_drafts_B)

    def at_once() -> _Seen:
        return unseen._replace(pick_R=row_argmax(logits_RV))

    # An arg-max of a few rows costs less than a turn does.
    if num_rows > _FEW_ROWS or (is_plain is None and not (edit is None and penalties is None)):
        seen = walked()
    else:
        is_greedy = jnp.all(rule_R == GREEDY) & (True if is_plain is None else is_plain)
        seen = lax.cond(is_greedy, at_once, walked)

    seen_N = jax.tree.map(lambda of_R: of_R[rows_N], seen)

    def block() -> tuple[jax.Array, jax.Array]:
        # An empty segment marks what its neighbours mark too.
        is_first_N = _marks(num_drafts, start_B)
        is_end_N = _marks(num_drafts, jnp.where(cu_num_draft_tokens_B > 0, cu_num_draft_tokens_B - 1, num_drafts))
        ratio_N = jnp.where(in_vocab_N, log_ratio(seen_N), -jnp.inf)
        before_N, after_N = joint_log_ratios(ratio_N, is_first_N, jnp.max(num_drafts_B))
        if draft_logits_NV is None:
            mass_N = jnp.where(in_vocab_N, point_mass_residual_masses(seen_N.logprob_R, before_N), jnp.float32(0))
        else:
            x_NV = _kept(scaled(rows_N), seen_N.cutoff_R)
            y_NV = _draft_logits(draft_logits_NV[draft_rows_N])
            mass_N = residual_masses(
                x_NV - seen_N.log_norm_R[:, None], y_NV - seen_N.draft_log_norm_R[:, None], before_N
            )
        # A placeholder ends the block: it was drawn from nothing, so nothing is owed for what it might have been.
        is_last_N = is_end_N | ~jnp.roll(in_vocab_N, -1)
        return before_N, thresholds(after_N, mass_N, is_last_N)

    log_joint_N = nothing_N
    n = jnp.arange(num_drafts, dtype=jnp.int32)
    num_accepted_B = _accepted_prefixes(stands(seen_N, n), cu_num_draft_tokens_B)
    if BLOCK in rules and num_drafts > 0:
        is_on = has_drafts & jnp.any(rule_R == BLOCK)
        log_joint_N, threshold_N = lax.cond(is_on, block, lambda: (nothing_N, nothing_N))
        longest_B = _longest_accepted(in_vocab_N & (uniform_N <= threshold_N), cu_num_draft_tokens_B)
        num_accepted_B = jnp.where(rule_B == BLOCK, longest_B, num_accepted_B)

    is_bonus_B = num_accepted_B == num_drafts_B
    if num_drafts == 0:
        cut_rows_B, cut_N = bonus_rows_B, None
    else:
        # The draft each row is cut at: its first rejected one; past them all (a bonus), any, and not looked at.
        cut_N = jnp.clip(start_B + num_accepted_B, 0, num_drafts - 1)
        cut_rows_B = jnp.where(is_bonus_B, bonus_rows_B, rows_N[cut_N])
    picked_B, is_drawn_B = seen.pick_R[cut_rows_B], (rule_B == STANDARD) | (rule_B == BLOCK)

    # A draft that no draft distribution could have given (a placeholder) leaves the target as it is.
    is_whole_B = is_bonus_B if cut_N is None else is_bonus_B | ~in_vocab_N[cut_N]

    def left(b: jax.Array, x: jax.Array, ids: jax.Array) -> jax.Array:
        """What a rejected draft leaves requests b to draw from; x: the target's logits at ids."""
        x = _kept(x, seen.cutoff_R[cut_rows_B[b]])
        if cut_N is None:
            return x
        if draft_logits_NV is None:
            is_drafted = ids == draft_token_ids_N[cut_N[b]][:, None]
            return jnp.where(is_drafted & ~is_whole_B[b][:, None], -jnp.inf, x)
        all_NV, rows = draft_logits_NV, draft_rows_N[cut_N[b]]

        def residual() -> jax.Array:
            y = all_NV[rows]
            y = y if x.shape == y.shape else entries_at(y, ids)
            logprob_target = weighed(x, b)
            logprob_draft = _draft_logits(y) - seen.draft_log_norm_R[cut_rows_B[b]][:, None]
            excess = jnp.exp(logprob_target) - jnp.exp(logprob_draft)
            # Should rounding leave no excess at all, the target itself; below the smallest real excess till then.
            left = jnp.where(excess > 0, jnp.log(excess), logprob_target - jnp.float32(1e4))
            left = jnp.where(jnp.isnan(left), -jnp.inf, left)
            return jnp.where(is_whole_B[b][:, None], x, left)

        return lax.cond(jnp.all(is_whole_B[b]), lambda: x, residual)

    log_norm_B = log_joint_B = jnp.zeros((num_requests,), jnp.float32)
    if can_draw and draft_logits_NV is not None and cut_N is not None:
        log_norm_B = jnp.where(is_whole_B, jnp.float32(0), seen.log_norm_R[cut_rows_B])
        log_joint_B = jnp.where(is_whole_B | (rule_B != BLOCK), jnp.float32(0), log_joint_N[cut_N])

    def weighed(x: jax.Array, b: jax.Array) -> jax.Array:
        """Log-probabilities of requests b as block verification weighs them; in this order, since beside logits of 1e30
        log_joint would be nothing."""
        of_b = (b, *[None] * (x.ndim - 1))
        return x - log_norm_B[of_b] + log_joint_B[of_b]

    def draw() -> jax.Array:
        all_B, all_1V = jnp.arange(num_requests, dtype=jnp.int32), shards.ids_of(logits_RV)[None]
        x_BV, key_B2 = scaled(cut_rows_B), noise_key_R2[cut_rows_B]

        def among() -> tuple[jax.Array, jax.Array]:
            found = candidates(x_BV)
            bound_B = weighed(_kept(found.floor_R, seen.cutoff_R[cut_rows_B]), all_B)
            return gumbel_argmax_among(left(all_B, found.x_RC, found.ids_RC), found, key_B2, bound_B)

        def whole(row: jax.Array) -> jax.Array:
            return gumbel_argmax(left(row[None], x_BV[row][None], all_1V)[0], key_B2[row])

        drawn_B, is_sure_B = lax.cond(
            jnp.any(seen.cutoff_R[cut_rows_B] > -jnp.inf), among, lambda: (jnp.zeros_like(all_B), all_B < 0)
        )
        return finish_rows(drawn_B, is_sure_B | ~is_drawn_B, whole)

    if not can_draw:
        return num_accepted_B, picked_B
    drawn_B = lax.cond(jnp.any(is_drawn_B), draw, lambda: jnp.zeros((num_requests,), jnp.int32))
    return num_accepted_B, jnp.where(is_drawn_B, drawn_B, picked_B)


def _kept(x_RX: jax.Array, cutoff_R: jax.Array) -> jax.Array:
    """-inf below the row's cutoff."""
    return jnp.where(x_RX >= (cutoff_R if x_RX.ndim == 1 else cutoff_R[:, None]), x_RX, -jnp.inf)


def _draft_logits(logits: jax.Array) -> jax.Array:
    y = logits.astype(jnp.float32)
    return jnp.where(jnp.isnan(y), -jnp.inf, jnp.minimum(y, jnp.finfo(jnp.float32).max))


def _log_norms(x_RV: jax.Array) -> jax.Array:
    """log sum exp; NaN for a row that holds -inf alone."""
    peak_R = shards.largest(x_RV.max(axis=-1))
    return peak_R + jnp.log(shards.summed(jnp.exp(x_RV - peak_R[:, None]).sum(axis=-1)))


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
