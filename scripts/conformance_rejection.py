"""Host. Conformance cases of rejection: one round's verdict as stated, or the frequencies of many."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from conformance_tools import (
    MismatchError,
    check,
    ints,
    matrix_of,
)

from jaxspec.keys import request_key
from jaxspec.rejection.verify import verify
from jaxspec.sampling.counts import token_counts
from jaxspec.sampling.edit_table import edit_row
from jaxspec.sampling.edits import edit
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors import TokenContext
from jaxspec.sampling.table import make_table
from jaxspec.types import Drafts

NUM_SEEDS = 4096  # draws of a case with stated probabilities: 4 standard deviations are below 0.032

verified = jax.jit(verify, static_argnames=("rule", "synthetic_rates"))

GREEDY = SamplingParams(temperature=0.0)
NEUTRAL_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


class Text(NamedTuple):
    """What a row's penalties and edits look at."""

    prompt: list[int]
    output: list[int]
    bad_words: list[list[int]]


# Cases are padded to few shapes: what is compiled for one serves many, and padding must not show.
MIN_ROWS, MIN_DRAFTS, MIN_VOCAB = 4, 6, 128


def judge(
    logits: list[np.ndarray],
    draft_rows: list[list[int]],
    params: list[SamplingParams],
    draft_logits: list[np.ndarray] | None = None,
    *,
    seed: int = 0,
    rule: str = "standard",
    rates: tuple[float, ...] = (),
    texts: list[Text] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [B, K + 1], accepted [B]) of one round; logits: one [drafts + 1, V] array a row. K: the most drafts."""
    num_rows, num_drafts, vocab_size = len(logits), max(map(len, draft_rows)), logits[0].shape[1]
    B, K, V = max(num_rows, MIN_ROWS), max(num_drafts, MIN_DRAFTS), max(vocab_size, MIN_VOCAB)

    def padded(rows: list[np.ndarray], num_positions: int) -> jax.Array:
        out = np.full((B, num_positions, V), np.nan, np.float32)
        out[num_rows:] = 0
        for index, row in enumerate(rows):
            out[index, : len(row)] = -np.inf
            out[index, : len(row), :vocab_size] = row
        return jnp.asarray(out)

    ids = np.full((B, K), -1)
    for index, row in enumerate(draft_rows):
        ids[index, : len(row)] = row
    counts = [len(row) for row in draft_rows] + [0] * (B - num_rows)
    logits_BKV = None if draft_logits is None else padded(draft_logits, K)
    keys = np.stack([request_key(seed, row) for row in range(B)])
    table = make_table([*params, *[params[0]] * (B - num_rows)], keys)
    drafts = Drafts(token_ids_BK=ints(ids), counts_B=ints(counts), logits_BKV=logits_BKV)
    logits_BJV, counts_BV = padded(logits, K + 1), None
    if texts is not None:
        texts = [*texts, *[Text([], [], [])] * (B - num_rows)]
        logits_BJV, counts_BV = edited(logits_BJV, drafts, [*params, *[GREEDY] * (B - num_rows)], texts)
    verdict = verified(
        logits_BJV,
        drafts,
        table,
        jnp.full(B, 10, jnp.int32),
        counts_BV,
        rule=rule,
        synthetic_rates=(*rates, *[0.0] * (K - len(rates))) if rates else (),
    )
    tokens = np.asarray(verdict.token_ids_BJ)[:num_rows]
    check(bool((tokens[:, num_drafts + 1 :] == -1).all()), True)
    return tokens[:, : num_drafts + 1], np.asarray(verdict.num_accepted_B)[:num_rows]


def edited(
    logits_BJV: jax.Array, drafts: Drafts, params: list[SamplingParams], texts: list[Text]
) -> tuple[jax.Array, jax.Array]:
    """The logits after each row's edits, all but those of the bonus; and the counts that its penalties look at."""
    B, _, V = logits_BJV.shape
    history = np.full((B, 8 + max(len(text.prompt) + len(text.output) for text in texts)), -1)
    for row, text in enumerate(texts):
        history[row, : len(text.prompt) + len(text.output)] = text.prompt + text.output
    prompt_len_B = ints([len(text.prompt) for text in texts])
    len_B = prompt_len_B + ints([len(text.output) for text in texts])
    rows = [edit_row(one, text.bad_words, V) for one, text in zip(params, texts, strict=True)]
    table = jax.tree.map(lambda *columns: jnp.asarray(np.stack(columns)), *rows)
    context = TokenContext(ints(history), prompt_len_B, len_B, drafts.token_ids_BK)
    found_BJV = edit(logits_BJV, table, context, stop_ids_BW=jnp.full((B, 1), -1), min_len_B=ints([0] * B))
    is_bonus_BJ = jnp.arange(logits_BJV.shape[1])[None] == drafts.counts_B[:, None]
    logits_BJV = jnp.where(is_bonus_BJ[:, :, None], logits_BJV, found_BJV)
    return logits_BJV, token_counts(ints(history), prompt_len_B, len_B, V)


def peaked(rows: list[list[int]], vocab_size: int, margin: float = 20.0) -> list[np.ndarray]:
    """Logits whose arg-max is the given id at every position."""
    return [margin * np.eye(vocab_size)[row] for row in rows]


def vocab_of(*ids: Any) -> int:
    return max([0, *(token for token in jax.tree.leaves(ids))]) + 2


def run_rejection_greedy(given: Mapping[str, Any], expected: Any) -> None:
    if "runner_up_token" in given:
        run_edited(given, expected)
        return
    if "bonus" not in given:
        run_verified_blocks(given, expected)
        return
    best = [[*row, bonus] for row, bonus in zip(given["target_argmax"], given["bonus"], strict=True)]
    logits = peaked(best, given.get("vocab", vocab_of(best, given["draft"])))
    tokens, _ = judge(logits, given["draft"], [GREEDY] * len(best))
    check(tokens.tolist(), expected)


def run_edited(given: Mapping[str, Any], expected: Any) -> None:
    """A top and a runner-up token at every draft, edited and penalised; the bonus is given as drawn, edits and all."""
    drafts, runner_up = given["draft"], given["runner_up_token"]
    tops = given["target_argmax"] if "target_argmax" in given else [[given["logit_top_token"]] * len(d) for d in drafts]
    tops = [[*row, bonus] for row, bonus in zip(tops, given["bonus"], strict=True)]
    nothing: list[list[int]] = [[]] * len(drafts)
    outputs, prompts = given.get("outputs", nothing), given.get("prompt", nothing)
    bad_words = [given.get("bad_words", {}).get(str(row), []) for row in range(len(drafts))]
    ranges = given.get("disallowed_ranges", [None] * len(drafts))
    allowed = given.get("allowed_token_ids", [None] * len(drafts))
    known = (drafts, tops, runner_up, outputs, prompts, bad_words, ranges, allowed)
    vocab_size = given.get("vocab", vocab_of(known))
    logits = []
    for row in tops:
        rows = np.full((len(row), vocab_size), -1e4)
        rows[:-1, runner_up] = given.get("runner_up", 99.0)
        rows[np.arange(len(row)), row] = given.get("logit_top", 100.0)
        logits.append(rows)

    def params_of(row: int) -> SamplingParams:
        ids = allowed[row]
        if ranges[row] is not None:
            low, high = ranges[row]
            ids = [token for token in range(vocab_size) if not low <= token <= high]
        values = {
            name: np.broadcast_to(given.get(name, neutral), len(drafts)).tolist()[row]
            for name, neutral in NEUTRAL_PENALTIES.items()
        }
        return SamplingParams(temperature=0.0, allowed_token_ids=ids, **values)

    histories = [Text(*texts) for texts in zip(prompts, outputs, bad_words, strict=True)]
    tokens, _ = judge(logits, drafts, [params_of(row) for row in range(len(drafts))], texts=histories)
    check(tokens.tolist(), expected)


def run_verified_blocks(given: Mapping[str, Any], expected: Any) -> None:
    """dflash_chain: column 0 of each block is committed already; row j of the target judges column j + 1."""
    target = matrix_of(given, "target")
    blocks = matrix_of(given, "candidate", "block", "draft")
    logits = peaked(target, vocab_of(target, blocks))
    judged = judge(logits, [block[1:] for block in blocks], [GREEDY] * len(blocks))
    tokens, accepted = (array.tolist() for array in judged)
    kept = [row[: count + 1] for row, count in zip(tokens, accepted, strict=True)]
    if not isinstance(expected, Mapping):
        check(tokens if len(expected[0]) == len(tokens[0]) else kept, expected)
        return
    for name, value in expected.items():
        if "accept" in name:
            check(accepted, value)
        elif "bonus" in name:
            check([row[-1] for row in kept], value)
        elif "token" in name or "output" in name or "commit" in name:
            check(tokens if len(value[0]) == len(tokens[0]) else kept, value)
        else:
            raise MismatchError(f"no way to check {name!r}")


def run_rejection_random(given: Mapping[str, Any], expected: Any) -> None:
    named = given.get("rejection_sample_method")
    if "target_logit_argmax" in given:
        best = [[*row, bonus] for row, bonus in zip(given["target_logit_argmax"], given["bonus"], strict=True)]
        logits = peaked(best, given["vocab"], given["margin"])
        params = [SamplingParams(temperature=temperature) for temperature in given["temperature"]]
        for rule in (named,) if named else ("standard", "block", "coupled"):
            for seed in range(32):
                tokens, _ = judge(logits, given["draft"], params, seed=seed, rule=rule)
                check(tokens.tolist(), expected)
        return
    if "draft_pattern" in given:
        vocab_size = 16
        target = [(3 * place + 1) % vocab_size for place in range(given["K"] + 1)]
        if not given["target_equals_draft"]:
            target = [(token + 1) % vocab_size for token in target]
        drafts = [
            -1 if one == "-1" else (3 * place + 1) % vocab_size for place, one in enumerate(given["draft_pattern"])
        ]
        target_probs, draft_probs = np.eye(vocab_size)[target], None
    else:
        drafts, draft_probs = given["draft"], given["draft_probs"]
        bonus = np.eye(given["vocab"])[given["bonus"]]
        target_probs = np.concatenate(
            [np.asarray(given["target_probs"], float).reshape(-1, given["vocab"]), bonus[None]]
        )
    filters = {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in given}
    # A case that names no rule holds for standard, and for coupled where it is the same; its drafts are given, not
    # drawn, so block differs but where the drafts are certain to stand or to fall.
    rules = (named,) if named else ("standard", "coupled") if draft_probs is None else ("standard",)
    if not named and not isinstance(expected, Mapping):
        rules += ("block",)
    for rule in rules:
        check_draws(many_draws(target_probs, drafts, draft_probs, filters, rule), expected)


def many_draws(target_probs, drafts, draft_probs, filters, rule) -> np.ndarray:
    """The verdicts of NUM_SEEDS requests that differ by their key alone."""

    def repeated(probs) -> list[np.ndarray]:
        with np.errstate(divide="ignore"):
            return [np.log(np.asarray(probs, np.float64))] * NUM_SEEDS

    params = [SamplingParams(**{"temperature": 1.0} | filters)] * NUM_SEEDS
    draft_logits = None if draft_probs is None else repeated(draft_probs)
    tokens, _ = judge(repeated(target_probs), [drafts] * NUM_SEEDS, params, draft_logits, rule=rule)
    return tokens


def check_draws(tokens_BJ: np.ndarray, expected: Any) -> None:
    """expected: the one possible row, or statements about many: see `statements`."""
    if not isinstance(expected, Mapping):
        rows = np.unique(tokens_BJ, axis=0).tolist()
        check(rows, [expected])
        return
    for name, value in expected.items():
        if name not in ("tolerance", "note"):
            check_statement(tokens_BJ, name, value, expected.get("tolerance", 0.035))


def check_statement(tokens_BJ: np.ndarray, name: str, value: Any, tolerance: float) -> None:
    """One statement about many draws: a bound on the number of tokens, a frequency, or a distribution."""
    num_sampled = (tokens_BJ >= 0).sum(axis=1)
    words = name.split("_")
    figure: Any
    if name in ("max_num_sampled", "min_num_sampled"):
        check(int(getattr(num_sampled, words[0])()), value)
        return
    if words[:3] == ["frac", "num", "sampled"]:
        figure, words = float((num_sampled == int(words[3])).mean()), words[4:]
    elif name in ("accept_prob", "acceptance_rate", "accept_rate", "accept_prob_range", "acceptance_rate_range"):
        figure, words = float((num_sampled > 1).mean()), words[2:]
    elif name in ("mean_num_sampled", "mean_num_sampled_range"):
        figure, words = float(num_sampled.mean()), words[3:]
    elif name in ("in_vocab", "in_range"):
        check(bool((tokens_BJ[:, 0] >= 0).all()), value)
        return
    elif name in ("probs", "first_token_probs", "recovered_probs", "output_probs", "distribution"):
        chosen = tokens_BJ[:, 0] if name != "recovered_probs" else tokens_BJ[num_sampled == 1, 0]
        figure, words = (np.bincount(chosen, minlength=len(value)) / max(len(chosen), 1)).tolist(), []
    else:
        raise MismatchError(f"no way to check {name!r}")
    if words == ["gt"] or words == ["lt"]:
        is_right = figure > value if words == ["gt"] else figure < value
    elif words == ["range"]:
        is_right = value[0] <= figure <= value[1]
    else:
        is_right = np.shape(figure) == np.shape(value) and np.abs(np.subtract(figure, value)).max() <= tolerance
    if not is_right:
        raise MismatchError(f"{name} {value!r}: got {figure!r}")
