"""Device. A drafter over answers that are known: what it guesses at every token of them, without a round of the target.

Greedy answers are the same whoever drafts, so one answer judges any number of drafters, all at the same positions. The
target runs once over prompts and answers and its states are kept; a drafter is then given them as the rounds of an
engine would, one token at a time.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import new_pool, pool_shape, slots_of
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.models.base import Tokens
from jaxspec.proposers.base import Proposer, RowView
from jaxspec.sampling.table import neutral_table
from jaxspec.step.target import Target
from jaxspec.types import Pool

Text = tuple[Sequence[int], Sequence[int]]  # prompt and answer


class Replay:
    """Texts of one target, with its states, for drafters to be tried on."""

    def __init__(
        self,
        target: Target,
        weights: Any,
        texts: Sequence[Text],
        streams: Iterable[int],
        *,
        block_size: int,
        dtype: Any,
    ):
        """Run the target over the texts.

        Args:
            weights: the target's.
            texts: at most as many as the drafters' page pools hold rows of them.
            streams: residual streams that any of the drafters reads.
            block_size, dtype: of the target's pages.
        """
        self._streams = tuple(sorted(set(streams)))
        self._width = target.config.hidden_size
        self._num_prompt_B = np.array([len(prompt) for prompt, _ in texts], np.int32)
        self._len_B = np.array([len(prompt) + len(answer) for prompt, answer in texts], np.int32)
        self._num_pages = -(-int(self._len_B.max()) // block_size)
        num_tokens = self._num_pages * block_size
        self.history_BC = np.zeros((len(texts), num_tokens), np.int32)
        for row, (prompt, answer) in enumerate(texts):
            self.history_BC[row, : self._len_B[row]] = [*prompt, *answer]
        tokens = self._tokens(num_tokens, self._len_B, block_size)
        pool = new_pool(pool_shape(target.config, len(texts) * self._num_pages, block_size), dtype)
        self._block_size = block_size
        self._weights = weights
        self._seen_BTX = _see(target, self._streams, weights, tokens, pool)

    def hits(self, proposer: Proposer, weights: Any) -> "Hits":
        """What a drafter guesses right.

        Args:
            proposer: guesses greedily; its pool has pages for these texts.
            weights: its own, `weights["draft"]`, and what else stands beside the target's.
        """
        most = int(self._num_prompt_B.max()) - 1
        K, num_rounds = proposer.num_tokens, int((self._len_B - self._num_prompt_B).max())
        is_hit_NBK, counts_NB = _replay(
            proposer,
            num_rounds,
            weights | {"target": self._weights},
            self._select(proposer.aux_streams),
            self._tokens(max(most, 1), self._num_prompt_B - 1, self._block_size),
            jnp.asarray(self.history_BC),
            jnp.asarray(self._num_prompt_B),
            jnp.asarray(self._len_B),
        )
        return Hits(
            np.asarray(is_hit_NBK).transpose(1, 0, 2),
            np.asarray(counts_NB).T,
            self._len_B - self._num_prompt_B - K,
        )

    def contexts(self, hits: "Hits", num_before: int) -> list[tuple[int, ...]]:
        """For each judged position the tokens around it: `num_before` committed ones and the next."""
        found = []
        for row, end in enumerate(hits.num_judged_B):
            for index in range(end):
                at = self._num_prompt_B[row] + index
                found.append(tuple(self.history_BC[row, max(0, at - num_before) : at + 1].tolist()))
        return found

    def _tokens(self, width: int, len_B: np.ndarray, block_size: int) -> Tokens:
        """The first tokens of each text, padded to `width`."""
        t_1T = np.arange(width, dtype=np.int32)[None]
        positions_BT = jnp.asarray(np.where(t_1T < len_B[:, None], t_1T, -1))
        pages_BM = np.arange(len(len_B) * self._num_pages, dtype=np.int32).reshape(-1, self._num_pages)
        ids_BT = np.where(t_1T < len_B[:, None], self.history_BC[:, :width], 0)
        slots_BT = slots_of(positions_BT, jnp.asarray(pages_BM), block_size)
        return Tokens(
            token_ids_BT=jnp.asarray(ids_BT), positions_BT=positions_BT, slots_BT=slots_BT,
            pages_BM=jnp.asarray(pages_BM),
        )  # fmt: skip

    def _select(self, streams: tuple[int, ...]) -> jax.Array:
        """The states as a proposer that reads these streams is given them."""
        D = self._width
        places = [0, *(1 + self._streams.index(stream) for stream in streams)]
        return jnp.concatenate([self._seen_BTX[:, :, place * D : (place + 1) * D] for place in places], axis=-1)


class Hits:
    """Which drafts of a drafter are the answers' own, at every position of them that has K tokens behind it."""

    def __init__(self, is_hit_BNK: np.ndarray, counts_BN: np.ndarray, num_judged_B: np.ndarray):
        """is_hit_BNK: draft k at answer token n is right; counts_BN: drafts there; num_judged_B: positions counted."""
        self._kept_BN = np.cumprod(is_hit_BNK, axis=2).sum(axis=2)
        self._counts_BN = counts_BN
        self.num_judged_B = np.maximum(num_judged_B, 0)
        self._num_spec_tokens = is_hit_BNK.shape[2]

    def kept(self) -> np.ndarray:
        """Drafts kept at each judged position, text after text."""
        return np.concatenate([self._kept_BN[row, :end] for row, end in enumerate(self.num_judged_B)])

    def acceptance(self) -> AcceptanceStats:
        """As an engine would have counted: the next round begins behind what was kept."""
        stats = AcceptanceStats(self._num_spec_tokens)
        for row, end in enumerate(self.num_judged_B):
            at = 0
            while at < end:
                kept = int(self._kept_BN[row, at])
                stats.observe(int(self._counts_BN[row, at]), kept, kept + 1)
                at += kept + 1
        return stats


@functools.partial(jax.jit, static_argnums=(0, 1))
def _see(target: Target, streams: tuple[int, ...], weights: Any, tokens: Tokens, pool: Pool) -> jax.Array:
    seen_BTX, _ = target.family.forward(weights, target.config, tokens, pool, streams)
    return seen_BTX


@functools.partial(jax.jit, static_argnums=(0, 1))
def _replay(
    proposer: Proposer, num_rounds: int, weights: Any, seen_BTX: jax.Array, prompt: Tokens, history_BC: jax.Array,
    num_prompt_B: jax.Array, len_B: jax.Array,
):  # fmt: skip
    """The prompts, then a round a token: (is_hit_NBK, counts_NB)."""
    K, (B, C) = proposer.num_tokens, history_BC.shape
    rows_B = jnp.arange(B, dtype=jnp.int32)
    state = proposer.init(B)
    state = proposer.prefill(weights, state, rows_B, prompt, seen_BTX[:, : prompt.positions_BT.shape[1]])
    j_1J = jnp.arange(K + 1, dtype=jnp.int32)[None]

    def round_(state, index):
        committed_B = num_prompt_B + index
        view = RowView(
            rows_B=rows_B,
            is_active_B=committed_B < len_B,
            history_BC=history_BC,
            len_B=jnp.minimum(committed_B, len_B),
            max_len_B=jnp.full(B, 2**30, jnp.int32),
            pages_BM=prompt.pages_BM,
            table=neutral_table(B),
        )
        drafts, state = proposer.propose(weights, state, view)
        wanted_BK = jnp.take_along_axis(history_BC, jnp.minimum(view.len_B[:, None] + j_1J[:, :K], C - 1), axis=1)
        is_hit_BK = (drafts.token_ids_BK == wanted_BK) & (j_1J[:, :K] < drafts.counts_B[:, None])
        if proposer.commit is not None:
            at_BJ = jnp.minimum(view.len_B[:, None] - 1 + j_1J, C - 1)
            seen_BJX = jnp.take_along_axis(seen_BTX, at_BJ[:, :, None], axis=1)
            state = proposer.commit(state, view, seen_BJX, view.is_active_B.astype(jnp.int32))
        return state, (is_hit_BK, drafts.counts_B)

    _, found = jax.lax.scan(round_, state, jnp.arange(num_rounds, dtype=jnp.int32))
    return found
