"""Device. Every member of a family of interchangeable things, small, for the suites that all of them must pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import pool_shape
from jaxspec.config.heads import DflashConfig, EagleConfig, MedusaConfig, MlpSpeculatorConfig, MtpConfig
from jaxspec.config.hf import model_config_from_hf
from jaxspec.models.base import random_weights
from jaxspec.models.heads import eagle as eagle_head
from jaxspec.models.heads.load import specs_of
from jaxspec.models.registry import family_of
from jaxspec.proposers.base import no_proposer
from jaxspec.proposers.dflash import dflash
from jaxspec.proposers.draft_model import draft_model
from jaxspec.proposers.eagle import eagle
from jaxspec.proposers.lookup_first import lookup_first
from jaxspec.proposers.medusa import medusa
from jaxspec.proposers.mlp_speculator import mlp_speculator
from jaxspec.proposers.mtp_modules import mtp_modules
from jaxspec.proposers.ngram import ngram
from jaxspec.proposers.self_draft import self_draft
from jaxspec.step.compiles import compile_count
from jaxspec.step.state import initial_state
from jaxspec.step.target import Target
from tests.lossless.replay import replay_proposer

V, K, MAX_LEN, PAGE_SIZE, ROWS = 20, 3, 24, 4, 3
MOST = 8  # drafts that any of them is asked for
NUM_PAGES = ROWS * MAX_LEN // PAGE_SIZE

# Golden folders that stand for the families in suites that run every one: a folder for each way a family can go.
FAMILY_MEMBERS = [
    "llama31",
    "mistral-swa",
    "phi3-longrope",
    "gemma2",
    "gemma3-text",
    "gpt2",
    "mixtral",
    "qwen3-moe",
    "glm4-moe-mtp",
    "deepseek-v3-mtp",
    "ernie4-5-moe",
]

CONFIG = model_config_from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_LEN,
        "vocab_size": V,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    None,
    [],
)
FAMILY = family_of(CONFIG.family)
DRAFT = functools.partial(
    draft_model,
    FAMILY,
    CONFIG,
    num_tokens=K,
    max_model_len=MAX_LEN,
    pool_shape=pool_shape(CONFIG, NUM_PAGES, PAGE_SIZE),
    pool_dtype=jnp.float32,
)
# Heads over the target's states, whose weights are their own: name -> (config, how to make a proposer of it).
LAYER = CONFIG.model_copy(update={"num_layers": 1, "sliding_window_layers": (None,)})
TWO_LAYERS = CONFIG.model_copy(update={"num_layers": 2, "sliding_window_layers": (None, None)})
COMMON = {"num_tokens": K, "max_model_len": MAX_LEN}
POOL = {"pool_shape": pool_shape(LAYER, NUM_PAGES, PAGE_SIZE), "pool_dtype": jnp.float32}
TARGET = {
    "target_logits": lambda weights, hidden: FAMILY.logits(weights, CONFIG, hidden),
    "vocab_size": V,
}
SMALL_V = 11
HEADS = {
    "eagle": EagleConfig(
        kind="eagle", model=LAYER, target_hidden_size=8, draft_vocab_size=V, has_embed=True, fc_bias=True
    ),
    "eagle3": EagleConfig(
        kind="eagle3", model=LAYER, target_hidden_size=8, draft_vocab_size=SMALL_V, aux_streams=(0, 1, 2),
        has_embed=True, has_head=True, id_map="d2t",
    ),
    "p_eagle": EagleConfig(
        kind="eagle3", model=TWO_LAYERS, target_hidden_size=8, draft_vocab_size=SMALL_V, aux_streams=(0, 2),
        has_embed=True, has_head=True, id_map="d2t", mask_token_id=V - 1,
    ),
    "medusa": MedusaConfig(
        num_heads=MOST, num_blocks=1, hidden_size=8, draft_vocab_size=V, has_bias=True, own_heads="each"
    ),
    "mtp of three": MtpConfig(
        layout="mimo", model=LAYER.model_copy(update={"num_layers": K}), prefix="", has_embed=True, aux_streams=(2,)
    ),
    "mlp_speculator": MlpSpeculatorConfig(hidden_size=8, inner_size=6, num_steps=MOST, vocab_size=V),
    "dflash": DflashConfig(
        model=LAYER.model_copy(update={"qk_norm": True}), target_hidden_size=8, aux_streams=(1, 2), block_size=K + 1,
        mask_token_id=V - 1, draft_vocab_size=V, is_causal=(False,), has_embed=True,
    ),
    "dspark": DflashConfig(
        kind="dspark", model=LAYER.model_copy(update={"qk_norm": True}), target_hidden_size=8, aux_streams=(0,),
        block_size=K, mask_token_id=V - 1, draft_vocab_size=SMALL_V, is_causal=(False,), sample_from_anchor=True,
        has_embed=True, has_head=True, has_map=True, markov="rnn", markov_rank=5,
    ),
}  # fmt: skip


def head_proposer(name: str, sample_method: str = "greedy", **more):
    """A head's proposer, which finds its weights under its own name."""
    config, options = HEADS[name], COMMON | {"sample_method": sample_method} | more
    if isinstance(config, EagleConfig):
        pool = POOL | {"pool_shape": pool_shape(config.model, NUM_PAGES, PAGE_SIZE)}
        proposer = eagle(eagle_head.HEAD, config, hidden_size=8, **TARGET, **pool, **options)
    elif name == "mtp of three":
        pool = POOL | {"pool_shape": pool_shape(config.model, NUM_PAGES, PAGE_SIZE)}
        proposer = mtp_modules(config, hidden_size=8, **TARGET, **pool, **options)
    elif name == "medusa":
        proposer = medusa(config, **TARGET, **options)
    elif name == "mlp_speculator":
        proposer = mlp_speculator(config, **options)
    else:
        proposer = dflash(config, hidden_size=8, **TARGET, **POOL, **options)

    def of(weights):
        return {"target": weights["target"], "draft": weights[name]}

    return proposer._replace(
        prefill=lambda weights, *args: proposer.prefill(of(weights), *args),
        propose=lambda weights, *args: proposer.propose(of(weights), *args),
    )


def own_layers(num_tokens: int = K):
    options = COMMON | {"num_tokens": num_tokens, "sample_method": "greedy", "block_size": PAGE_SIZE}
    return self_draft(FAMILY, CONFIG, exit_layer=1, **options)


def looking_up(proposer):
    """Of the histories in tests/contracts/test_proposers.py one has what is looked up, two have not."""
    return lookup_first(proposer, min_n=6, max_n=6, max_model_len=MAX_LEN)


PROPOSERS = {
    "none": no_proposer,
    "ngram": lambda: ngram(num_tokens=K, min_n=1, max_n=3, max_model_len=MAX_LEN),
    "ngram, latest": lambda: ngram(num_tokens=K, min_n=1, max_n=3, max_model_len=MAX_LEN, match_rule="latest"),
    "draft_model": lambda: DRAFT(sample_method="greedy"),
    "draft_model of one": lambda: DRAFT(sample_method="greedy", num_tokens=1),
    "probabilistic": lambda: DRAFT(sample_method="probabilistic"),
    "self": own_layers,
    "ngram+draft_model": lambda: looking_up(DRAFT(sample_method="greedy")),
    "ngram+self": lambda: looking_up(make_proposer("self")),
    "ngram+eagle3, probabilistic": lambda: looking_up(head_proposer("eagle3", "probabilistic")),
    "pard": lambda: DRAFT(sample_method="greedy", mask_token_id=V - 1),
    "replay": lambda: replay_proposer(K, MAX_LEN),
    **{name: functools.partial(head_proposer, name) for name in HEADS},
    "eagle of one": lambda: head_proposer("eagle", num_tokens=1),
    "mtp, on from the third": lambda: head_proposer("mtp of three", num_tokens=6),
    "probabilistic eagle3": lambda: head_proposer("eagle3", "probabilistic"),
}


@functools.cache
def make_proposer(name: str):
    return PROPOSERS[name]()


def stand_alone(proposer):
    """The proposer as one whose state is its own: where that is the target's pool, `prefill` is the target's."""
    if not proposer.is_in_target_pool:
        return proposer
    return proposer._replace(
        init=lambda num_rows: jnp.zeros(pool_shape(CONFIG, NUM_PAGES, PAGE_SIZE), jnp.float32),
        prefill=lambda weights, pool, rows_B, tokens, seen: FAMILY.forward(weights["target"], CONFIG, tokens, pool)[1],
    )


def make_target(rule="coupled"):
    return Target(FAMILY, CONFIG, rule, "reference", "cpu")


@functools.cache
def make_weights():
    specs = FAMILY.specs(CONFIG, np.float32)
    weights = {"target": random_weights(specs, 0), "draft": random_weights(specs, 1)}
    for seed, (name, config) in enumerate(HEADS.items(), 2):
        tree = specs_of(config, np.float32)
        id_map = tree.pop("id_map", None)
        weights[name] = random_weights(tree, seed)
        if id_map is not None:
            weights[name]["target_ids"] = jnp.arange(SMALL_V, dtype=jnp.int32) + 3
    # Norms of one and weights of 0.02 say nothing in particular; louder weights give drafts that differ.
    return jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else leaf * 20.0, weights)


def make_state(proposer):
    """Empty rows over pools of NaN."""
    pool = jnp.full(pool_shape(CONFIG, NUM_PAGES, PAGE_SIZE), jnp.nan)
    state = proposer.init(ROWS + 1)
    state = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan) if leaf.dtype == jnp.float32 else leaf, state)
    return initial_state(max_rows=ROWS, max_model_len=MAX_LEN, vocab_size=V, pool=pool, proposer_state=state)


def pages_of(row: int) -> list[int]:
    """Pages of a row: never those of another, and in no order."""
    return [(7 * (row + ROWS * index)) % NUM_PAGES for index in range(MAX_LEN // PAGE_SIZE)]


def shapes_of(tree):
    """Structure, shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves]


def check_step(function, donated: int, *args):
    """Calls a step function twice, its state threaded and donated; returns the second call's result.

    The state must come back as it went in, the first must be gone, and the second call must not compile.
    """
    step = jax.jit(function, donate_argnums=donated)
    args = list(args)
    before = args[donated] = jax.tree.map(jnp.array, args[donated])  # copies: donation eats what it is given
    wanted = shapes_of(before)
    result = step(*args)
    for _ in range(2):
        state = result[0] if isinstance(result, tuple) else result
        assert shapes_of(state) == wanted
        args[donated] = state
        count = compile_count()
        result = jax.block_until_ready(step(*args))
        assert compile_count() == count
    # What XLA could not reuse would live on beside its successor.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    return result
