"""Host. The rejection kernels, interpreted, give the integers of the plain reference: every body, rule and shape."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the only place where the race detector speaks
from jax.experimental.pallas import tpu as pltpu

from jaxspec.errors import ConfigError
from jaxspec.pallas_kernels.rejection import gpu, passes, reference, tpu
from jaxspec.pallas_kernels.rejection.api import pick_implementation, reject
from jaxspec.pallas_kernels.rejection.arg_specs import REJECTION_SPECS, RejectionSpec
from jaxspec.pallas_kernels.rejection.rules import BLOCK, COUPLED, GREEDY, STANDARD
from tests.pallas_kernels.cases import assert_equal, random_arguments
from tests.quick import heavy_but

SPECS = {spec.name: spec for spec in REJECTION_SPECS if "test" in spec.tags}
ALL, WITH_RATES = (GREEDY, STANDARD, COUPLED, BLOCK), (GREEDY, STANDARD)
BODIES = {
    "tpu": functools.partial(tpu.run, interpret=True),
    "gpu": functools.partial(gpu.run, interpret=True),
    "tpu, races": functools.partial(tpu.run, interpret=pltpu.InterpretParams(detect_races=True)),
}


@functools.partial(jax.jit, static_argnames=("rules", "body"))
def judged(arguments, rules, body):
    if body == "reference":
        return reference.reject(**{"accept_rate_N": None, "penalties": None} | arguments, rules=rules)
    return passes.reject(**arguments, rules=rules, run=BODIES[body])


def rules_of(spec):
    return WITH_RATES if spec.has_rates else ALL


# The bodies share their arithmetic, so the second one need not run all of it again.
ON_GPU = ("no_drafts", "ragged", "penalised_bf16_q", "four_shards", "rates_with_q")


CASES = [(name, "tpu") for name in SPECS] + [(name, "gpu") for name in ON_GPU]
QUICK = [("ragged", "tpu"), ("ragged", "gpu"), ("penalised_bf16_q", "tpu"), ("four_shards", "gpu")]


@pytest.mark.parametrize("case", heavy_but(CASES, QUICK.__contains__), ids="-".join)
def test_kernel_equals_reference(case):
    name, body = case
    spec = SPECS[name]
    for seed in range(4 if spec.vocab_size < 1000 else 2):
        arguments = random_arguments(
            spec, rules_of(spec), np.random.default_rng(seed), is_full=seed == 0, broken=0.3 if seed % 2 else 0
        )
        found = judged(arguments, rules_of(spec), body)
        assert_equal(found, judged(arguments, rules_of(spec), "reference"))
        assert ((found[0] >= 0) & (found[0] <= spec.num_drafts)).all()
        assert ((found[1] >= 0) & (found[1] < spec.vocab_size)).all()


# What is not in the batch's rules is not compiled: each rule alone is a program of its own.
ALONE = [(GREEDY, STANDARD), (GREEDY, COUPLED), (GREEDY, BLOCK)]


@pytest.mark.parametrize("rules", heavy_but(ALONE, lambda rules: STANDARD in rules), ids=str)
def test_each_rule_alone(rules):
    for seed in range(3):
        arguments = random_arguments(SPECS["ragged_with_q"], rules, np.random.default_rng(seed))
        assert_equal(judged(arguments, rules, "gpu"), judged(arguments, rules, "reference"))


@pytest.mark.heavy
def test_the_tpu_body_has_no_race():
    arguments = random_arguments(SPECS["penalised_bf16_q"], ALL, np.random.default_rng(7))
    found = jax.block_until_ready(judged(arguments, ALL, "tpu, races"))
    assert interpret_pallas_call.races is not None, "nothing was watched"
    assert not interpret_pallas_call.races.races_found
    assert_equal(found, judged(arguments, ALL, "reference"))


SMALL = RejectionSpec("small", 3, 3, 11, True, "bfloat16", has_penalties=True)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(
    seed=st.integers(0, 2**32 - 1),
    has_draft_logits=st.booleans(),
    broken=st.sampled_from([0.0, 0.3, 1.0]),
    scale=st.sampled_from([1.0, 30.0, 3e38]),
)
def test_random_batches(seed, has_draft_logits, broken, scale):
    """Ragged batches, zero and -1 drafts, ids out of range, rows of NaN, one-sided and flat distributions."""
    spec = dataclasses.replace(SMALL, has_draft_logits=has_draft_logits)
    arguments = random_arguments(spec, ALL, np.random.default_rng(seed), broken=broken)
    with np.errstate(over="ignore"):
        logits = np.asarray(arguments["logits_RV"]) * np.float32(scale)
    arguments["logits_RV"] = jnp.asarray(logits)
    expected = judged(arguments, ALL, "reference")
    for body in ("tpu", "gpu"):
        assert_equal(judged(arguments, ALL, body), expected)


@pytest.mark.parametrize("body", ["tpu", "gpu"])
def test_infinite_logits_under_block_verification(body):
    """Drafts that hardly stand, then a row of +inf: what block verification takes off its log-probabilities is far
    below the unit in the last place of the logits themselves."""
    spec = dataclasses.replace(SMALL, has_draft_logits=True)
    arguments = random_arguments(spec, ALL, np.random.default_rng(2410), broken=1.0)
    arguments["logits_RV"] = arguments["logits_RV"] * jnp.float32(30)
    assert_equal(judged(arguments, ALL, body), judged(arguments, ALL, "reference"))


@pytest.mark.parametrize("form", ["reference", "pallas"])
def test_rows_are_edited_before_anything_looks_at_them(form):
    """Each row by its own number; nothing where the batch is plain."""
    spec, rules = SPECS["ragged"], (GREEDY, STANDARD)
    arguments = random_arguments(spec, rules, np.random.default_rng(2))
    bias_RV = jnp.asarray(np.random.default_rng(3).normal(size=arguments["logits_RV"].shape) * 5, jnp.float32)
    edit = jax.tree_util.Partial(lambda bias_RV, logits_XV, rows_X: logits_XV + bias_RV[rows_X], bias_RV)
    run = jax.jit(functools.partial(reject, rules=rules, implementation=form))
    edited = arguments | {"logits_RV": arguments["logits_RV"] + bias_RV}
    for is_plain, expected in ((False, edited), (True, arguments)):
        found = run(**arguments, edit=edit, is_plain=jnp.asarray(is_plain))
        assert_equal(found, judged(expected, rules, "reference"))


@pytest.mark.parametrize("body", ["reference", "tpu", "gpu"])
@pytest.mark.parametrize("name", heavy_but(["ragged", "ragged_with_q"], lambda name: name == "ragged"))
def test_broken_logits_give_ids_in_the_vocabulary(name, body):
    spec = SPECS[name]
    for value in (np.nan, -np.inf, np.inf):
        arguments = random_arguments(spec, ALL, np.random.default_rng(0), is_full=True)
        arguments["logits_RV"] = jnp.full_like(arguments["logits_RV"], value)
        if spec.has_draft_logits:
            arguments["draft_logits_NV"] = jnp.full_like(arguments["draft_logits_NV"], value)
        num_accepted, tokens = judged(arguments, ALL, body)
        assert ((tokens >= 0) & (tokens < spec.vocab_size)).all()
        assert ((num_accepted >= 0) & (num_accepted <= spec.num_drafts)).all()


@pytest.mark.parametrize("spec", REJECTION_SPECS, ids=lambda spec: spec.name)
def test_the_listed_shapes_are_those_of_the_call(spec):
    """Every spec can be traced, so tests, benches and ahead-of-time compiles mean the same arguments."""
    arguments = spec.arguments()
    call = functools.partial(reject, rules=rules_of(spec), implementation="reference")
    num_accepted, tokens = jax.eval_shape(call, **arguments)
    assert num_accepted.shape == tokens.shape == (spec.num_requests,)
    assert num_accepted.dtype == tokens.dtype == jnp.int32
    if "test" in spec.tags:
        made = random_arguments(spec, rules_of(spec), np.random.default_rng(1))
        wanted, found = jax.tree.flatten(arguments), jax.tree.flatten(made)
        assert found[1] == wanted[1]
        assert [(leaf.shape, leaf.dtype) for leaf in found[0]] == [(leaf.shape, leaf.dtype) for leaf in wanted[0]]


def test_the_platform_decides_and_a_named_kernel_is_never_replaced():
    choices = {platform: pick_implementation("auto", platform) for platform in ("cpu", "tpu", "gpu", "cuda", "rocm")}
    assert choices == {"cpu": "reference", "tpu": "pallas", "gpu": "pallas", "cuda": "pallas", "rocm": "reference"}
    assert pick_implementation("pallas", "cpu") == "pallas"
    with pytest.raises(ConfigError, match=r"cannot run on platform='rocm'.*'auto' or 'reference'"):
        pick_implementation("pallas", "rocm")


def test_on_cpu_the_named_kernel_is_the_tpus_interpreted():
    arguments = random_arguments(SPECS["ragged"], ALL, np.random.default_rng(3))
    found = jax.jit(functools.partial(reject, rules=ALL, implementation="pallas"))(**arguments)
    assert_equal(found, judged(arguments, ALL, "reference"))


def test_shapes_that_do_not_fit_are_refused_at_trace_time():
    arguments = random_arguments(SPECS["one_row"], ALL, np.random.default_rng(0))
    half = arguments | {"logits_RV": arguments["logits_RV"].astype(jnp.bfloat16)}
    with pytest.raises(ValueError, match="float32"):
        reject(**half, rules=ALL)
    with pytest.raises(ValueError, match="BLOCK"):
        reject(**arguments, accept_rate_N=jnp.zeros(3), rules=ALL)
