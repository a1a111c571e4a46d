"""Host. jaxspec's own verify as a judge of Markov chains, every chain a request with a key of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.pallas_kernels.rejection.penalties import SEEN_IN_PROMPT
from jaxspec.rejection.verify import verify
from jaxspec.types import Drafts, SamplingTable
from tests.lossless import markov
from tests.lossless.engines import SAME_CODE
from tests.lossless.markov import Round, V

CHUNK = 25_000  # chains in one call: few calls, and arrays that stay in the cache


@functools.partial(jax.jit, static_argnames="rule", compiler_options=SAME_CODE)  # much is asked of it
def verdict(logits_BJV, drafts, table, anchor_B, counts_BV, rule):
    return verify(logits_BJV, drafts, table, anchor_B, counts_BV, rule=rule).token_ids_BJ


def jaxspec_judge(rule, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, penalties=None, seed=5, has_fresh_keys=False):
    """verify as a judge. has_fresh_keys: each round of a chain has a key of its own, as no request has."""
    penalty = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0} | (penalties or {})
    rng = np.random.default_rng(seed)

    def new_keys() -> np.ndarray:
        return rng.integers(2**32, size=(markov.NUM_CHAINS, 2), dtype=np.uint32)

    keys = new_keys()

    def judge(round: Round) -> np.ndarray:
        nonlocal keys
        keys = new_keys() if has_fresh_keys else keys
        B = len(round.counts_B)
        return np.concatenate([chunk(round, np.arange(at, at + CHUNK) % B) for at in range(0, B, CHUNK)])[:B]

    def chunk(round: Round, rows: np.ndarray) -> np.ndarray:
        table = SamplingTable(
            temperature_B=jnp.full(CHUNK, temperature, jnp.float32),
            top_k_B=jnp.full(CHUNK, top_k, jnp.int32),
            top_p_B=jnp.full(CHUNK, top_p, jnp.float32),
            min_p_B=jnp.full(CHUNK, min_p, jnp.float32),
            presence_B=jnp.full(CHUNK, penalty["presence"], jnp.float32),
            frequency_B=jnp.full(CHUNK, penalty["frequency"], jnp.float32),
            repetition_B=jnp.full(CHUNK, penalty["repetition"], jnp.float32),
            key_B2=jnp.asarray(keys[round.chain_B[rows]]),
        )
        logits = round.draft_logits_BKV
        drafts = Drafts(
            token_ids_BK=jnp.asarray(round.ids_BK[rows], jnp.int32),
            counts_B=jnp.asarray(round.counts_B[rows], jnp.int32),
            logits_BKV=None if logits is None else jnp.asarray(logits[rows], jnp.float32),
        )
        logits_BJV = jnp.asarray(round.logits_BJV[rows], jnp.float32)
        counts_BV = None if penalties is None else jnp.asarray(counts(round)[rows], jnp.int32)
        return np.asarray(
            verdict(logits_BJV, drafts, table, jnp.asarray(round.len_B[rows], jnp.int32), counts_BV, rule)
        )

    def counts(round: Round) -> np.ndarray:
        place_1C = np.arange(round.history_BC.shape[1])[None]
        is_output_BC = (place_1C >= markov.PROMPT_LEN) & (place_1C < round.len_B[:, None])
        times = [((round.history_BC == token) & is_output_BC).sum(axis=1) for token in range(V)]
        in_prompt = [(round.history_BC[:, : markov.PROMPT_LEN] == token).any(axis=1) for token in range(V)]
        return np.stack(times, axis=1) + np.stack(in_prompt, axis=1) * SEEN_IN_PROMPT

    return judge
