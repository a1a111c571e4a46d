"""Device. DFlash: blocks that begin at many places of a text are filled in one pass, as they will be when it drafts.

A block at t holds the token there and masks at t + 1, t + 2, ...; it sees keys made of the target's streams at 0..t-1,
and all of itself. Its place k is taught the target's distribution of the token at t + k.
Source: Chen et al. 2026 (DFlash); with soft targets in place of the text's own tokens.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.heads import DflashConfig
from jaxspec.config.hf_heads import head_config
from jaxspec.config.model import ModelConfig
from jaxspec.models.base import Tokens
from jaxspec.models.heads import dflash as head_of
from jaxspec.models.heads.base import head_logits
from jaxspec.train.batches import Batch
from jaxspec.train.config import DflashHead
from jaxspec.train.export import pieces, write_drafter
from jaxspec.train.target import FrozenTarget
from jaxspec.train.trainers.base import (
    Guess,
    Trainer,
    as_specs_say,
    is_among,
    random_params,
    soft_cross_entropy,
    target_ids_of,
    total,
)
from jaxspec.train.trainers.layers import fused_rows, layer_values
from jaxspec.types import BlockPool


def hf_config(head: DflashHead, target: ModelConfig) -> dict[str, Any]:
    """The config.json of the head's files."""
    n = target.num_layers
    layers = layer_values(
        target, num_layers=head.num_layers, intermediate_size=head.intermediate_size, rope_theta=head.rope_theta
    )
    values = layers | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": head.block_size,
        "mask_token_id": target.vocab_size - 1 if head.mask_token_id is None else head.mask_token_id,
        "target_layer_ids": [stream - 1 for stream in head.aux_streams or (2, n // 2, n - 3)],
    }
    size = min(head.draft_vocab_size or target.vocab_size, target.vocab_size)
    return values if size == target.vocab_size else values | {"draft_vocab_size": size}


def read_back(head: DflashHead, target: ModelConfig) -> DflashConfig:
    """The head's config as its own files will be read."""
    values, D = hf_config(head, target), target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"mask_embedding": (D,)}
    if "draft_vocab_size" in values:
        shapes |= {"lm_head.weight": (values["draft_vocab_size"], D), "d2t": (values["draft_vocab_size"],)}
    config = head_config("dflash", values, shapes, target)
    assert isinstance(config, DflashConfig)
    return config


def dflash(
    head: DflashHead, target: FrozenTarget, target_weights: Any, target_ids: np.ndarray | None, *, dtype: str, seed: int
) -> Trainer:
    """A trainer of a DFlash head; arguments as `eagle3` takes them."""
    config = read_back(head, target.config)
    model, K = config.model, head.block_size - 1
    specs = head_of.specs(config, jnp.dtype(dtype))
    specs.pop("id_map", None)
    ids_V = None if target_ids is None else jnp.asarray(target_ids)
    teacher = target.with_tokens(target_weights, target_ids)
    frozen = {"target": target_weights, "teacher": teacher, "target_ids_V": ids_V}

    def loss(params, frozen, batch: Batch):
        weights = as_specs_say(params, specs) | {"embed": frozen["target"]["embed"]}
        B, T = batch.token_ids_BT.shape
        hidden_BTD, streams_BTX = (x.astype(jnp.float32) for x in (batch.hidden_BTD, batch.streams_BTX))
        pool: Any = BlockPool(context_LBTGH=_context(weights, config, streams_BTX), num_layers=model.num_layers)

        A = -(-T // head.anchor_stride)
        start_B1 = (batch.draw_B % head.anchor_stride)[:, None]
        anchor_BA = start_B1 + head.anchor_stride * jnp.arange(A, dtype=jnp.int32)[None]
        place_BAK = anchor_BA[:, :, None] + jnp.arange(K + 1, dtype=jnp.int32)[None, None]
        known_BA = jnp.take_along_axis(batch.token_ids_BT, jnp.minimum(anchor_BA, T - 1), axis=1)
        masks_BAk = jnp.full((B, A, K), config.mask_token_id, jnp.int32)
        ids = jnp.concatenate([known_BA[..., None], masks_BAk], axis=-1).reshape(B * A, K + 1)
        nothing = jnp.full_like(ids, -1)
        tokens = Tokens(ids, place_BAK.reshape(B * A, K + 1), slots_BT=nothing, pages_BM=nothing[:, :1])
        hidden_RTD, _ = head_of.forward(weights, config, tokens, pool)

        guesses, ids_V = [], frozen["target_ids_V"]
        for k in range(1, K + 1):
            place_BA = place_BAK[:, :, k]
            before_BA = jnp.clip(place_BA - 1, 0, T - 1)
            said_BAD = jnp.take_along_axis(hidden_BTD, before_BA[..., None], axis=1)
            best_BA = jnp.take_along_axis(batch.best_BT, before_BA, axis=1)
            compare = jax.checkpoint(functools.partial(_compare, target, config.logit_scale))
            loss_BA, drafted_BA = compare(
                weights.get("head"), ids_V, frozen["teacher"], hidden_RTD[:, k].reshape(B, A, -1), said_BAD
            )
            asked_BA = (place_BA >= batch.num_prompt_B[:, None]) & (place_BA < batch.len_B[:, None])
            guesses.append(Guess(loss_BA, drafted_BA == best_BA, asked_BA, asked_BA & is_among(ids_V, best_BA)))
        return total(guesses, head.place_decay)

    def export(params, folder: Path) -> None:
        tensors = pieces(params, specs, head_of.name_table(config, ()), fused_rows(model))
        if target_ids is not None:
            tensors["d2t"] = target_ids.astype(np.int64) - np.arange(len(target_ids))
        write_drafter(folder, hf_config(head, target.config), tensors, dtype)

    def init(sample: Batch):
        del sample
        params = random_params(specs, seed)
        copied = {"final_norm": jnp.array(target_weights["final_norm"], jnp.float32)}
        if target_ids is not None:
            full_VD = target_weights["embed"] if target.config.tie_word_embeddings else target_weights["head"]
            copied["head"] = jnp.array(full_VD[target_ids], jnp.float32)
        return params | copied

    return Trainer(init, loss, export, frozen, K, "dflash", K, config.aux_streams)


def _context(weights, config: DflashConfig, streams_BTX: jax.Array) -> jax.Array:
    """f32[L, B, T, 2G, H]: the keys and values that `remember` writes, of a pool with a page a text."""
    B, T, _ = streams_BTX.shape
    model = config.model
    place_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    tokens = Tokens(jnp.zeros_like(place_BT), place_BT, slots_BT=row_B1 * T + place_BT, pages_BM=row_B1)
    entries, size = model.cache_heads
    pool = jnp.zeros((model.num_layers * B, entries, T, size), jnp.float32)
    filled = head_of.remember(weights, config, tokens, streams_BTX, pool)
    assert isinstance(filled, jax.Array)
    return filled.reshape(model.num_layers, B, entries, T, size).transpose(0, 1, 3, 2, 4)


def _compare(target: FrozenTarget, scale: float, head_VD, ids_V, frozen, own_BAD, said_BAD):
    """(loss_BA, drafted_BA, the token) over the draft's vocabulary; a head of None is the target's."""
    teacher_BAV = jax.lax.stop_gradient(target.logits(frozen, said_BAD))
    if head_VD is None:
        logits_BAV = target.logits(frozen, own_BAD) * scale
    else:
        logits_BAV = head_logits(head_VD, own_BAD, scale)
    return soft_cross_entropy(logits_BAV, teacher_BAV), target_ids_of(ids_V, logits_BAV)
