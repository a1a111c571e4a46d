"""Host. The rejection kernel, interpreted, gives the integers of the plain reference, over every shape of the list."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.pallas_kernels.rejection.api import pick_implementation, reject
from jaxspec.pallas_kernels.rejection.arg_specs import REJECTION_SPECS
from jaxspec.pallas_kernels.rejection.rules import COUPLED, GREEDY, STANDARD

SPECS = [spec for spec in REJECTION_SPECS if "test" in spec.tags]
RULES = {"standard": (GREEDY, STANDARD), "coupled": (GREEDY, COUPLED), "all": (GREEDY, STANDARD, COUPLED)}


@functools.partial(jax.jit, static_argnames=("rules", "implementation"))
def judged(arguments, rules, implementation):
    return reject(**arguments, rules=rules, implementation=implementation)


def random_arguments(spec, rules, seed):
    """Ragged segments whose rows lie anywhere among the logits; every row that nobody should read is NaN."""
    rng = np.random.default_rng(seed)
    B, K, V = spec.num_requests, spec.num_drafts, spec.vocab_size
    R, N = B * (K + 1), B * K
    counts = rng.integers(0, K + 1, B)
    if seed == 0:
        counts[:] = K
    total = int(counts.sum())
    rows = rng.permutation(R)[: total + B]
    draft_rows = rng.permutation(N)[:total]
    cu = np.cumsum(counts)
    targets, bonuses = [], []
    for b in range(B):
        first = int(cu[b] - counts[b]) + b
        targets += rows[first : first + counts[b]].tolist()
        bonuses.append(int(rows[first + counts[b]]))

    logits = np.full((R, V), np.nan, np.float32)
    logits[rows] = rng.normal(size=(len(rows), V)) * 2
    draft_logits = np.full((N, V), np.nan, np.float32)
    draft_logits[draft_rows] = logits[targets] + rng.normal(size=(total, V)) if total else 0
    ids = np.where(rng.random(total) < 0.6, np.nan_to_num(logits[targets]).argmax(axis=1) if total else 0, 0)
    ids = np.where(rng.random(total) < 0.15, rng.choice([-1, V, 2**31 - 1], total), ids)
    rule_B = rng.choice(rules, B)
    rule_R, temperature_R = np.full(R, GREEDY), np.full(R, np.nan)
    top_k_R, top_p_R, min_p_R = np.full(R, 3), np.full(R, np.nan), np.full(R, np.nan)
    for b in range(B):
        for row in [*targets[int(cu[b] - counts[b]) : int(cu[b])], bonuses[b]]:
            is_greedy = rule_B[b] == GREEDY
            rule_R[row] = rule_B[b]
            temperature_R[row] = 1.0 if is_greedy else rng.choice([0.5, 1.0, 1.7])
            filtered = not is_greedy and rng.random() < 0.5
            top_k_R[row] = rng.choice([0, 5]) if filtered else 0
            top_p_R[row] = rng.choice([1.0, 0.8]) if filtered else 1
            min_p_R[row] = rng.choice([0.0, 0.1]) if filtered else 0
    pad = N - total
    return {
        "logits_RV": jnp.asarray(logits),
        "draft_logits_NV": jnp.asarray(draft_logits, spec.draft_dtype) if spec.has_draft_logits else None,
        "draft_token_ids_N": jnp.asarray([*ids, *[-1] * pad], jnp.int32),
        "target_rows_N": jnp.asarray([*targets, *[-1] * pad], jnp.int32),
        "draft_rows_N": jnp.asarray([*draft_rows, *[0] * pad], jnp.int32),
        "bonus_rows_B": jnp.asarray(bonuses, jnp.int32),
        "cu_num_draft_tokens_B": jnp.asarray(cu, jnp.int32),
        "rule_R": jnp.asarray(rule_R, jnp.int32),
        "temperature_R": jnp.asarray(temperature_R, jnp.float32),
        "top_k_R": jnp.asarray(top_k_R, jnp.int32),
        "top_p_R": jnp.asarray(top_p_R, jnp.float32),
        "min_p_R": jnp.asarray(min_p_R, jnp.float32),
        "accept_uniform_R": jnp.asarray((rng.integers(0, 2**23, R) + 0.5) / 2**23, jnp.float32),
        "noise_key_R2": jnp.asarray(rng.integers(2**32, size=(R, 2), dtype=np.uint32)),
    }


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernel_equals_reference(spec, rules):
    for seed in range(3):
        arguments = random_arguments(spec, RULES[rules], seed)
        expected = judged(arguments, RULES[rules], "reference")
        found = judged(arguments, RULES[rules], "pallas")
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
        assert ((found[1] >= 0) & (found[1] < spec.vocab_size)).all()


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("has_draft_logits", [False, True])
def test_broken_logits_give_ids_in_the_vocabulary(implementation, has_draft_logits):
    spec = next(one for one in SPECS if one.name == ("ragged_with_q" if has_draft_logits else "ragged"))
    for value in (np.nan, -np.inf, np.inf):
        arguments = random_arguments(spec, RULES["all"], 0)
        arguments["logits_RV"] = jnp.full_like(arguments["logits_RV"], value)
        if has_draft_logits:
            arguments["draft_logits_NV"] = jnp.full_like(arguments["draft_logits_NV"], value)
        num_accepted, tokens = judged(arguments, RULES["all"], implementation)
        assert ((tokens >= 0) & (tokens < spec.vocab_size)).all()
        assert ((num_accepted >= 0) & (num_accepted <= spec.num_drafts)).all()


@pytest.mark.parametrize("spec", REJECTION_SPECS, ids=lambda spec: spec.name)
def test_the_listed_shapes_are_those_of_the_call(spec):
    """Every spec can be traced, so tests, benches and ahead-of-time compiles mean the same arguments."""
    arguments = spec.arguments()
    call = functools.partial(reject, rules=RULES["all"], implementation="reference")
    num_accepted, tokens = jax.eval_shape(call, **arguments)
    assert num_accepted.shape == tokens.shape == (spec.num_requests,)
    assert num_accepted.dtype == tokens.dtype == jnp.int32
    made = random_arguments(spec, RULES["all"], 1) if "test" in spec.tags else {}
    for name, array in made.items():
        assert (array is None) == (arguments[name] is None), name
        assert array is None or (array.shape, array.dtype) == (arguments[name].shape, arguments[name].dtype), name


def test_the_platform_decides_and_a_named_kernel_is_never_replaced():
    assert pick_implementation("auto", "cpu") == "reference"
    assert pick_implementation("auto", "cuda") == "reference"
    assert pick_implementation("auto", "tpu") == "pallas"
    assert pick_implementation("pallas", "cpu") == "pallas"
    with pytest.raises(ConfigError, match=r"cannot run on platform='cuda'.*'auto' or 'reference'"):
        pick_implementation("pallas", "cuda")


def test_shapes_that_do_not_fit_are_refused_at_trace_time():
    arguments = random_arguments(SPECS[0], RULES["all"], 0)
    half = arguments | {"logits_RV": arguments["logits_RV"].astype(jnp.bfloat16)}
    with pytest.raises(ValueError, match="float32"):
        reject(**half, rules=RULES["all"])
