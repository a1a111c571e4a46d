"""Host. Conformance cases of what drafters are fed, by the functions and proposers that the engine runs."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from conformance_tools import MismatchError, check, ints

from jaxspec.config.methods import extra_slots
from jaxspec.models.base import Family, Tokens
from jaxspec.models.heads.base import RecurrentHead
from jaxspec.proposers.base import RowView
from jaxspec.proposers.draft_model import draft_model
from jaxspec.proposers.eagle import eagle
from jaxspec.proposers.inputs import first_pass, kept_tokens, next_token_ids, padded_samples
from jaxspec.sampling.table import neutral_table
from jaxspec.scheduler.request import SequenceState
from jaxspec.scheduler.scheduler import Limits, Scheduler


def run_drafter_inputs(given: Mapping[str, Any], expected: Any) -> None:
    if "sampled" in given:
        tokens, counts = next_token_ids(given["sampled"], given["discard"], given["backup"], given["vocab"])
        check_named({"next_token": tokens, "valid_count": counts}, expected)
    elif "tokens" in given:
        run_first_pass(given, expected)
    elif "valid_sampled" in given:
        rejected, samples, starts = padded_samples(given["query_lens"], given["num_draft"], given["valid_sampled"])
        found = {"num_rejected": rejected, "token_indices_to_sample": samples, "query_start_loc": starts}
        check_named(found, expected)
    elif "query_lens" in given:
        starts, indices = kept_tokens(given["query_lens"], given["num_rejected"])
        check_named({"query_start_loc": starts, "token_indices": indices}, expected)
    elif "first_argmax" in given:
        run_chain(given, expected)
    elif "num_computed" in given:
        run_all_mid_prefill(given, expected)
    elif "method" in given:
        check(extra_slots(given["method"], given["K"], is_parallel=given.get("parallel", False)), expected)
    else:
        raise MismatchError(f"no runner knows inputs {sorted(given)}")


def check_named(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if name not in found:
            raise MismatchError(f"no way to check {name!r}")
        check(np.asarray(found[name]).astype(int).tolist(), np.asarray(value).astype(int).tolist())


def run_first_pass(given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    is_parallel = "mask_id" in given
    shift = given.get("shift", given.get("shift_input_ids", is_parallel))
    found = first_pass(
        given["tokens"],
        given["positions"],
        given["query_lens"],
        given["num_rejected"],
        given["next_tokens"],
        pad_id=given.get("pad_id", 0),
        num_masks=given["K"] - 1 if is_parallel else 0,
        mask_id=given.get("mask_id", -1),
        shift=shift,
    )
    check_named(
        {
            "input_ids": found.token_ids_T,
            "positions": found.positions_T,
            "rejected_mask": found.is_rejected_T,
            "masked_mask": found.is_mask_T,
            "sample_indices": found.samples_n,
            "query_start_loc": found.starts_b,
        },
        expected,
    )
    if "input_ids" in expected and "rejected_mask" in expected and not (shift and not is_parallel):
        run_first_pass_of_a_proposer(given, expected, shift=shift)


# A family without weights: the hidden state of a token is its id, and the token after it is the next id.
COUNTING = Family(
    lambda config, dtype: {},
    lambda config, source: None,  # type: ignore[arg-type]
    lambda weights, config, tokens, pool: (tokens.token_ids_BT[..., None].astype(jnp.float32), pool),
    lambda weights, config, hidden_BTD: 10.0 * jax.nn.one_hot(hidden_BTD[..., 0].astype(jnp.int32) + 1, 512),
)


def view_of(histories: list[list[int]]) -> RowView:
    """Rows whose committed tokens these are."""
    B, length = len(histories), max(map(len, histories))
    return RowView(
        rows_B=jnp.arange(B, dtype=jnp.int32),
        is_active_B=jnp.ones(B, bool),
        history_BC=ints([row + [-1] * (length - len(row)) for row in histories]),
        len_B=ints([len(row) for row in histories]),
        max_len_B=jnp.full(B, 10_000, jnp.int32),
        pages_BM=jnp.zeros((B, 1), jnp.int32),
        table=neutral_table(B),
    )


class CountingModel(NamedTuple):
    """What `draft_model` reads of its model's config."""

    hidden_size: int = 1


def counting_drafter(num_tokens: int, family: Family = COUNTING, mask_token_id: int | None = None):
    return draft_model(
        family,
        CountingModel(),  # type: ignore[arg-type]
        num_tokens=num_tokens,
        mask_token_id=mask_token_id,
        max_model_len=10_000,
        sample_method="greedy",
        pool_shape=(1, 1, 16_384, 1),
        pool_dtype=jnp.float32,
    )


def run_chain(given: Mapping[str, Any], expected: Any) -> None:
    """Each step's arg-max is one more than the token it was fed, in the proposer's own scan."""
    proposer = counting_drafter(given["K"])
    histories = [[base - 1] for base in given["first_argmax"]]
    drafts, _ = proposer.propose({"draft": {}}, proposer.init(len(histories)), view_of(histories))
    check(drafts.token_ids_BK.tolist(), expected)


class CountingHead(NamedTuple):
    """What `eagle` reads of a head's config."""

    mask_token_id: int | None
    aux_streams: tuple[int, ...] = ()


def run_first_pass_of_a_proposer(given: Mapping[str, Any], expected: Mapping[str, Any], *, shift: bool) -> None:
    """The proposer's own pass, which has rows side by side, feeds the same tokens at the same positions: that of a
    draft model, or with `shift` of a head over hidden states."""
    fed: list[tuple[np.ndarray, np.ndarray]] = []

    def note(tokens: Tokens) -> None:
        if not fed:
            fed.append((np.asarray(tokens.token_ids_BT), np.asarray(tokens.positions_BT)))

    def forward(weights, config, tokens, pool):
        note(tokens)
        return COUNTING.forward(weights, config, tokens, pool)

    def head_forward(weights, config, tokens, features_BTD, pool):
        note(tokens)
        return features_BTD, features_BTD, pool

    mask_id = given.get("mask_id")
    num_masks = 0 if mask_id is None else given["K"] - 1
    num_tokens = max(given["query_lens"]) if mask_id is None else given["K"]
    starts = np.cumsum([0, *given["query_lens"]])
    histories, first, num_kept = [], [], []
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        first.append(given["positions"][start])
        kept = given["tokens"][start : end - given["num_rejected"][row]]
        num_kept.append(len(kept))
        histories.append([0] * first[-1] + kept + [given["next_tokens"][row]])
    if max(num_kept) + (not shift) > num_tokens + 1:
        return  # more than a round of this many drafts can commit
    weights = {"draft": {"mask_hidden": jnp.zeros(1), "head": jnp.zeros((2, 1))}}
    if shift:
        head = RecurrentHead(lambda *_: {}, lambda *_: None, lambda weights, config, seen: seen, head_forward)  # type: ignore[arg-type,return-value]
        proposer = eagle(
            head,
            CountingHead(mask_id),
            target_logits=lambda weights, hidden: hidden,
            hidden_size=1,
            vocab_size=2,
            num_tokens=num_tokens,
            max_model_len=10_000,
            sample_method="greedy",
            pool_shape=(1, 1, 16_384, 1),
            pool_dtype=jnp.float32,
        )
        state = proposer.init(len(histories))
        state = state.replace(seen=state.seen.replace(first_R=ints(first), count_R=ints(num_kept)))
    else:
        proposer = counting_drafter(num_tokens, COUNTING._replace(forward=forward), mask_id)
        state = proposer.init(len(histories)).replace(cached_R=ints(first))
    with jax.disable_jit():  # so that `note` sees values, in loops too
        proposer.propose(weights, state, view_of(histories))
    ids, positions = fed[0]
    is_padding = np.asarray(expected["rejected_mask"], bool)
    starts = np.cumsum([0, *(length + (not shift) + num_masks for length in given["query_lens"])])
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        is_fed = ~is_padding[start:end]
        wanted = np.array([expected["input_ids"][start:end], expected["positions"][start:end]])[:, is_fed]
        check([ids[row][positions[row] >= 0].tolist(), positions[row][positions[row] >= 0].tolist()], wanted.tolist())


def run_all_mid_prefill(given: Mapping[str, Any], expected: bool) -> None:
    """Nothing is drafted in a step whose rows all stay in their prompts: the scheduler plans no row that decodes.

    A prompt's last token is fed by its first round, which is one of the step's scheduled tokens.
    """
    decoding = []
    for computed, prompt, scheduled in zip(
        given["num_computed"], given["num_prompt"], given["num_scheduled"], strict=True
    ):
        scheduler = Scheduler(Limits(max_rows=1, num_pages=1, block_size=prompt + 1, max_chunk_tokens=computed))
        scheduler.add(SequenceState("row", [0] * prompt, prompt + 1))
        scheduler.plan()  # what is computed already
        scheduler.limits = dataclasses.replace(scheduler.limits, max_chunk_tokens=max(scheduled - 1, 1))
        decoding += scheduler.plan().decoding
    check(not decoding, expected)
