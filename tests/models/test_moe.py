"""Device. Experts against a loop over tokens in float64 numpy: routers of every family, groups, shared experts."""

import jax
import numpy as np
import pytest

from jaxspec.config.model import MoeConfig
from jaxspec.engine.build import _load
from jaxspec.models.moe import moe_mlp, moe_specs
from jaxspec.types import ArraySpec
from jaxspec.weights.checkpoint import open_checkpoint
from tests.models.paging import Pager
from tests.oracle.folders import TINY
from tests.oracle.goldens import read_golden

D = 16
BASE = {"layers": (True,), "num_experts": 6, "num_experts_per_token": 2, "intermediate_size": 10}
ROUTERS = {
    "mixtral": BASE,
    "one expert a token": BASE | {"num_experts_per_token": 1},
    "all of them": BASE | {"num_experts_per_token": 6},
    "qwen3": BASE | {"renormalize": False},
    "ernie": BASE | {"has_correction_bias": True, "shared_intermediate_size": 14},
    "least weight sum": BASE | {"renormalize": True, "min_weight_sum": 0.9, "score": "sigmoid"},
    "glm": BASE | {"has_correction_bias": True, "score": "sigmoid", "scale": 1.5, "shared_intermediate_size": 10},
    "deepseek": BASE
    | {"num_experts": 12, "num_groups": 4, "num_kept_groups": 2, "num_experts_per_token": 3, "score": "sigmoid"}
    | {"has_correction_bias": True, "scale": 2.5},
}


def silu(x):
    return x / (1 + np.exp(-x))


def expected(w, x, moe):
    w = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), w)
    rows = []
    for token in x.astype(np.float64):
        logits = w["router"] @ token
        score = np.exp(logits) / np.exp(logits).sum() if moe.score == "softmax" else 1 / (1 + np.exp(-logits))
        choice = score + w.get("router_bias", 0)
        groups = np.split(choice, moe.num_groups)
        worth = [np.sort(group)[-2:].sum() if moe.num_groups > 1 else 0 for group in groups]
        kept = np.argsort(worth)[::-1][: moe.num_kept_groups]
        size = moe.num_experts // moe.num_groups
        allowed = [e for e in range(moe.num_experts) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: moe.num_experts_per_token]
        total = max(score[chosen].sum(), moe.min_weight_sum) if moe.renormalize else 1.0
        out = np.zeros(D)
        for e in chosen:
            hidden = silu(token @ w["experts_gate"][e]) * (token @ w["experts_up"][e])
            out += score[e] / total * moe.scale * (hidden @ w["experts_down"][e])
        if moe.shared_intermediate_size:
            gate, up = np.split(w["shared"]["gate_up"] @ token, 2)
            out += w["shared"]["down"] @ (silu(gate) * up)
        rows.append(out)
    return np.stack(rows)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_loop_over_tokens_says_the_same(name):
    moe, rng = MoeConfig(**ROUTERS[name]), np.random.default_rng(len(name))
    specs = moe_specs(D, moe, np.float32)
    weights = jax.tree.map(
        lambda spec: rng.standard_normal(spec.shape).astype(np.float32) * 0.5,
        specs,
        is_leaf=lambda leaf: isinstance(leaf, ArraySpec),
    )
    x = rng.standard_normal((7, D)).astype(np.float32)
    found = jax.jit(lambda w, x: moe_mlp(w, x, moe))(weights, x)
    np.testing.assert_allclose(found, expected(weights, x, moe), atol=2e-5, rtol=1e-5)


def test_a_broken_token_breaks_no_other():
    moe, rng = MoeConfig(**BASE), np.random.default_rng(0)
    weights = {name: rng.standard_normal(spec.shape).astype(np.float32) for name, spec in
               moe_specs(D, moe, np.float32).items()}  # fmt: skip
    x = rng.standard_normal((5, D)).astype(np.float32)
    run = jax.jit(lambda w, x: moe_mlp(w, x, moe))
    whole = np.asarray(run(weights, x))
    x[2] = np.nan
    found = np.asarray(run(weights, x))
    others = [0, 1, 3, 4]
    np.testing.assert_array_equal(found[others], whole[others])


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_in_bfloat16_stay_near_the_golden(name):
    """Weights lose a 2**-8 each; the router stays float32, and no token here goes to another expert for it."""
    expected = read_golden(name)
    pager = Pager(TINY / name, num_rows=2, max_len=24, page_size=8)
    with open_checkpoint(TINY / name) as checkpoint:
        pager.weights = _load(checkpoint, "bfloat16")
    for (_, logits), wanted in zip(pager.feed(expected["input_ids"].tolist()), expected["logits"], strict=True):
        error_T = np.abs(logits - wanted).max(axis=1) / np.abs(wanted).max()
        assert 1e-3 < error_T.max() < 0.02
