"""Host. Conformance cases of configs, vocabularies and drafter inputs, by the functions that the engine calls."""

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conformance_tools import MismatchError, check, expect_error, first_of, ints

from jaxspec.config.detect import (
    DraftTokens,
    settle_draft_max_model_len,
    settle_draft_tensor_parallel,
    settle_num_tokens,
)
from jaxspec.config.methods import METHODS, canonical_method, extra_slots, initial_method
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.models.base import Family
from jaxspec.proposers.base import RowView
from jaxspec.proposers.draft_model import draft_model, to_target_vocabulary
from jaxspec.proposers.inputs import first_pass, kept_tokens, next_token_ids, padded_samples
from jaxspec.sampling.table import neutral_table
from jaxspec.scheduler.request import SequenceState
from jaxspec.scheduler.scheduler import Scheduler
from jaxspec.text.vocab_mapping import SPACE_MARKS, VocabMapping, Vocabulary, map_vocabularies

# config ---------------------------------------------------------------------------------------------------------------


def run_config(given: Mapping[str, Any], expected: Any) -> None:
    asked = dict(given)
    if "target_tp" in asked:
        method = asked.get("method", "draft_model")
        expect(lambda: settle_draft_tensor_parallel(asked.get("draft_tp"), asked["target_tp"], method), expected)
    elif "n_predict" in asked:
        told = None if asked["n_predict"] is None else DraftTokens(asked["n_predict"], "multiple")
        expect(lambda: settle_num_tokens(asked.get("num_speculative_tokens"), told), expected)
    elif "draft" in asked and "target" in asked:
        limits = asked["draft"], asked["target"]
        expect(lambda: settle_draft_max_model_len(asked.get("speculative"), *limits), expected)
    elif isinstance(expected, str) and expected not in ERRORS:
        check(initial_method(asked.get("method"), asked.get("model")), canonical_method(expected))
    elif isinstance(expected, Mapping) and "warning" in expected:
        run_alias(asked, expected)
    else:
        run_whole_config(asked, expected)


ERRORS = ("ValueError", "ValidationError", "ConfigError")


def expect(run: Callable[[], Any], expected: Any) -> None:
    """The call gives the value, or fails where an error is expected, by its name alone or with a message."""
    if expected in ERRORS:
        expected = {"error": expected}
    if isinstance(expected, Mapping) and "error" in expected:
        expect_error(run, expected)
    else:
        check(run(), expected)


def run_alias(given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Only the name of the method: the rest of a config may not be given in such a case."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("jaxspec")
    logger.addHandler(handler)
    try:
        found = initial_method(given.get("method"), given.get("model"))
    finally:
        logger.removeHandler(handler)
    if "method" in expected:
        check(found, canonical_method(expected["method"]))
    if not any(expected["warning"] in warning for warning in warnings):
        raise MismatchError(f"no warning says {expected['warning']!r}: {warnings!r}")


def run_whole_config(given: dict[str, Any], expected: Any) -> None:
    short = {
        "rates": "synthetic_acceptance_rates",
        "length": "synthetic_acceptance_length",
        "n": "num_speculative_tokens",
    }
    config = {short.get(key, key): value for key, value in given.items()}
    if "method" not in config and "model" not in config:
        config["method"] = "ngram"  # cases of what all methods share name none
    if isinstance(expected, Mapping) and "error" in expected:
        expect_error(lambda: SpeculativeConfig(**config), expected)
        return
    if expected in ERRORS:
        expect_error(lambda: SpeculativeConfig(**config), {})
        return
    if METHODS[initial_method(config.get("method"), config.get("model"))].num_tokens == "needed":
        config.setdefault("num_speculative_tokens", 3)
    found = SpeculativeConfig(**config)
    rates = found.synthetic_rates(found.num_speculative_tokens) if found.num_speculative_tokens else None
    if not isinstance(expected, Mapping):
        if isinstance(expected, list) and rates is not None:
            close(list(rates), expected)
            return
        raise MismatchError(f"no way to compare a config with {expected!r}")
    for key, value in expected.items():
        if key in ("rates", "synthetic_acceptance_rates") and rates is not None:
            close(list(rates), value)
        elif key == "method":
            check(found.method or "draft_model", canonical_method(value))
        else:
            check(getattr(found, short.get(key, key)), value)


def close(found: list[float], expected: list[float]) -> None:
    if len(found) != len(expected) or not np.allclose(found, expected):
        raise MismatchError(f"expected {expected!r}, got {found!r}")


# vocab_mapping --------------------------------------------------------------------------------------------------------


def run_vocab_mapping(case_name: str, given: Mapping[str, Any], expected: Any) -> None:
    def side(name: str) -> Vocabulary:
        ids = given[f"{name}_vocab"]
        size = first_of(given, f"{name}_vocab_size", f"{name}_size")
        marks = given.get(f"{name}_space", given.get(f"{name}_space_mark", ()))
        return Vocabulary(
            ids,
            size if size is not None else 1 + max(ids.values()),
            given.get(f"{name}_unk"),
            given.get(f"{name}_eos"),
            tuple(marks) if marks else SPACE_MARKS,
        )

    def mapped() -> VocabMapping:
        return map_vocabularies(side("target"), side("draft"))

    if (isinstance(expected, Mapping) and "error" in expected) or expected in ERRORS:
        expect(mapped, expected)
        return
    mapping = mapped()
    tables = {"target_to_draft": mapping.target_to_draft_V, "draft_to_target": mapping.draft_to_target}
    if isinstance(expected, list):
        # The case's name says which way, where its input does not.
        which = [name for name in tables if name in f"{case_name} {given.get('direction', '')}"] or list(tables)
        ids = given.get("ids")
        found = {}
        for name in which:
            table = tables[name].tolist()
            found[name] = table if ids is None else [table[one] for one in ids if one < len(table)]
        if expected not in found.values():
            raise MismatchError(f"expected {expected!r}, got {found!r}")
        return
    masks = {"mask_draft": mapping.is_shared_draft, "mask_target": mapping.is_shared_V}
    for name, value in expected.items():
        if name in tables:
            check(tables[name].tolist(), value)
        elif name in masks:
            check(masks[name].astype(int).tolist(), [int(one) for one in value])
        elif name in ("intersection_size", "num_shared"):
            check(mapping.num_shared, value)
        elif name == "masked_logits":
            check_masked(mapping, side("draft").size)
        else:
            raise MismatchError(f"no way to check {name!r}")


def check_masked(mapping: VocabMapping, size: int) -> None:
    """What the proposer makes of any logits of the draft: -inf for what is not shared, the rest by the target's ids."""
    logits_BV = np.arange(2 * size, dtype=np.float32).reshape(2, size)
    arrays = map(jnp.asarray, (logits_BV, mapping.target_to_draft_V, mapping.is_shared_V))
    found_BV = np.asarray(to_target_vocabulary(*arrays))
    for token_id, draft_id in enumerate(mapping.target_to_draft_V):
        expected = logits_BV[:, draft_id] if mapping.is_shared_V[token_id] else np.full(2, -np.inf)
        check(found_BV[:, token_id].tolist(), expected.tolist())


# drafter_inputs -------------------------------------------------------------------------------------------------------


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
    found = first_pass(
        given["tokens"],
        given["positions"],
        given["query_lens"],
        given["num_rejected"],
        given["next_tokens"],
        pad_id=given.get("pad_id", 0),
        num_masks=given["K"] - 1 if is_parallel else 0,
        mask_id=given.get("mask_id", -1),
        shift=given.get("shift", given.get("shift_input_ids", is_parallel)),
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
    if not is_parallel and "input_ids" in expected:
        run_first_pass_of_a_draft_model(given, expected)


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


def counting_drafter(num_tokens: int, family: Family = COUNTING):
    return draft_model(
        family,
        None,  # type: ignore[arg-type]
        num_tokens=num_tokens,
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


def run_first_pass_of_a_draft_model(given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The proposer's own first pass, which has rows side by side, feeds the same tokens at the same positions."""
    fed: list[tuple[np.ndarray, np.ndarray]] = []

    def forward(weights, config, tokens, pool):
        if not fed:  # what follows is traced
            fed.append((np.asarray(tokens.token_ids_BT), np.asarray(tokens.positions_BT)))
        return COUNTING.forward(weights, config, tokens, pool)

    proposer = counting_drafter(max(given["query_lens"]), COUNTING._replace(forward=forward))
    starts = np.cumsum([0, *given["query_lens"]])
    histories, first = [], []
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        first.append(given["positions"][start])
        kept = given["tokens"][start : end - given["num_rejected"][row]]
        histories.append([0] * first[-1] + kept + [given["next_tokens"][row]])
    state = proposer.init(len(histories)).replace(cached_R=ints(first))
    proposer.propose({"draft": {}}, state, view_of(histories))
    ids, positions = fed[0]
    is_padding = np.asarray(expected["rejected_mask"], bool)
    starts = np.cumsum([0, *(length + 1 for length in given["query_lens"])])
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
        scheduler = Scheduler(max_rows=1, num_pages=1, block_size=prompt + 1, max_chunk_tokens=max(scheduled - 1, 1))
        scheduler.add(SequenceState("row", prompt, prompt + 1, num_prefilled=min(computed, prompt - 1)))
        decoding += scheduler.plan().decoding
    check(not decoding, expected)
