"""Device. The flattened view of ragged drafts: which row of logits judges which draft, and which gives the bonus."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int32, Shaped


@struct.dataclass
class SpecDecodeMetadata:
    """Index arrays over one round's drafts, flattened request by request (N = the most there can be).

    What lies past the last draft is padding: index arrays hold -1 there and row_N holds B, a segment of its own that
    whoever reduces over segments drops. It never belongs to the last request.
    """

    num_draft_tokens_B: jax.Array  # i32
    cu_num_draft_tokens_B: jax.Array  # i32, where each request's segment of drafts ends
    cu_num_sampled_tokens_B: jax.Array  # i32, the same for drafts + 1
    logits_indices_R: jax.Array  # i32[N + B] into the tokens that were fed: each request's last drafts + 1
    target_logits_indices_N: jax.Array  # i32 into logits_indices: the row that judges draft n
    bonus_logits_indices_B: jax.Array  # i32 into logits_indices: the row after the last draft
    row_N: jax.Array  # i32, which request draft n is of
    offset_N: jax.Array  # i32, its place among that request's drafts

    @property
    def target_rows_N(self) -> jax.Array:
        """i32, the fed token whose logits judge draft n; -1 in padding."""
        if self.row_N.shape[0] == 0:
            return self.target_logits_indices_N
        rows_N = self.logits_indices_R[jnp.maximum(self.target_logits_indices_N, 0)]
        return jnp.where(self.target_logits_indices_N >= 0, rows_N, -1)

    @property
    def bonus_rows_B(self) -> jax.Array:
        """i32, the fed token whose logits give the bonus."""
        return self.logits_indices_R[self.bonus_logits_indices_B]


def make_metadata(
    num_draft_tokens_B: Int32[Array, " B"],
    cu_num_scheduled_tokens_B: Int32[Array, " B"] | None = None,
    *,
    max_drafts: int,
) -> SpecDecodeMetadata:
    """Index arrays for ragged drafts.

    Args:
        num_draft_tokens_B: how many drafts each request has.
        cu_num_scheduled_tokens_B: where each request's fed tokens end (one past its last) on the flat token axis,
            whatever lies before them: a prompt's chunk, or unused positions. None: drafts + 1 tokens each, packed.
            A decode round of dense [B, J] logits says J * b + drafts + 1.
        max_drafts: N, at least the sum of num_draft_tokens_B.
    """
    num_rows = num_draft_tokens_B.shape[0]
    cu_drafts_B = jnp.cumsum(num_draft_tokens_B, dtype=jnp.int32)
    num_sampled_B = num_draft_tokens_B + 1
    cu_sampled_B = jnp.cumsum(num_sampled_B, dtype=jnp.int32)
    ends_B = cu_sampled_B if cu_num_scheduled_tokens_B is None else cu_num_scheduled_tokens_B
    row_ids_B = jnp.arange(num_rows, dtype=jnp.int32)

    n = jnp.arange(max_drafts, dtype=jnp.int32)
    row_N = expand_batch_to_tokens(row_ids_B, cu_drafts_B, max_drafts, fill=num_rows)
    is_draft_N = row_N < num_rows
    own_N = jnp.minimum(row_N, num_rows - 1)
    offset_N = jnp.where(is_draft_N, n - (cu_drafts_B - num_draft_tokens_B)[own_N], -1)
    first_sampled_B = cu_sampled_B - num_sampled_B
    target_N = jnp.where(is_draft_N, first_sampled_B[own_N] + offset_N, -1)

    r = jnp.arange(max_drafts + num_rows, dtype=jnp.int32)
    row_R = expand_batch_to_tokens(row_ids_B, cu_sampled_B, max_drafts + num_rows, fill=num_rows)
    own_R = jnp.minimum(row_R, num_rows - 1)
    logits_indices_R = jnp.where(row_R < num_rows, (ends_B - cu_sampled_B)[own_R] + r, -1)
    return SpecDecodeMetadata(
        num_draft_tokens_B=num_draft_tokens_B,
        cu_num_draft_tokens_B=cu_drafts_B,
        cu_num_sampled_tokens_B=cu_sampled_B,
        logits_indices_R=logits_indices_R,
        target_logits_indices_N=target_N,
        bonus_logits_indices_B=cu_sampled_B - 1,
        row_N=row_N,
        offset_N=offset_N,
    )


def expand_batch_to_tokens(
    values_B: Shaped[Array, " B"],
    cu_num_tokens_B: Int32[Array, " B"],
    num_tokens: int,
    *,
    replace_from: float | None = None,
    replace_to: float = 0,
    fill: float = 0,
) -> Shaped[Array, " N"]:
    """Each request's value once for each of its tokens: [a, b, c] with ends [2, 5, 6] gives [a, a, b, b, b, c].

    Args:
        num_tokens: length of the result; `fill` stands past the last request's tokens.
        replace_from, replace_to: values equal to the first become the second (a temperature of 0, say, a divisor 1).
    """
    if replace_from is not None:
        values_B = jnp.where(values_B == replace_from, jnp.asarray(replace_to, values_B.dtype), values_B)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    # One comparison a pair is a single small kernel; a search is for batches far beyond a decode round's.
    method = "compare_all" if num_tokens * values_B.shape[0] <= 2**20 else "scan"
    row_N = jnp.searchsorted(cu_num_tokens_B, tokens, side="right", method=method)
    padded = jnp.concatenate([values_B, jnp.full((1,), fill, values_B.dtype)])
    return padded[row_N]
