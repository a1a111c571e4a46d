"""Host. Runs a family's forward over a page pool as hostile as a test can make it: shuffled pages, NaN wherever nothing
was written, padding among the tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import pool_shape
from jaxspec.models.base import Tokens
from jaxspec.models.heads.load import load_head, open_head
from jaxspec.models.registry import family_of
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.load import load
from tests.lossless.engines import SAME_CODE


def load_model(path):
    """(family, config, weights) of a folder or file, in float32."""
    with open_checkpoint(path) as checkpoint:
        family = family_of(checkpoint.config.family)
        specs = family.specs(checkpoint.config, np.float32)
        return (
            family,
            checkpoint.config,
            load(checkpoint.reader, specs, family.name_table(checkpoint.config, checkpoint.source)),
        )


def read_head(kind, folder, opened):
    """(config, weights) of a head for a target that is open (the fixture `opened`)."""
    checkpoint, _, weights = opened
    with open_head(kind, folder, checkpoint) as head:
        return head.config, load_head(head, checkpoint.config, weights, jnp.float32)


class Pager:
    """Rows of one model in one pool. `feed` may be called with any cut of the rows' tokens."""

    def __init__(self, path, *, num_rows, max_len, page_size, seed=0, quick=True, for_run=10**6):
        """quick: compile without XLA's optimizations, for models that are small; for_run: the run's longest text."""
        self.family, config, self.weights = load_model(path)
        self.config = config.for_run(for_run)
        self.page_size = page_size
        num_pages = -(-max_len // page_size)
        # Twice the pages needed, so that most of the pool stays NaN; two more columns that hold no page.
        ids = np.random.default_rng(seed).permutation(2 * num_rows * num_pages)[: num_rows * num_pages]
        self.pages_BM = np.pad(ids.reshape(num_rows, num_pages), ((0, 0), (0, 2)), constant_values=-1).astype(np.int32)
        self.pool = jnp.full(pool_shape(self.config, 2 * num_rows * num_pages, page_size), jnp.nan, jnp.float32)
        self.len_B = np.zeros(num_rows, int)
        self._forward, self._logits = _PROGRAMS[quick]

    def feed(self, rows, pad_to: int = 1, keep=None):
        """Runs the next tokens of each row (a list a row, which may be empty), padded to at least `pad_to`.

        Returns: (hidden, logits) a row, of its own tokens only; of those a row's slice in `keep` selects, if given.
        """
        T = max(pad_to, *map(len, rows))
        ids_BT = np.zeros((len(rows), T), np.int32)
        positions_BT = np.full((len(rows), T), -1, np.int32)
        slots_BT = np.full((len(rows), T), -1, np.int32)
        for b, tokens in enumerate(rows):
            n = len(tokens)
            position_n = self.len_B[b] + np.arange(n)
            ids_BT[b, :n], positions_BT[b, :n] = tokens, position_n
            page_n = self.pages_BM[b, position_n // self.page_size]
            slots_BT[b, :n] = page_n * self.page_size + position_n % self.page_size
            self.len_B[b] += n
        tokens = Tokens(token_ids_BT=ids_BT, positions_BT=positions_BT, slots_BT=slots_BT, pages_BM=self.pages_BM)
        hidden_BTD, self.pool = self._forward(self.family, self.config, self.weights, self.pool, tokens)
        hidden_BTD = np.asarray(hidden_BTD)
        assert np.isfinite(hidden_BTD).all(), "padding must stay finite"
        if keep is None:
            logits_BTV = np.asarray(self._logits(self.family, self.config, self.weights, hidden_BTD))
            return [(hidden_BTD[b, : len(row)], logits_BTV[b, : len(row)]) for b, row in enumerate(rows)]
        kept = [hidden_BTD[b, : len(row)][keep[b]] for b, row in enumerate(rows)]
        return [(h, np.asarray(self._logits(self.family, self.config, self.weights, h[None]))[0]) for h in kept]

    def rewind(self, row: int, num_tokens: int) -> None:
        """Forget a row's last tokens: their keys stay in the pool, beyond its length."""
        self.len_B[row] -= num_tokens


def _forward(family, config, weights, pool, tokens):
    return family.forward(weights, config, tokens, pool)


def _logits(family, config, weights, hidden_BTD):
    return family.logits(weights, config, hidden_BTD)


_PROGRAMS = {
    quick: (
        jax.jit(_forward, static_argnums=(0, 1), donate_argnums=3, compiler_options=options),
        jax.jit(_logits, static_argnums=(0, 1), compiler_options=options),
    )
    for quick, options in ((True, None), (False, SAME_CODE))
}
