"""Device. The order of the rejection kernels' passes, and the arithmetic on [N] and [B] numbers between them.

Cutoffs first, where a row has filters. Pass 1 gives each row of logits its log-sum-exp or its arg-max, whichever its
rule asks for. Then the drafts are judged (block verification needs one more sweep for that), each segment is cut
where its drafts end, and pass 2 draws what follows: from the target or the residual, on one row a request.
No [N, V] array exists besides the logits.

Of a vocabulary that is split over devices each runs the kernels over its own part, and what they found is joined as the
parts of one device are; cutoffs, which need all of a row at every halving, are then found by the jnp form.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec import shards
from jaxspec.pallas_kernels.rejection import sweeps
from jaxspec.pallas_kernels.rejection.cutoff import row_cutoffs
from jaxspec.pallas_kernels.rejection.penalties import Penalties, penalised
from jaxspec.pallas_kernels.rejection.rules import BLOCK, COUPLED, STANDARD

_F32, _I32 = jnp.float32, jnp.int32


class Target(NamedTuple):
    """The target's rows that a kernel's X programs read; program x reads row x where rows_X is None."""

    logits_RV: jax.Array
    rows_X: jax.Array | None
    temperature_X: jax.Array
    cutoff_X: jax.Array | None
    costs: "Costs | None"


class Costs(NamedTuple):
    """What repeats cost each program's row: the counts, and the drafts [start, start + offset) that come before it."""

    counts_BV: jax.Array
    draft_token_ids_N: jax.Array
    request_X: jax.Array
    start_X: jax.Array
    offset_X: jax.Array
    presence_X: jax.Array
    frequency_X: jax.Array
    repetition_X: jax.Array


class Draft(NamedTuple):
    """The drafter's rows, likewise."""

    logits_NV: jax.Array
    rows_X: jax.Array | None


class Pass(NamedTuple):
    """One kernel: what it computes of its rows, the dtypes of that, and how two parts of the vocabulary are joined."""

    name: str
    compute: Callable[..., Any]  # (sweeps.Rows, *columns) -> a tree of columns
    dtypes: Any
    merge: Callable[[Any, Any], Any] | None  # None: a program must see the whole row
    works: Callable[..., jax.Array] | None = None  # (*columns_X) -> which programs have anything to do; None: all
    idle: float = 0.0  # the result where none has


class Run(Protocol):
    """A platform's body: runs a pass over X programs' rows. Returns the pass's tree of arrays [X]."""

    def __call__(
        self, which: Pass, *columns_X: jax.Array, target: Target | None = None, draft: Draft | None = None
    ) -> Any: ...


CUTOFF = Pass("row_cutoffs", sweeps.cutoff, _F32, None, sweeps.is_filtered, -jnp.inf)
STATISTICS = Pass(
    "row_statistics",
    sweeps.statistics,
    (sweeps.Norm(_F32, _F32), _F32, sweeps.Best(_F32, _I32)),
    lambda one, other: (
        sweeps.merge_norms(one[0], other[0]),
        jnp.maximum(one[1], other[1]),
        sweeps.merge_bests(one[2], other[2]),
    ),
)
DRAFT_NORM = Pass(
    "draft_norms", sweeps.draft_norm, sweeps.Norm(_F32, _F32), sweeps.merge_norms, lambda needs: needs != 0
)
EXCESS_MASS = Pass(
    "excess_mass", sweeps.excess_mass, _F32, lambda one, other: one + other, lambda needs, *_: needs != 0
)
DRAW = Pass(
    "draw_tokens",
    sweeps.draw,
    sweeps.Best(_F32, _I32),
    sweeps.merge_bests,
    lambda mode, *_: mode != sweeps.PLAIN,
)


class _Drafts(NamedTuple):
    """The flattened drafts; padding has rows 0, and is no draft."""

    ids_N: jax.Array
    rows_N: jax.Array  # the target's row that judges it
    draft_rows_N: jax.Array
    is_draft_N: jax.Array
    in_vocab_N: jax.Array  # a draft, and one that has a probability
    starts_B: jax.Array
    ends_B: jax.Array


class _Judgement(NamedTuple):
    num_accepted_B: jax.Array
    log_norm_N: jax.Array  # of the target's row; 0 where nothing needs it
    draft_log_norm_N: jax.Array
    log_joint_N: jax.Array  # block verification's weight of the target before draft n, 0 under other rules


def reject(
    logits_RV, draft_logits_NV, draft_token_ids_N, target_rows_N, draft_rows_N, bonus_rows_B, cu_num_draft_tokens_B,
    rule_R, temperature_R, top_k_R, top_p_R, min_p_R, accept_uniform_R, noise_key_R2, accept_rate_N=None,
    penalties: Penalties | None = None, *, rules: tuple[int, ...], run: Run,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """See `api.reject`, whose arguments these are."""
    num_rows, vocab_size = logits_RV.shape[0], shards.whole_size(logits_RV)
    run = _joining(run)
    if not draft_token_ids_N.shape[0]:  # one place of padding, so that no array below is empty
        draft_token_ids_N = target_rows_N = draft_rows_N = jnp.full((1,), -1, _I32)
        draft_logits_NV, accept_rate_N = None, None if accept_rate_N is None else jnp.zeros((1,), _F32)
    drafts = _drafts(draft_token_ids_N, target_rows_N, draft_rows_N, cu_num_draft_tokens_B, vocab_size)
    costs = None if penalties is None else _costs(penalties, drafts)
    target = Target(logits_RV, None, temperature_R, None, costs)

    # Padding judges nothing: its row is out of range, and dropped.
    judges_N = jnp.where(drafts.is_draft_N, drafts.rows_N, num_rows)
    is_judge_R = jnp.zeros((num_rows,), bool).at[judges_N].set(True, mode="drop")
    is_read_R = is_judge_R.at[bonus_rows_B].set(True)
    filters_R = jnp.where(is_read_R, top_k_R, 0), jnp.where(is_read_R, top_p_R, 1), jnp.where(is_read_R, min_p_R, 0)
    if shards.is_split(logits_RV):
        paid_RV = logits_RV
        if penalties is not None:
            paid_RV = penalised(logits_RV, penalties, draft_token_ids_N, cu_num_draft_tokens_B)
        cutoff_R = row_cutoffs(paid_RV, temperature_R, *filters_R)
    else:
        cutoff_R = run(CUTOFF, *filters_R, target=target)
    target = target._replace(cutoff_X=cutoff_R)

    is_drawn_R = (rule_R == STANDARD) | (rule_R == BLOCK)
    # With rates the probabilities judge nothing, and a residual without the draft does not need them either.
    is_weighed_R = is_judge_R & is_drawn_R & (accept_rate_N is None or draft_logits_NV is not None)
    is_picked_R = is_read_R & ~is_drawn_R
    needs_R = jnp.where(is_weighed_R, sweeps.NEEDS_NORM, 0) | jnp.where(is_picked_R, sweeps.NEEDS_BEST, 0)
    needs_R = needs_R | jnp.where(is_picked_R & (rule_R == COUPLED), sweeps.NEEDS_NOISE, 0)
    key_R2 = lax.bitcast_convert_type(noise_key_R2, _I32)
    draft_ids_R = jnp.full((num_rows,), -1, _I32).at[judges_N].set(drafts.ids_N, mode="drop")
    norm_R, drafted_R, best_R = run(STATISTICS, needs_R, draft_ids_R, key_R2[:, 0], key_R2[:, 1], target=target)

    judgement = _judge(
        drafts, target, draft_logits_NV, rule_R, rule_R[bonus_rows_B], is_weighed_R, norm_R, drafted_R, best_R.id,
        accept_uniform_R, accept_rate_N, rules=rules, run=run,
    )  # fmt: skip
    num_accepted_B = judgement.num_accepted_B
    cut_B = drafts.starts_B + num_accepted_B
    is_bonus_B = cut_B == drafts.ends_B
    cut_B = jnp.minimum(cut_B, drafts.ids_N.shape[0] - 1)
    cut_rows_B = jnp.where(is_bonus_B, bonus_rows_B, drafts.rows_N[cut_B])
    picked_B = best_R.id[cut_rows_B]
    if STANDARD not in rules and BLOCK not in rules:
        return num_accepted_B, picked_B

    is_drawn_B = is_drawn_R[cut_rows_B]
    # A draft that no draft distribution could have given (a placeholder) leaves the target as it is.
    is_whole_B = is_bonus_B | ~drafts.in_vocab_N[cut_B]
    residual = sweeps.WITHOUT_DRAFT if draft_logits_NV is None else sweeps.EXCESS
    drawn_B = run(
        DRAW,
        jnp.where(is_drawn_B, jnp.where(is_whole_B, sweeps.WHOLE, residual), sweeps.PLAIN),
        shards.own_ids(drafts.ids_N[cut_B], logits_RV),
        key_R2[cut_rows_B, 0],
        key_R2[cut_rows_B, 1],
        judgement.log_norm_N[cut_B],
        judgement.log_joint_N[cut_B],
        judgement.draft_log_norm_N[cut_B],
        target=_rows_of(target, cut_rows_B),
        draft=None if draft_logits_NV is None else Draft(draft_logits_NV, drafts.draft_rows_N[cut_B]),
    ).id
    return num_accepted_B, jnp.where(is_drawn_B, drawn_B, picked_B)


def _joining(run: Run) -> Run:
    """`run`, whose results are those of all devices where the vocabulary is split over them."""

    def joined(which: Pass, *columns_X: jax.Array, target: Target | None = None, draft: Draft | None = None) -> Any:
        found = run(which, *columns_X, target=target, draft=draft)
        leaves, tree = jax.tree.flatten(found)
        if not shards.is_split(leaves[0]):
            return found
        assert which.merge is not None
        beside = [shards.side_by_side(leaf_X[:, None]) for leaf_X in leaves]
        parts = [tree.unflatten([leaf[:, at] for leaf in beside]) for at in range(shards.num_shards())]
        return functools.reduce(which.merge, parts)

    return joined


def _drafts(draft_token_ids_N, target_rows_N, draft_rows_N, cu_num_draft_tokens_B, vocab_size: int) -> _Drafts:
    is_draft_N = jnp.arange(draft_token_ids_N.shape[0], dtype=_I32) < cu_num_draft_tokens_B[-1]
    return _Drafts(
        ids_N=draft_token_ids_N,
        rows_N=jnp.where(is_draft_N, target_rows_N, 0),
        draft_rows_N=jnp.where(is_draft_N, draft_rows_N, 0),
        is_draft_N=is_draft_N,
        in_vocab_N=is_draft_N & (draft_token_ids_N >= 0) & (draft_token_ids_N < vocab_size),
        starts_B=jnp.concatenate([jnp.zeros((1,), _I32), cu_num_draft_tokens_B[:-1]]),
        ends_B=cu_num_draft_tokens_B,
    )


def _costs(penalties: Penalties, drafts: _Drafts) -> Costs:
    request_R = penalties.request_R
    start_R = drafts.starts_B[request_R]
    return Costs(
        counts_BV=penalties.counts_BV,
        draft_token_ids_N=shards.own_ids(drafts.ids_N, penalties.counts_BV),
        request_X=request_R,
        start_X=start_R,
        offset_X=jnp.minimum(penalties.offset_R, drafts.ends_B[request_R] - start_R),
        presence_X=penalties.presence_B[request_R],
        frequency_X=penalties.frequency_B[request_R],
        repetition_X=penalties.repetition_B[request_R],
    )


def _rows_of(target: Target, rows_X: jax.Array) -> Target:
    """The same rows for programs that read others than their own."""
    costs = target.costs
    if costs is not None:
        of_rows = {name: value[rows_X] for name, value in costs._asdict().items() if name.endswith("_X")}
        costs = costs._replace(**of_rows)
    cutoff_X = None if target.cutoff_X is None else target.cutoff_X[rows_X]
    return Target(target.logits_RV, rows_X, target.temperature_X[rows_X], cutoff_X, costs)


def _judge(
    drafts: _Drafts, target: Target, draft_logits_NV, rule_R, rule_B, is_weighed_R, norm_R, drafted_R, picked_R,
    accept_uniform_R, accept_rate_N, *, rules: tuple[int, ...], run: Run,
) -> _Judgement:  # fmt: skip
    """How many drafts stand, and what the draw of the next token needs to know of the distributions."""
    zeros_N = jnp.zeros(drafts.ids_N.shape, _F32)
    rows_N, uniform_N = drafts.rows_N, accept_uniform_R[drafts.rows_N]
    stands_N = drafts.in_vocab_N & (picked_R[rows_N] == drafts.ids_N)
    is_weighing = STANDARD in rules or BLOCK in rules
    log_norm_N = sweeps.log_norm(norm_R)[rows_N] if is_weighing else zeros_N
    draft_log_norm_N = zeros_N
    if is_weighing and draft_logits_NV is not None:
        num_draft_rows = draft_logits_NV.shape[0]
        asked_N = jnp.where(drafts.is_draft_N & is_weighed_R[rows_N], drafts.draft_rows_N, num_draft_rows)
        needs_N = jnp.zeros((num_draft_rows,), _I32).at[asked_N].set(1, mode="drop")
        norm_N = run(DRAFT_NORM, needs_N, draft=Draft(draft_logits_NV, None))
        draft_log_norm_N = sweeps.log_norm(norm_N)[drafts.draft_rows_N]
    if accept_rate_N is not None:
        stands_N = drafts.in_vocab_N & (uniform_N < accept_rate_N)
    if accept_rate_N is not None or not is_weighing:
        return _Judgement(_prefixes(stands_N, drafts), log_norm_N, draft_log_norm_N, zeros_N)

    logprob_N = drafted_R[rows_N] - log_norm_N
    draft_logprob_N = zeros_N
    if draft_logits_NV is not None:
        ids_N = jnp.where(drafts.in_vocab_N, drafts.ids_N, 0)
        draft_logprob_N = sweeps.clean(shards.picked(draft_logits_NV, drafts.draft_rows_N, ids_N)) - draft_log_norm_N
    is_possible_N = drafts.in_vocab_N & (logprob_N > -jnp.inf) & (draft_logprob_N > -jnp.inf)
    # A difference, not log u + log q: where p = q it is exactly 0, above log u whatever u is.
    ratio_N = jnp.where(is_possible_N, logprob_N - draft_logprob_N, -jnp.inf)
    stands_N = jnp.where(rule_R[rows_N] == STANDARD, ratio_N > jnp.log(uniform_N), stands_N)
    num_accepted_B = _prefixes(stands_N, drafts)
    if BLOCK not in rules:
        return _Judgement(num_accepted_B, log_norm_N, draft_log_norm_N, zeros_N)

    is_block_N = drafts.is_draft_N & (rule_R[rows_N] == BLOCK)
    before_N, after_N = _joint(ratio_N, drafts)
    if draft_logits_NV is None:
        mass_N = jnp.exp(before_N) * -jnp.expm1(logprob_N)
        mass_N = jnp.where(drafts.in_vocab_N & (mass_N > 0), mass_N, jnp.float32(0))
    else:
        mass_N = run(
            EXCESS_MASS,
            is_block_N.astype(_I32),
            log_norm_N,
            before_N,
            draft_log_norm_N,
            target=_rows_of(target, rows_N),
            draft=Draft(draft_logits_NV, drafts.draft_rows_N),
        )
    block_stands_N = drafts.in_vocab_N & (uniform_N <= _block_chances(after_N, mass_N, drafts))
    num_accepted_B = jnp.where(rule_B == BLOCK, _longest(block_stands_N, drafts), num_accepted_B)
    return _Judgement(num_accepted_B, log_norm_N, draft_log_norm_N, jnp.where(is_block_N, before_N, zeros_N))


def _in_segment(drafts: _Drafts) -> jax.Array:
    n = jnp.arange(drafts.ids_N.shape[0], dtype=_I32)[None]
    return (n >= drafts.starts_B[:, None]) & (n < drafts.ends_B[:, None])


def _prefixes(stands_N: jax.Array, drafts: _Drafts) -> jax.Array:
    """How many drafts of each segment come before its first that does not stand: one comparison a pair, no loop."""
    n = jnp.arange(drafts.ids_N.shape[0], dtype=_I32)[None]
    is_cut_BN = _in_segment(drafts) & ~stands_N[None]
    return jnp.min(jnp.where(is_cut_BN, n, drafts.ends_B[:, None]), axis=1) - drafts.starts_B


def _longest(stands_N: jax.Array, drafts: _Drafts) -> jax.Array:
    """How many drafts of each segment there are up to its last that stands."""
    place = jnp.arange(drafts.ids_N.shape[0], dtype=_I32)[None] - drafts.starts_B[:, None]
    return jnp.max(jnp.where(_in_segment(drafts) & stands_N[None], place + 1, 0), axis=1)


def _joint(ratio_N: jax.Array, drafts: _Drafts) -> tuple[jax.Array, jax.Array]:
    """log min(1, running product of ratios) before and after each draft of a segment, walked from its start."""
    num_drafts = ratio_N.shape[0]

    def step(place: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        log_joint_B, before_N, after_N = state
        at_B = drafts.starts_B + place
        is_in_B = at_B < drafts.ends_B
        at_B = jnp.where(is_in_B, at_B, num_drafts)
        before_N = before_N.at[at_B].set(log_joint_B, mode="drop")
        log_joint_B = jnp.minimum(log_joint_B + ratio_N.at[at_B].get(mode="fill", fill_value=0), jnp.float32(0))
        return log_joint_B, before_N, after_N.at[at_B].set(log_joint_B, mode="drop")

    zeros_N = jnp.zeros_like(ratio_N)
    state = (jnp.zeros(drafts.starts_B.shape, _F32), zeros_N, zeros_N)
    _, before_N, after_N = lax.fori_loop(0, jnp.max(drafts.ends_B - drafts.starts_B), step, state)
    return before_N, after_N


def _block_chances(after_N: jax.Array, mass_N: jax.Array, drafts: _Drafts) -> jax.Array:
    """The chance that the prefix which ends in draft n stands, given that no longer one does."""
    n = jnp.arange(mass_N.shape[0], dtype=_I32)
    follows_N = jnp.minimum(n + 1, mass_N.shape[0] - 1)
    is_end_N = jnp.any(n[None] == drafts.ends_B[:, None] - 1, axis=0)
    # A placeholder ends the block: what comes before it is judged as if nothing followed.
    is_last_N = is_end_N | ~drafts.in_vocab_N[follows_N]
    total_N = mass_N[follows_N] - jnp.expm1(after_N)
    inner_N = jnp.where(total_N > 0, mass_N[follows_N] / total_N, jnp.float32(1))
    return jnp.where(is_last_N, jnp.exp(after_N), inner_N)


def columns_of(target: Target | None, draft: Draft | None, own_X: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    """Every number of a program by name: where and how it reads, and the pass's own columns under "0", "1", …."""
    program_X = jnp.arange(own_X[0].shape[0], dtype=_I32)
    columns: dict[str, jax.Array] = {}
    if target is not None:
        columns |= {"row": program_X if target.rows_X is None else target.rows_X, "temperature": target.temperature_X}
        columns |= {} if target.cutoff_X is None else {"cutoff": target.cutoff_X}
        costs = {} if target.costs is None else target.costs._asdict()
        columns |= {name.removesuffix("_X"): value for name, value in costs.items() if name.endswith("_X")}
    if draft is not None:
        columns["draft_row"] = program_X if draft.rows_X is None else draft.rows_X
    logits = target.logits_RV if target is not None else draft.logits_NV if draft is not None else None
    if logits is not None and shards.is_split(logits):
        columns["first"] = jnp.broadcast_to(shards.first_id(logits), program_X.shape)
    return columns | {str(place): own for place, own in enumerate(own_X)}


def packed(columns: dict[str, jax.Array]) -> jax.Array:
    """Columns side by side, i32[X, C]; floats as their bits."""
    words = [lax.bitcast_convert_type(value, _I32) if value.dtype == _F32 else value for value in columns.values()]
    return jnp.stack([word.astype(_I32) for word in words], axis=1)


class Unpacked(NamedTuple):
    """`packed`, inside a kernel: columns by name, [rows, 1]."""

    dtypes: dict[str, Any]
    word: Callable[[int], jax.Array]  # reads the column at a place

    def __getitem__(self, name: str) -> jax.Array:
        word = self.word(list(self.dtypes).index(name))
        return lax.bitcast_convert_type(word, _F32) if self.dtypes[name] == _F32 else word

    def first_id(self) -> jax.Array | int:
        """The id that the rows' first entries have."""
        return self["first"] if "first" in self.dtypes else 0

    def own(self) -> list[jax.Array]:
        """The pass's own columns."""
        return [self[name] for name in self.dtypes if name.isdigit()]
