"""Device. The commit inside a round: what enters the row tables, and that the host's commit function cuts the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import SamplingParams
from jaxspec.engine.commit import Progress, commit_block
from jaxspec.sampling.logprobs import no_logprobs
from jaxspec.step.rounds import commit
from jaxspec.step.state import Batch, initial_state
from jaxspec.types import Verdict

ROWS, MAX_LEN, V, K = 5, 24, 12, 4
GUARD = ROWS
EOS = 3


def make_state(rng):
    """Random rows: lengths, limits and stop ids; some finished."""
    state = initial_state(
        max_rows=ROWS, max_model_len=MAX_LEN, vocab_size=V, pool=jnp.zeros((1, 1, 2, 1)), proposer_state=()
    )
    len_R = rng.integers(1, MAX_LEN - 1, ROWS + 1)
    max_len_R = np.minimum(len_R + rng.integers(1, 9, ROWS + 1), MAX_LEN)
    stop_ids_RW = np.asarray(state.stop_ids_RW).copy()
    for row in range(ROWS):
        stop_ids = {EOS, *rng.integers(0, V, rng.integers(0, 3)).tolist()}
        stop_ids_RW[row, : len(stop_ids)] = sorted(stop_ids)
    is_finished_R = rng.random(ROWS + 1) < 0.3
    is_finished_R[GUARD] = True
    tables = {
        "history_RC": rng.integers(0, V, (ROWS + 1, MAX_LEN)),
        "len_R": len_R,
        "min_len_R": len_R + rng.integers(-3, 6, ROWS + 1),
        "max_len_R": max_len_R,
        "stop_ids_RW": stop_ids_RW,
    }
    tables = {name: jnp.asarray(table, jnp.int32) for name, table in tables.items()}
    return dataclasses.replace(state, is_finished_R=jnp.asarray(is_finished_R), **tables)


def batch_of(rows):
    return Batch(
        rows_B=jnp.asarray(rows, jnp.int32),
        pages_BM=jnp.full((len(rows), 1), -1, jnp.int32),
        max_drafts=jnp.int32(K),
    )


def make_verdict(rng, state, rows):
    """Blocks as verification gives them: never longer than a row's room."""
    count_B = np.zeros(len(rows), int)
    accepted_B = np.zeros(len(rows), int)
    token_ids_BJ = np.full((len(rows), K + 1), -1)
    for b, row in enumerate(rows):
        room = int(state.max_len_R[row] - state.len_R[row])
        count_B[b] = min(rng.integers(0, K + 1), max(room - 1, 0))
        accepted_B[b] = rng.integers(0, count_B[b] + 1)
        token_ids_BJ[b, : accepted_B[b] + 1] = rng.integers(0, V, accepted_B[b] + 1)
    return count_B, Verdict(
        token_ids_BJ=jnp.asarray(token_ids_BJ, jnp.int32), num_accepted_B=jnp.asarray(accepted_B, jnp.int32)
    )


def test_rows_take_their_block_up_to_what_ends_them():
    rng = np.random.default_rng(0)
    run = jax.jit(commit)
    reasons = set()
    for _ in range(150):
        state = make_state(rng)
        rows = np.concatenate([rng.permutation(ROWS)[:3], [GUARD, GUARD]])
        count_B, verdict = make_verdict(rng, state, rows)
        batch = batch_of(rows)
        new, output = run(state, batch, verdict, jnp.asarray(count_B, jnp.int32), no_logprobs(len(rows), K + 1, 0))
        packed_BX = np.asarray(output.packed_BX)
        history, lengths, finished = (np.array(x) for x in (state.history_RC, state.len_R, state.is_finished_R))
        for b, row in enumerate(rows):
            if state.is_finished_R[row]:
                assert (packed_BX[b, : K + 1] == -1).all()
                assert packed_BX[b, -1] == 0
                continue
            block = np.asarray(verdict.token_ids_BJ)[b].tolist()[: int(verdict.num_accepted_B[b]) + 1]
            kept = []
            for token_id in block:
                kept.append(token_id)
                length = int(state.len_R[row]) + len(kept)
                is_stop = token_id in np.asarray(state.stop_ids_RW)[row] and length >= int(state.min_len_R[row])
                if is_stop or length == int(state.max_len_R[row]):
                    finished[row] = True
                    reasons.add(("stop" if is_stop else "length", len(kept) < len(block)))
                    break
            history[row, lengths[row] : lengths[row] + len(kept)] = kept
            lengths[row] += len(kept)
            assert packed_BX[b].tolist() == [
                *kept,
                *[-1] * (K + 1 - len(kept)),
                count_B[b],
                int(verdict.num_accepted_B[b]),
            ]
        np.testing.assert_array_equal(new.history_RC, history)
        np.testing.assert_array_equal(new.len_R, lengths)
        np.testing.assert_array_equal(new.is_finished_R, finished)
        untouched = ("min_len_R", "max_len_R", "stop_ids_RW", "table", "pool")
        assert jax.tree.all(
            jax.tree.map(lambda a, b: bool((a == b).all()), *([getattr(s, n) for n in untouched] for s in (state, new)))
        )
    assert {("stop", True), ("stop", False), ("length", False)} <= reasons


def test_the_host_cuts_where_the_device_cuts():
    """EOS, stop ids, min_tokens and caps are decided twice; the host's lengths must be the device's."""
    rng = np.random.default_rng(1)
    run = jax.jit(commit)
    for _ in range(150):
        num_prompt, min_tokens = int(rng.integers(1, 6)), int(rng.integers(0, 7))
        max_output = int(rng.integers(max(min_tokens, 1), 12))
        stop_ids = rng.integers(0, V, rng.integers(0, 3)).tolist()
        params = SamplingParams(
            max_tokens=None, min_tokens=min_tokens, stop_token_ids=stop_ids, ignore_eos=bool(rng.integers(0, 2))
        )
        progress = Progress(params, frozenset({EOS}), max_output)
        state = initial_state(
            max_rows=1, max_model_len=MAX_LEN, vocab_size=V, pool=jnp.zeros((1, 1, 2, 1)), proposer_state=()
        )
        on_device = [*stop_ids, *([] if params.ignore_eos else [EOS])]
        row = {"len_R": num_prompt, "min_len_R": num_prompt + min_tokens, "max_len_R": num_prompt + max_output}
        state = dataclasses.replace(
            state,
            is_finished_R=state.is_finished_R.at[0].set(False),
            stop_ids_RW=state.stop_ids_RW.at[0, : len(on_device)].set(jnp.asarray(on_device, jnp.int32)),
            **{name: getattr(state, name).at[0].set(value) for name, value in row.items()},
        )
        batch = batch_of([0])
        while progress.finish_reason is None:
            assert not state.is_finished_R[0]
            count_B, verdict = make_verdict(rng, state, [0])
            block = np.asarray(verdict.token_ids_BJ)[0]
            cut = commit_block(progress, block[block >= 0].tolist())
            state, output = run(state, batch, verdict, jnp.asarray(count_B, jnp.int32), no_logprobs(1, K + 1, 0))
            on_device = np.asarray(output.packed_BX)[0, : K + 1]
            assert on_device[on_device >= 0].tolist() == list(cut.token_ids)
            assert int(state.len_R[0]) == num_prompt + len(progress.token_ids)
        assert state.is_finished_R[0]
