"""Host. Conformance cases of configs and vocabularies, by the functions that the engine calls."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from conformance_tools import MismatchError, check, expect_error, first_of

from jaxspec.config.detect import (
    DraftTokens,
    settle_draft_max_model_len,
    settle_draft_tensor_parallel,
    settle_num_tokens,
)
from jaxspec.config.methods import METHODS, canonical_method, initial_method
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.proposers.draft_model import to_target_vocabulary
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
