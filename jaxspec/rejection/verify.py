"""Device. A round's verdict: which drafts stand under each row's rule, and the token that follows them."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxspec.config.synthetic import conditional_rates
from jaxspec.keys import Purpose, token_key, uniform
from jaxspec.pallas_kernels.rejection import api
from jaxspec.pallas_kernels.rejection.cutoff import row_filters
from jaxspec.pallas_kernels.rejection.penalties import row_penalties
from jaxspec.pallas_kernels.rejection.rules import BLOCK, COUPLED, GREEDY, STANDARD
from jaxspec.rejection.metadata import SpecDecodeMetadata, make_metadata
from jaxspec.types import Drafts, SamplingTable, Verdict

Rule = Literal["standard", "block", "coupled", "synthetic"]

_RULES = {"standard": STANDARD, "block": BLOCK, "coupled": COUPLED, "synthetic": STANDARD}


def verify(
    logits_BJV: Float[Array, "B J V"],
    drafts: Drafts,
    table: SamplingTable,
    anchor_B: Int32[Array, " B"],
    counts_BV: Int32[Array, "B V"] | None = None,
    edit: api.Edit | None = None,
    is_plain: jax.Array | None = None,
    *,
    rule: Rule,
    synthetic_rates: tuple[float, ...] = (),
    implementation: api.Implementation = "auto",
    platform: str = "cpu",
) -> Verdict:
    """Judge a round's drafts front to back, each row under its own rule.

    Greedy rows (temperature 0) emit the arg-max while it equals the draft, then the arg-max that differs or follows.
    Sampled rows are judged so that their tokens have the distribution of `sampling.logits.process`: by `standard`
    rejection; by `block`, which weighs a round's drafts as a whole and keeps no fewer on average; or `coupled`, where
    the token at each position is fixed by the row's key and the position alone. `synthetic` keeps drafts at given
    rates, greedy rows too: for measuring speed, not for text.
    Only what the rows need is computed: a batch of greedy rows costs one arg-max.

    Args:
        logits_BJV: f32; row j is the target's logits for the token at position anchor + j. J = K + 1; K may be 0.
        drafts: as its proposer drew them; ids outside the vocabulary are rejected where they stand.
        anchor_B: i32, tokens committed when the round began.
        counts_BV: i32, how often each id occurs in a row's output so far, + SEEN_IN_PROMPT for ids of its prompt: what
            penalties look at, besides the drafts before each position. None: no row of the table has a penalty.
        edit: what the logits go through first (see `api.reject`); row b * J + j is position j of row b. None: nothing.
        is_plain: whether neither edit nor penalty changes anything; None: nobody knows.
        rule: how sampled rows are judged.
        synthetic_rates: with the rule `synthetic`: how often the first j + 1 drafts are all kept, at least K of them.
        implementation, platform: see `pallas_kernels.rejection.api`; platform is the mesh's.
    """
    B, J, V = logits_BJV.shape
    K = J - 1
    num_drafts_B = jnp.clip(drafts.counts_B, 0, K)
    row_ids_B = jnp.arange(B, dtype=jnp.int32)
    metadata = make_metadata(num_drafts_B, row_ids_B * J + num_drafts_B + 1, max_drafts=B * K)
    logits_RV = logits_BJV.reshape(B * J, V)

    is_greedy_B = table.temperature_B == 0
    rule_B = jnp.where(is_greedy_B, GREEDY, jnp.int32(_RULES[rule]))
    filters = row_filters(table.temperature_B, table.top_k_B, table.top_p_B, table.min_p_B, num_positions=J)
    accept_key_BJ2, noise_key_BJ2 = _keys(table.key_B2, anchor_B, num_drafts_B, J, rule)
    draft_ids_N, draft_rows_N = _flatten(drafts.token_ids_BK, metadata)
    accept_rate_N = None
    if rule == "synthetic" and K > 0:
        if len(synthetic_rates) < K:
            raise ValueError(f"{synthetic_rates=} must hold a rate for each of {K=} drafts")
        accept_rate_N = jnp.asarray(conditional_rates(synthetic_rates[:K]), jnp.float32)[metadata.offset_N]

    penalties = None
    if counts_BV is not None:
        columns = (table.presence_B, table.frequency_B, table.repetition_B)
        penalties = row_penalties(counts_BV, *columns, num_positions=J)
    num_accepted_B, token_ids_B = api.reject(
        logits_RV,
        None if drafts.logits_BKV is None or K == 0 else drafts.logits_BKV.reshape(B * K, V),
        draft_ids_N,
        metadata.target_rows_N,
        draft_rows_N,
        metadata.bonus_rows_B,
        metadata.cu_num_draft_tokens_B,
        jnp.repeat(rule_B, J),
        *filters,
        uniform(accept_key_BJ2).reshape(B * J),
        noise_key_BJ2.reshape(B * J, 2),
        accept_rate_N,
        penalties,
        edit,
        is_plain,
        rules=(GREEDY, _RULES[rule]),
        implementation=implementation,
        platform=platform,
    )
    place_1J = jnp.arange(J, dtype=jnp.int32)[None]
    kept_BJ = jnp.pad(drafts.token_ids_BK, ((0, 0), (0, 1)))
    last_B1 = num_accepted_B[:, None]
    emitted_BJ = jnp.where(place_1J < last_B1, kept_BJ, jnp.where(place_1J == last_B1, token_ids_B[:, None], -1))
    return Verdict(token_ids_BJ=emitted_BJ, num_accepted_B=num_accepted_B)


def _keys(key_B2, anchor_B, num_drafts_B, J: int, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """Keys of each position's accept draw and of the noise of the token it may emit; [B, J, 2] each."""
    key_B12, anchor_B1 = key_B2[:, None, :], anchor_B[:, None]
    offset_1J = jnp.arange(J, dtype=jnp.int32)[None]
    if rule == "coupled":
        noise_BJ2 = token_key(key_B12, anchor_B1 + offset_1J, 0, Purpose.COUPLED)
        return noise_BJ2, noise_BJ2  # nothing is accepted by chance
    purpose_BJ = jnp.where(offset_1J < num_drafts_B[:, None], Purpose.RECOVER, Purpose.BONUS)
    accept_BJ2 = token_key(key_B12, anchor_B1, offset_1J, Purpose.ACCEPT)
    return accept_BJ2, token_key(key_B12, anchor_B1, offset_1J, purpose_BJ)


def _flatten(draft_ids_BK: jax.Array, metadata: SpecDecodeMetadata) -> tuple[jax.Array, jax.Array]:
    """The drafts along N, -1 in padding, and their row of [B * K] (0 in padding)."""
    B, K = draft_ids_BK.shape
    is_draft_N = metadata.row_N < B
    rows_N = jnp.where(is_draft_N, metadata.row_N * K + metadata.offset_N, 0)
    if K == 0:
        return rows_N, rows_N
    return jnp.where(is_draft_N, draft_ids_BK.reshape(B * K)[rows_N], -1), rows_N
