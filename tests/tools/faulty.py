"""Device. Judges with one known fault each, in place of jaxspec's: what `jaxspec verify` has to notice.

The faults are those of tests/lossless/faults.py, written for a compiled round. `sampler(None)` and `greedy(None)` are
right.
"""

import jax
import jax.numpy as jnp

from jaxspec.keys import Purpose, gumbel, token_key, uniform
from jaxspec.types import Verdict

SAMPLED_FAULTS = (
    "draft and accept share a uniform",
    "accept and resample share a uniform",
    "residual is the target",
    "residual is the target without the draft",
    "residual keeps the draft",
    "accepts with p alone",
    "bonus from the row before",
)
GREEDY_FAULTS = (
    "emits the rejected draft",
    "goes on after a rejection",
    "bonus always from row K",
    "judges a draft by the row after",
    "divides by a temperature of -1",
)


def inverse(weight_BV, uniform_B):
    """The token at which the cumulative weight passes the uniform."""
    cumulative_BV = jnp.cumsum(weight_BV, axis=1)
    ids_B = jnp.sum((cumulative_BV <= (uniform_B * cumulative_BV[:, -1])[:, None]).astype(jnp.int32), axis=1)
    return jnp.minimum(ids_B, weight_BV.shape[1] - 1)


def packed(tokens, accepted):
    """A verdict from each position's token and whether a draft was accepted there."""
    tokens_BJ, accepted_BJ = jnp.stack(tokens, axis=1), jnp.stack(accepted, axis=1)
    num_accepted_B = jnp.sum(jnp.cumprod(accepted_BJ.astype(jnp.int32), axis=1), axis=1)
    is_said_BJ = jnp.arange(tokens_BJ.shape[1])[None] <= num_accepted_B[:, None]
    return Verdict(token_ids_BJ=jnp.where(is_said_BJ, tokens_BJ, -1), num_accepted_B=num_accepted_B)


def sampler(fault):
    """Accepts with min(1, p/q), else draws from max(p - q, 0); temperature only."""

    def verify(logits_BJV, drafts, table, anchor_B, **_):
        B, J, V = logits_BJV.shape
        prob_BJV = jax.nn.softmax(logits_BJV / table.temperature_B[:, None, None], axis=-1)

        def key(j, purpose):
            return token_key(table.key_B2, anchor_B, j, purpose)

        tokens, accepted = [], []
        for j in range(J):
            p_BV = prob_BJV[:, j]
            bonus_from_BV = prob_BJV[:, max(j - 1, 0)] if fault == "bonus from the row before" else p_BV
            token_B = inverse(bonus_from_BV, uniform(key(j, Purpose.BONUS)))
            is_accepted_B = jnp.zeros(B, jnp.bool_)
            if j < J - 1:
                is_draft_B = j < drafts.counts_B
                id_B = jnp.where(is_draft_B, drafts.token_ids_BK[:, j], 0)
                one_hot_BV = jax.nn.one_hot(id_B, V, dtype=jnp.float32)
                q_BV = one_hot_BV if drafts.logits_BKV is None else jax.nn.softmax(drafts.logits_BKV[:, j], axis=-1)
                p_B, q_B = jnp.sum(p_BV * one_hot_BV, axis=1), jnp.sum(q_BV * one_hot_BV, axis=1)
                u_B = uniform(key(j, Purpose.ACCEPT))
                if fault == "draft and accept share a uniform":
                    noise_BV = gumbel(key(j, Purpose.DRAFT), jnp.arange(V, dtype=jnp.int32)[None])
                    u_B = jnp.exp(-jnp.exp(-jnp.sum(noise_BV * one_hot_BV, axis=1)))
                ratio_B = p_B if fault == "accepts with p alone" else p_B / jnp.maximum(q_B, 1e-30)
                is_accepted_B = is_draft_B & (u_B < ratio_B)
                rest_BV = jnp.maximum(p_BV - q_BV, 0)
                if fault == "residual is the target":
                    rest_BV = p_BV
                if fault == "residual is the target without the draft":
                    rest_BV = p_BV * (1 - one_hot_BV)
                if fault == "residual keeps the draft":
                    rest_BV = rest_BV + one_hot_BV * p_BV
                rest_BV = jnp.where(rest_BV.sum(axis=1, keepdims=True) == 0, p_BV, rest_BV)
                redraw_B = u_B if fault == "accept and resample share a uniform" else uniform(key(j, Purpose.RECOVER))
                judged_B = jnp.where(is_accepted_B, id_B, inverse(rest_BV, redraw_B))
                token_B = jnp.where(is_draft_B, judged_B, token_B)
            tokens.append(token_B)
            accepted.append(is_accepted_B)
        return packed(tokens, accepted)

    return verify


def greedy(fault):
    """Emits the arg-max while it equals the draft."""

    def verify(logits_BJV, drafts, table, anchor_B, **_):
        del table, anchor_B
        B, J, _ = logits_BJV.shape
        sign = -1.0 if fault == "divides by a temperature of -1" else 1.0
        best_BJ = jnp.argmax(sign * logits_BJV, axis=2).astype(jnp.int32)
        tokens, accepted = [], []
        for j in range(J):
            token_B, is_accepted_B = best_BJ[:, j], jnp.zeros(B, jnp.bool_)
            if j < J - 1:
                is_draft_B, draft_B = j < drafts.counts_B, drafts.token_ids_BK[:, j]
                judged_by = min(j + 1, J - 1) if fault == "judges a draft by the row after" else j
                is_accepted_B = is_draft_B & (best_BJ[:, judged_by] == draft_B)
                if fault == "goes on after a rejection":
                    is_accepted_B = is_draft_B
                if fault == "emits the rejected draft":
                    token_B = jnp.where(is_draft_B, draft_B, token_B)
                if fault == "bonus always from row K":
                    token_B = jnp.where(is_draft_B, token_B, best_BJ[:, -1])
                if fault == "judges a draft by the row after":
                    token_B = jnp.where(is_accepted_B, draft_B, token_B)
            tokens.append(token_B)
            accepted.append(is_accepted_B)
        return packed(tokens, accepted)

    return verify
