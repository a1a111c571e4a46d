"""Device. EAGLE-3 by training-time test: the head is unrolled over its own states, as it will be when it drafts.

Guess k of chain t reads the head's state of guess k - 1 (the target's streams for k = 0) and the token at t + 1 + k,
and is taught the target's distribution of the token at t + 2 + k. Source: Li et al. 2025 (EAGLE-3), section 3.2; the
targets over a reduced vocabulary are renormalised, and places whose likeliest token it lacks are not taught.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.heads import EagleConfig
from jaxspec.config.hf_heads import head_config
from jaxspec.config.model import ModelConfig
from jaxspec.errors import ConfigError
from jaxspec.models.chains import new_chains, next_pass
from jaxspec.models.heads import eagle
from jaxspec.models.heads.base import head_logits
from jaxspec.train.batches import Batch
from jaxspec.train.config import Eagle3Head
from jaxspec.train.export import pieces, write_drafter
from jaxspec.train.target import FrozenTarget, whole_rows
from jaxspec.train.trainers.base import (
    Guess,
    Trainer,
    as_specs_say,
    is_answer,
    random_params,
    shifted,
    soft_cross_entropy,
    total,
)
from jaxspec.train.trainers.layers import fused_rows, layer_values


def hf_config(head: Eagle3Head, target: ModelConfig) -> dict[str, Any]:
    """The config.json of the head's files.

    Raises: ConfigError for streams that the layout cannot say.
    """
    n = target.num_layers
    streams = head.aux_streams or (2, n // 2, n - 3)
    if head.layout == "eagle" and streams[0] == 1:
        raise ConfigError(
            f"aux_streams {list(streams)} begin with 1, which in layout 'eagle' means the outputs of layers; "
            "use layout 'speculators' or other streams"
        )
    layers = {"model_type": "llama"} | layer_values(
        target, num_layers=1, intermediate_size=head.intermediate_size, rope_theta=head.rope_theta
    )
    own = {
        "draft_vocab_size": min(head.draft_vocab_size or target.vocab_size, target.vocab_size),
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(streams),
        "norm_before_residual": False,
    }
    if head.layout == "speculators":
        return own | {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layers,
        }
    return layers | own | {"architectures": ["LlamaForCausalLMEagle3"]}


def read_back(head: Eagle3Head, target: ModelConfig) -> EagleConfig:
    """The head's config as its own files will be read."""
    values = hf_config(head, target)
    V, D = values["draft_vocab_size"], target.hidden_size
    shapes = {"fc.weight": (D, len(values["eagle_aux_hidden_state_layer_ids"]) * D), "lm_head.weight": (V, D)}
    if target.vocab_size > V:
        shapes["d2t"] = (V,)
    config = head_config("eagle3", values, shapes, target)
    assert isinstance(config, EagleConfig)
    return config


def eagle3(
    head: Eagle3Head, target: FrozenTarget, target_weights: Any, target_ids: np.ndarray | None, *, dtype: str, seed: int
) -> Trainer:
    """A trainer of an EAGLE-3 head.

    Args:
        target_ids: i32[draft vocabulary], ascending; None: the head knows the target's whole vocabulary.
        dtype: of products' operands.
        seed: of random weights.
    """
    config = read_back(head, target.config)
    specs = eagle.specs(config, jnp.dtype(dtype))
    specs.pop("id_map", None)
    ids_V = None if target_ids is None else jnp.asarray(target_ids)
    frozen = {"target": target_weights, "target_ids_V": ids_V}
    model = config.model

    def loss(params, frozen, batch: Batch):
        weights = as_specs_say(params, specs) | {"embed": frozen["target"]["embed"]}
        hidden_BTD, streams_BTX = target.see(frozen["target"], batch.token_ids_BT, config.aux_streams)
        teacher_BTV = target.logits(frozen["target"], hidden_BTD)
        best_BT = jnp.argmax(teacher_BTV, axis=-1)
        ids_V = frozen["target_ids_V"]
        if ids_V is not None:
            teacher_BTV = teacher_BTV[..., ids_V]
            in_draft = jnp.minimum(jnp.searchsorted(ids_V, best_BT), len(ids_V) - 1)
            is_known_BT = ids_V[in_draft] == best_BT
        else:
            is_known_BT = jnp.ones_like(best_BT, bool)

        B, T = batch.token_ids_BT.shape
        pool: Any = new_chains(model.num_layers, (B, T, *model.cache_heads))
        features_BTD = eagle.features(weights, config, streams_BTX)
        guesses = []
        for k in range(head.num_steps):
            tokens = whole_rows(shifted(batch.token_ids_BT, 1 + k), offset=k)
            hidden_BTD, features_BTD, pool = eagle.forward(weights, config, tokens, features_BTD, pool)
            pool = next_pass(pool)
            compare = jax.checkpoint(functools.partial(_compare, config.logit_scale))
            loss_BT, drafted_BT = compare(weights["head"], hidden_BTD, shifted(teacher_BTV, 1 + k))
            drafted_BT = drafted_BT if ids_V is None else ids_V[drafted_BT]
            asked_BT = is_answer(batch, 2 + k)
            taught_BT = asked_BT & shifted(is_known_BT, 1 + k)
            guesses.append(Guess(loss_BT, drafted_BT == shifted(best_BT, 1 + k), asked_BT, taught_BT))
        return total(guesses, head.step_decay)

    def export(params, folder: Path) -> None:
        table = eagle.name_table(config, ())
        tensors = pieces(params, specs, table, fused_rows(model))
        if head.layout == "eagle":  # the name of the first projects' only layer
            tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        if target_ids is not None:
            tensors["d2t"] = target_ids.astype(np.int64) - np.arange(len(target_ids))
            tensors["t2d"] = np.isin(np.arange(target.config.vocab_size), target_ids)
        write_drafter(folder, hf_config(head, target.config), tensors, dtype)

    def init():
        params = random_params(specs, seed)
        return params if head.start == "random" else _like_target(params, target, target_weights, target_ids, config)

    return Trainer(init, loss, export, frozen, head.num_steps, "eagle3", head.num_steps)


def _compare(scale: float, head_VD, hidden_BTD, teacher_BTV) -> tuple[jax.Array, jax.Array]:
    """(loss_BT, drafted_BT); its logits are made again for the gradient, not kept."""
    logits_BTV = head_logits(head_VD, hidden_BTD, scale)
    return soft_cross_entropy(logits_BTV, teacher_BTV), jnp.argmax(logits_BTV, axis=-1)


def _like_target(params, target: FrozenTarget, weights: Any, target_ids: np.ndarray | None, config: EagleConfig):
    """The target's vocabulary head, final norm and last layer where they fit; fc begins with its last stream."""
    D = target.config.hidden_size

    def f32(array) -> jax.Array:
        return jnp.array(array, jnp.float32)  # a copy: what is trained is donated

    full_VD = weights["embed"] if target.config.tie_word_embeddings else weights["head"]
    params = params | {
        "head": f32(full_VD if target_ids is None else full_VD[target_ids]),
        "final_norm": f32(weights["final_norm"]),
        "fc": params["fc"].at[:, -D:].add(jnp.eye(D)),
    }
    last, layer = weights["layers"][-1], dict(params["layers"][0])
    for name in ("o", "gate_up", "down", "mlp_norm"):
        if name in last and getattr(last[name], "shape", None) == layer[name].shape:
            layer[name] = f32(last[name])
    if "qkv" in last and last["qkv"].shape[0] == layer["qkv"].shape[0]:
        layer["qkv"] = layer["qkv"].at[:, D:].set(f32(last["qkv"]))
        layer["features_norm"] = f32(last["attention_norm"])
    return params | {"layers": [layer]}
