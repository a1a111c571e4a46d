"""Device. The decoder that families share: embedding, pre-norm layers over one page pool, final norm, head.

A family whose layers are built otherwise brings its own layer function and keeps the rest.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import shards
from jaxspec.config.model import ModelConfig
from jaxspec.models.attention import Place, attention_specs, self_attention
from jaxspec.models.base import Tokens, Weights
from jaxspec.models.layers import NORM_DTYPE, embed, gated_mlp, linear, mlp_specs, rms_norm
from jaxspec.models.moe import moe_mlp, moe_specs
from jaxspec.models.rope import Rotation, rope_tables
from jaxspec.types import ArraySpec, Pool

DENSE_NAMES = ("qkv", "o", "gate_up", "down")  # what `linear` alone reads in a layer of this kind

# (weights of the layer, normed x_ND, pool, place, config, window=...) -> (out_ND, pool)
Attention = Callable[..., tuple[jax.Array, Pool]]
# (weights of the layer, x_BTD, pool, place) -> (x_BTD, pool)
Layer = Callable[[Any, jax.Array, Pool, Place], tuple[jax.Array, Pool]]


def decoder_specs(config: ModelConfig, dtype: Any) -> Weights:
    """Every parameter of a pre-norm decoder with grouped-query attention. Weights are [out, in]."""
    return with_ends(
        config,
        dtype,
        [
            norm_specs(config, "attention_norm", "mlp_norm")
            | attention_specs(config, dtype)
            | feed_forward_specs(config, index, dtype)
            for index in range(config.num_layers)
        ],
    )


def with_ends(config: ModelConfig, dtype: Any, layers: list[Any]) -> Weights:
    """Layers between an embedding and a final norm, and a head unless it is tied."""
    V, D = config.vocab_size, config.hidden_size
    tree = {
        "embed": ArraySpec((V, D), dtype, ("vocab", "embed")),
        "layers": layers,
        "final_norm": ArraySpec((D,), NORM_DTYPE, ("embed",), 0.0),
    }
    if not config.tie_word_embeddings:
        tree["head"] = ArraySpec((V, D), dtype, ("vocab", "embed"))
    if config.head_bias:
        tree["head_bias"] = ArraySpec((V,), dtype, ("vocab",))
    return tree


def norm_specs(config: ModelConfig, *names: str) -> dict[str, ArraySpec]:
    """Norms over the hidden state."""
    return {name: ArraySpec((config.hidden_size,), NORM_DTYPE, ("embed",), 0.0) for name in names}


def feed_forward_specs(config: ModelConfig, index: int, dtype: Any) -> dict[str, Any]:
    """A layer's MLP: experts where the config says so, else dense."""
    if config.moe is not None and config.moe.layers[index]:
        return moe_specs(config.hidden_size, config.moe, dtype)
    return mlp_specs(config.hidden_size, config.intermediate_size, dtype, with_bias=config.mlp_bias)


def feed_forward(w: Mapping[str, Any], x_ND: jax.Array, config: ModelConfig) -> jax.Array:
    """The layer's MLP, told by its weights."""
    if "router" in w:
        assert config.moe is not None
        return moe_mlp(w, x_ND, config.moe)
    return gated_mlp(w, x_ND)


def decoder_forward(
    weights: Weights,
    config: ModelConfig,
    tokens: Tokens,
    pool: Pool,
    aux_streams: tuple[int, ...] = (),
    *,
    attention: Attention = self_attention,
) -> tuple[jax.Array, Pool]:
    """Run every layer over the tokens; keys and values enter the pool before they are attended to.

    Args:
        weights: as `decoder_specs` describes.
        tokens: B rows of T tokens.
        pool: [L*P, 2G, S, H], or of latents [L*P, 1, S, C]; layer l owns pages [l*P, (l+1)*P).
        attention: of every layer.

    Returns:
        hidden_BTD f32, after the final norm, and the pool.
    """
    assert config.rope is not None
    x_BTD = embed(weights["embed"], tokens.token_ids_BT)
    rotation = rope_tables(tokens.positions_BT, config.rope, config.turning_size)
    x_BTD, pool, streams = run_layers(
        lambda window: pre_norm_layer(config, window, attention),
        config.sliding_window_layers,
        weights["layers"],
        x_BTD,
        pool,
        tokens,
        [rotation] * config.num_layers,
        aux_streams,
    )
    return with_streams(rms_norm(x_BTD, weights["final_norm"], config.norm_eps), streams), pool


def pre_norm_layer(config: ModelConfig, window: int | None, attention: Attention = self_attention) -> Layer:
    """Attention, then the MLP, each on a normed state and added to it."""
    eps = config.norm_eps

    def layer(w, x_BTD, pool, place: Place):
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        attended, pool = attention(w, rms_norm(x_ND, w["attention_norm"], eps), pool, place, config, window=window)
        x_ND = x_ND + attended
        x_ND = x_ND + feed_forward(w, rms_norm(x_ND, w["mlp_norm"], eps), config)
        return x_ND.reshape(x_BTD.shape), pool

    return layer


def run_layers(
    make_layer: Callable[[Any], Layer],
    kinds: Sequence[Hashable],
    weights: Sequence[Any],
    x_BTD: jax.Array,
    pool: Pool,
    tokens: Tokens,
    rotations: Sequence[Rotation | None],
    aux_streams: tuple[int, ...] = (),
) -> tuple[jax.Array, Pool, list[jax.Array]]:
    """The layers in order, each over its own pages of the pool: what leaves the last, the pool, and the streams asked
    for.

    make_layer builds the function of a kind; kinds and rotations have one entry a layer. Weights may have fewer: then
    the first so many layers run, over their pages of the whole model's pool. Each kind is jitted and traced once (a
    second time for other weights) however often it occurs: tracing 30 unrolled layers would dominate start-up.
    """
    pages_a_layer = pool.shape[0] // len(kinds)
    layers = {kind: jax.jit(make_layer(kind)) for kind in dict.fromkeys(kinds)}
    streams = [x_BTD]
    for index, kind in enumerate(kinds[: len(weights)]):
        place = Place(tokens=tokens, page_offset=jnp.int32(index * pages_a_layer), rotation=rotations[index])
        x_BTD, pool = layers[kind](weights[index], x_BTD, pool, place)
        streams.append(x_BTD)
    return x_BTD, pool, [streams[index] for index in aux_streams]


def with_streams(hidden_BTD: jax.Array, streams: list[jax.Array]) -> jax.Array:
    """The hidden state, and behind it the streams, as `Family.forward` returns them."""
    return jnp.concatenate([hidden_BTD, *streams], axis=-1) if streams else hidden_BTD


def head_logits(weights: Weights, config: ModelConfig, hidden_BTD: jax.Array) -> jax.Array:
    """The head, or the embedding it is tied to: logits_BTV f32, of a device's own ids where the vocabulary is split."""
    B, T, D = hidden_BTD.shape
    head = weights["embed"] if config.tie_word_embeddings else weights["head"]
    logits = linear(hidden_BTD.reshape(B * T, D), head, weights.get("head_bias")).reshape(B, T, -1)
    if config.logit_softcap is not None:
        logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
    if shards.whole_size(logits) > config.vocab_size:  # rows that fill the last device's part up
        logits = jnp.where(shards.ids_of(logits)[None, None] < config.vocab_size, logits, -jnp.inf)
    return logits
