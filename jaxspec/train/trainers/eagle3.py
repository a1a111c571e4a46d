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
from jaxspec.models.heads.load import load_head, open_head
from jaxspec.train.batches import Batch
from jaxspec.train.config import Eagle3Head
from jaxspec.train.export import pieces, write_drafter
from jaxspec.train.fit import fitted
from jaxspec.train.target import FrozenTarget, whole_rows
from jaxspec.train.trainers.base import (
    Guess,
    Trainer,
    as_specs_say,
    is_among,
    is_answer,
    random_params,
    shifted,
    soft_cross_entropy,
    target_ids_of,
    total,
)
from jaxspec.train.trainers.layers import fused_rows, layer_values
from jaxspec.weights.checkpoint import open_checkpoint


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
        target,
        num_layers=1,
        intermediate_size=head.intermediate_size,
        rope_theta=head.rope_theta,
        num_kv_heads=head.num_kv_heads,
    )
    own = {
        "draft_vocab_size": min(head.draft_vocab_size or target.vocab_size, target.vocab_size),
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(streams),
        "norm_before_residual": False,
        "fc_norm": head.fc_norm,
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
    teacher = target.with_tokens(target_weights, target_ids)
    ids_V = None if target_ids is None else jnp.asarray(target_ids)
    frozen = {"target": target_weights, "teacher": teacher, "target_ids_V": ids_V}
    model = config.model

    def loss(params, frozen, batch: Batch):
        weights = as_specs_say(params, specs) | {"embed": frozen["target"]["embed"]}
        if not head.train_head:
            weights["head"] = jax.lax.stop_gradient(weights["head"])
        hidden_BTD, streams_BTX = (x.astype(jnp.float32) for x in (batch.hidden_BTD, batch.streams_BTX))
        teacher_BTV = jax.lax.stop_gradient(target.logits(frozen["teacher"], hidden_BTD))
        ids_V = frozen["target_ids_V"]
        B, T = batch.token_ids_BT.shape
        pool: Any = new_chains(model.num_layers, (B, T, *model.cache_heads))
        features_BTD = eagle.features(weights, config, streams_BTX)
        guesses = []
        for k in range(head.num_steps):
            tokens = whole_rows(shifted(batch.token_ids_BT, 1 + k), offset=k)
            hidden_BTD, features_BTD, pool = eagle.forward(weights, config, tokens, features_BTD, pool)
            pool = next_pass(pool)
            compare = functools.partial(_compare, config.logit_scale)
            if ids_V is None:  # too many logits to keep for the gradient: they are made again
                compare = jax.checkpoint(compare)
            loss_BT, drafted_BT = compare(weights["head"], ids_V, hidden_BTD, shifted(teacher_BTV, 1 + k))
            best_BT, asked_BT = shifted(batch.best_BT, 1 + k), is_answer(batch, 2 + k)
            guesses.append(Guess(loss_BT, drafted_BT == best_BT, asked_BT, asked_BT & is_among(ids_V, best_BT)))
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

    def init(sample: Batch):
        if head.start not in ("fit", "random"):
            return _read(Path(head.start), config, specs, target, target_weights)
        params = random_params(specs, seed)
        return params if head.start == "random" else fitted(params, config, target_weights, teacher, sample)

    return Trainer(init, loss, export, frozen, head.num_steps, "eagle3", head.num_steps, config.aux_streams)


def _compare(scale: float, head_VD, ids_V, hidden_BTD, teacher_BTV) -> tuple[jax.Array, jax.Array]:
    """(loss_BT, drafted_BT, the token)."""
    logits_BTV = head_logits(head_VD, hidden_BTD, scale)
    return soft_cross_entropy(logits_BTV, teacher_BTV), target_ids_of(ids_V, logits_BTV)


def _read(folder: Path, config: EagleConfig, specs: Any, target: FrozenTarget, target_weights: Any):
    """The parameters of another drafter's files.

    Raises: ConfigError where it is another kind of head, WeightsError where its files are unsound.
    """
    with open_checkpoint(target.path) as checkpoint, open_head("eagle3", folder, checkpoint) as opened:
        assert isinstance(opened.config, EagleConfig), "a head of this method"
        model = opened.config.model.model_copy(update={"dtype": config.model.dtype})  # weights are kept in float32 here
        kept = opened.config.model_copy(update={"model": model})
        if differing := [key for key, value in config if value != getattr(kept, key)]:
            raise ConfigError(f"{folder} differs from this head in {', '.join(differing)}; give it the same keys")
        found = load_head(opened, target.config, target_weights, jnp.float32)
    return jax.tree.map(jnp.array, {key: found[key] for key in specs})
