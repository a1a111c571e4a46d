"""Device. What a row forbids or favours whatever its distribution: edits of the raw logits, before any penalty.

In this order: logit_bias, then whatever removes tokens (allowed_token_ids, bad_words, stop ids before min_tokens, a
grammar's mask), then the engine's own logits processors. A removed token has logit -inf, so under every rule a draft
of it is rejected at its place and the residual is the edited target's.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxspec import shards
from jaxspec.sampling.edit_table import MASK_BITS, EditTable
from jaxspec.sampling.processors import LogitsProcessor, TokenContext


def edit(
    logits_BJV: Float[Array, "B J V"],
    table: EditTable,
    context: TokenContext,
    *,
    stop_ids_BW: Int32[Array, "B W"],
    min_len_B: Int32[Array, " B"],
    mask_BJU: UInt32[Array, "B J U"] | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
) -> Float[Array, "B J V"]:
    """The edited logits.

    Args:
        stop_ids_BW: removed until the row has min_len_B tokens, the one at hand included; -1 = none.
        mask_BJU: ids that a grammar allows at each position; None: no row has a grammar.
    """
    J = logits_BJV.shape[1]
    j_1J = jnp.arange(J, dtype=jnp.int32)[None]
    too_short_BJ = context.len_B[:, None] + j_1J < min_len_B[:, None]

    def when(condition: jax.Array, function) -> None:
        nonlocal logits_BJV
        logits_BJV = lax.cond(condition, function, lambda logits: logits, logits_BJV)

    def remove(logits_BJV: jax.Array) -> jax.Array:
        words_BZ, is_ended_BJZ = _ended_bad_words(table.bad_words_BZY, context, J)
        is_stop_BJW = jnp.broadcast_to(too_short_BJ[:, :, None], (*too_short_BJ.shape, stop_ids_BW.shape[1]))
        ids_BX = jnp.concatenate([words_BZ, stop_ids_BW], axis=1)
        return _remove(logits_BJV, ids_BX, jnp.concatenate([is_ended_BJZ, is_stop_BJW], axis=2))

    when(jnp.any(table.has_bias_B), lambda logits: _add_bias(logits, table))
    when(jnp.any(table.has_allowed_B), lambda logits: _keep(logits, table.allowed_BU[:, None, :]))
    when(jnp.any(table.has_bad_words_B) | jnp.any(too_short_BJ), remove)
    if mask_BJU is not None:
        logits_BJV = _keep(logits_BJV, mask_BJU)
    for processor, columns in zip(processors, table.processors, strict=True):
        logits_BJV = processor.apply(logits_BJV, columns, context)
    return logits_BJV


@struct.dataclass
class RowEdits:
    """`edit` for any rows of logits[B * J, V], called with them and their numbers. A row goes through what it
    would if the drafts before it were text."""

    table: EditTable
    context: TokenContext
    stop_ids_BW: jax.Array
    min_len_B: jax.Array
    mask_BJU: jax.Array | None
    num_positions: int = struct.field(pytree_node=False)  # J
    processors: tuple[LogitsProcessor, ...] = struct.field(pytree_node=False, default=())

    def __call__(self, logits_XV: jax.Array, rows_X: jax.Array) -> jax.Array:
        """f32[X, V], edited; rows_X: i32."""
        b_X, j_X = rows_X // self.num_positions, rows_X % self.num_positions
        of_rows = jax.tree.map(lambda leaf: leaf[b_X], (self.table, self.context, self.stop_ids_BW, self.min_len_B))
        table, context, stop_ids_XW, min_len_X = of_rows
        context = TokenContext(
            history_BC=_with_drafts(context, j_X),
            prompt_len_B=context.prompt_len_B,
            len_B=context.len_B + j_X,
            draft_ids_BK=context.draft_ids_BK[:, :0],
        )
        edited_X1V = edit(
            logits_XV[:, None],
            table,
            context,
            stop_ids_BW=stop_ids_XW,
            min_len_B=min_len_X,
            mask_BJU=None if self.mask_BJU is None else self.mask_BJU[b_X, j_X][:, None],
            processors=self.processors,
        )
        return edited_X1V[:, 0]


def _with_drafts(context: TokenContext, num_drafts_B: jax.Array) -> jax.Array:
    """history_BC with so many of the row's drafts behind its text."""
    C, K = context.history_BC.shape[1], context.draft_ids_BK.shape[1]
    if K == 0:
        return context.history_BC
    k_BC = jnp.arange(C, dtype=jnp.int32)[None] - context.len_B[:, None]
    draft_BC = jnp.take_along_axis(context.draft_ids_BK, jnp.clip(k_BC, 0, K - 1), axis=1)
    return jnp.where((k_BC >= 0) & (k_BC < num_drafts_B[:, None]), draft_BC, context.history_BC)


def _add_bias(logits_BJV: jax.Array, table: EditTable) -> jax.Array:
    B, V = logits_BJV.shape[0], shards.whole_size(logits_BJV)
    ids_BE = shards.own_ids(jnp.where(table.bias_ids_BE >= 0, table.bias_ids_BE, V), logits_BJV)
    return logits_BJV.at[jnp.arange(B)[:, None], :, ids_BE].add(table.bias_values_BE[:, :, None], mode="drop")


def _keep(logits_BJV: jax.Array, mask: UInt32[Array, "B J_or_1 U"]) -> jax.Array:
    """-inf wherever the mask has no bit."""
    V = logits_BJV.shape[2]
    if shards.is_split(logits_BJV):
        ids_V = shards.ids_of(logits_BJV)
        words = mask[..., jnp.minimum(ids_V // MASK_BITS, mask.shape[2] - 1)]
        is_kept = (words >> (ids_V % MASK_BITS).astype(jnp.uint32)[None, None]) & jnp.uint32(1)
        return jnp.where(is_kept != 0, logits_BJV, -jnp.inf)
    bits = (mask[..., None] >> jnp.arange(MASK_BITS, dtype=jnp.uint32)[None, None, None]) & jnp.uint32(1)
    return jnp.where(bits.reshape(*mask.shape[:2], -1)[..., :V] != 0, logits_BJV, -jnp.inf)


def _remove(logits_BJV: jax.Array, ids_BX: Int32[Array, "B X"], is_removed_BJX: Bool[Array, "B J X"]) -> jax.Array:
    """-inf at the ids given; -1 is none."""
    B, J, _ = logits_BJV.shape
    ids_BJX = jnp.where(is_removed_BJX & (ids_BX >= 0)[:, None], ids_BX[:, None], shards.whole_size(logits_BJV))
    at_B, at_J = jnp.arange(B)[:, None, None], jnp.arange(J)[None, :, None]
    return logits_BJV.at[at_B, at_J, shards.own_ids(ids_BJX, logits_BJV)].set(-jnp.inf, mode="drop")


def _ended_bad_words(bad_words_BZY: jax.Array, context: TokenContext, J: int) -> tuple[jax.Array, jax.Array]:
    """Each sequence's last token [B, Z], and where the answer so far, drafts included, ends in those before it
    [B, J, Z]."""
    prefix_BZX, last_BZ = bad_words_BZY[:, :, :-1], bad_words_BZY[:, :, -1]
    X = prefix_BZX.shape[2]
    # The X tokens before the first position, then the drafts: position j follows text[j : j + X].
    at_BX = context.len_B[:, None] - X + jnp.arange(X, dtype=jnp.int32)[None]
    before_BX = jnp.take_along_axis(context.history_BC, jnp.maximum(at_BX, 0), axis=1)
    is_output_BX = at_BX >= context.prompt_len_B[:, None]
    text = jnp.concatenate([jnp.where(is_output_BX, before_BX, -1), context.draft_ids_BK], axis=1)
    window_JX = jnp.arange(J, dtype=jnp.int32)[:, None] + jnp.arange(X, dtype=jnp.int32)[None]
    is_same_BJZX = text[:, window_JX][:, :, None, :] == prefix_BZX[:, None]
    return last_BZ, jnp.all(is_same_BJZX | (prefix_BZX < 0)[:, None], axis=-1)
