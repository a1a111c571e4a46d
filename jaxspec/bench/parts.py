"""Host. The parts of a round, each compiled alone and timed in turn with the whole round."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.bench.clock import interleaved_ms
from jaxspec.engine.core import EngineCore
from jaxspec.models.base import Tokens
from jaxspec.sampling.params import SamplingParams
from jaxspec.step import pack, rounds
from jaxspec.step.judge import judge
from jaxspec.step.state import Batch
from jaxspec.types import Drafts

_PERIOD = 8  # tokens of a prompt that repeats itself: every round drafts


def run_round(core: EngineCore, batch: Batch, host_width: int, num_rounds: int = 1) -> Any:
    """One call of the engine's program, without a look at what it gives; drafts of the host's are any tokens."""
    programs, weights = core.parts.programs, core.parts.weights
    if core.parts.host_proposer is None:
        core.state, output = programs.decode_rounds(weights, core.state, batch, num_rounds)
    else:
        rows = batch.rows_B.shape[0]
        drafts = Drafts(
            token_ids_BK=np.zeros((rows, host_width), np.int32),  # pyright: ignore[reportArgumentType]
            counts_B=np.full(rows, host_width, np.int32),  # pyright: ignore[reportArgumentType]
        )
        core.state, output = programs.verify_commit(weights, core.state, batch, drafts)
    return output.packed_BX


def time_parts(
    core: EngineCore, batch_rows: int, *, repeats: int, temperature: float = 0.0, top_p: float = 1.0
) -> dict[str, float]:
    """Median milliseconds of a drafting round and of its parts, at the given batch size.

    round_ms: the engine's own program, every row drafting. verify_ms: the bare J-position forward and head.
    plain_forward_ms: the same for one position. draft_ms, reject_ms: those parts alone. prefill_ms: one chunk of the
    largest bucket. bandwidth_floor_ms: reading as many bytes as the target's weights have.
    """
    parts, shapes = core.parts, core.parts.programs.shapes
    target, proposer, weights = parts.target, parts.proposer, parts.weights
    host = parts.host_proposer
    J = (host or proposer).num_tokens + 1
    bucket = pack.bucket_of(batch_rows, shapes.batch_rows)
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=None, ignore_eos=True, seed=1)
    requests = _repeating_requests(core, batch_rows, params)
    batch = core.running_batch()
    model = target.config
    view_pages_BM = jnp.asarray(batch.pages_BM)

    def round_() -> Any:
        return run_round(core, batch, J - 1)

    propose = jax.jit(functools.partial(rounds.propose, proposer), donate_argnums=1)

    def draft() -> Any:
        if host is not None:
            return host.propose([state.sequence_id for state in core.scheduler.decoding])
        drafts, core.state = propose(weights, core.state, batch)
        return drafts.counts_B

    def forward_of(width: int) -> Callable[[], Any]:
        @functools.partial(jax.jit, donate_argnums=1)
        def forward(weights, pool, tokens):
            hidden, pool = target.family.forward(weights, model, tokens, pool)
            return target.family.logits(weights, model, hidden), pool

        start = int(np.asarray(core.state.len_R)[np.asarray(batch.rows_B)].max())
        positions = jnp.broadcast_to(jnp.arange(start, start + width, dtype=jnp.int32), (bucket, width))
        tokens = Tokens(
            token_ids_BT=jnp.zeros((bucket, width), jnp.int32),
            positions_BT=positions,
            slots_BT=jnp.full((bucket, width), -1, jnp.int32),  # looks at the cache and leaves it as it is
            pages_BM=view_pages_BM,
        )

        def run() -> Any:
            logits, pool = forward(weights["target"], core.state.pool, tokens)
            core.state = dataclasses.replace(core.state, pool=pool)
            return logits

        return run

    forward = forward_of(J)
    logits_BJV = forward()
    drafts = Drafts(token_ids_BK=jnp.zeros((bucket, J - 1), jnp.int32), counts_B=jnp.full(bucket, J - 1, jnp.int32))
    reject = jax.jit(functools.partial(judge, target))

    floor = _read_weights(weights["target"])
    first = core.scheduler.decoding[0]
    num_tokens = min(len(first.token_ids) - 1, shapes.chunk_tokens[-1])  # written again as it stands in the cache
    chunk = pack.pack_chunk(first.row, 0, num_tokens, first.pages, shapes.pages_per_row)

    def prefill() -> Any:
        core.state, _ = parts.programs.prefill(weights, core.state, chunk)
        return core.state.len_R

    runs: dict[str, Callable[[], Any]] = {
        "round_ms": round_,
        "verify_ms": forward,
        "plain_forward_ms": forward_of(1),
        "bandwidth_floor_ms": floor,
        "prefill_ms": prefill,
    }
    if J > 1:
        runs["draft_ms"] = draft
        runs["reject_ms"] = lambda: reject(core.state, batch, drafts, logits_BJV)
    times = interleaved_ms(runs, repeats=repeats, calls=1)
    for request in requests:
        core.abort(request.request_id)
    return {"draft_ms": 0.0, "reject_ms": 0.0} | times


def _repeating_requests(core: EngineCore, batch_rows: int, params: SamplingParams) -> list[Any]:
    """Requests that repeat themselves, prefilled and one round in: n-gram lookup always finds something."""
    config = core.config
    length = min(20 * _PERIOD, config.max_model_len // 2)
    ids = (list(range(40, 40 + _PERIOD)) * (length // _PERIOD + 1))[:length]
    requests = [core.add_request(f"parts-{index}", {"prompt_token_ids": ids}, params) for index in range(batch_rows)]
    while len(core.scheduler.decoding) < batch_rows:
        core.step()
    return requests


def _read_weights(weights: Any) -> Callable[[], Any]:
    """A float32 sum over a buffer of the weights' size: no step can be faster than reading them once."""
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    buffer = jnp.ones((64, num_bytes // 4 // 64), jnp.float32)
    total = jax.jit(lambda buffer: jnp.sum(buffer, axis=1))
    return lambda: total(buffer)
