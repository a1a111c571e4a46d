"""Host. The usual suspects: what published drafters are most often loaded wrongly by, each as a drafter to try.

All of them are the same files, read in another way: another config, or weights in another order.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.heads import DflashConfig, EagleConfig, HeadConfig, MedusaConfig, MlpSpeculatorConfig, MtpConfig
from jaxspec.config.model import ModelConfig, RopeConfig
from jaxspec.models.names import halves_of_pairs

Drafter = HeadConfig | ModelConfig
DEFAULT_THETA = 10000.0


class Suspect(NamedTuple):
    """A drafter that may be the right reading of the files. setting: what the user would change to have it."""

    name: str
    setting: str
    config: Drafter
    weights: Any


def usual_suspects(config: Drafter, weights: Any, target: ModelConfig, target_weights: Any) -> Iterator[Suspect]:
    """Those that make sense for this drafter and differ from how it was loaded.

    Args:
        config, weights: the drafter's, as loaded.
        target, target_weights: the model's it drafts for.
    """
    if "modules" in weights:  # several modules of one kind are all read in the same way
        every = [list(_of_one(config, module, target, target_weights)) for module in weights["modules"]]
        for group in zip(*every, strict=False):
            yield group[0]._replace(weights=weights | {"modules": [suspect.weights for suspect in group]})
    else:
        yield from _of_one(config, weights, target, target_weights)


def _of_one(config: Drafter, weights: Any, target: ModelConfig, target_weights: Any) -> Iterator[Suspect]:
    yield from _streams(config, weights, target)
    yield from _flags(config, weights)
    yield from _orders(config, weights)
    yield from _ropes(config, weights, target)
    yield from _interleaved(config, weights)
    yield from _vocabulary(config, weights, target, target_weights)


def _streams(config: Drafter, weights: Any, target: ModelConfig) -> Iterator[Suspect]:
    """Lists of layers count from before or from behind a layer, and some are written from the top."""
    n = target.num_layers
    if isinstance(config, MtpConfig) and not config.aux_streams:
        # Before the final norm: the stream behind the last layer.
        name = "states before the target's final norm"
        yield Suspect(
            name, f"have the module read stream {n}", config.model_copy(update={"aux_streams": (n,)}), weights
        )
    if not isinstance(config, EagleConfig | DflashConfig) or not config.aux_streams:
        return
    ids = config.aux_streams
    for name, other in (
        ("target layers one later", tuple(i + 1 for i in ids)),
        ("target layers one earlier", tuple(i - 1 for i in ids)),
        ("target layers in reverse", ids[::-1]),
    ):
        if all(0 <= i <= n for i in other) and other != ids:
            setting = f'"eagle_aux_hidden_state_layer_ids": {list(other)} in speculative_config'
            yield Suspect(name, setting, config.model_copy(update={"aux_streams": other}), weights)


def _flags(config: Drafter, weights: Any) -> Iterator[Suspect]:
    """Options that exporters leave out or mean differently, the other way round."""
    flags: tuple[str, ...] = ()
    if isinstance(config, EagleConfig) and config.kind == "eagle3":
        flags = ("norm_before_residual", "norm_output")
    elif isinstance(config, MlpSpeculatorConfig):
        flags = ("scale_input",)
    elif isinstance(config, DflashConfig):
        flags = ("sample_from_anchor",)
        other = tuple(not flag for flag in config.is_causal)
        setting = f'"is_causal": {str(other[0]).lower()} in the head\'s config.json'
        yield Suspect("causality in the block", setting, config.model_copy(update={"is_causal": other}), weights)
    for flag in flags:
        other = not getattr(config, flag)
        setting = f'"{flag}": {str(other).lower()} in the head\'s config.json'
        yield Suspect(flag, setting, config.model_copy(update={flag: other}), weights)


def _orders(config: Drafter, weights: Any) -> Iterator[Suspect]:
    """Embedding first or hidden state first: the paper and the code differ. Heads counted from the next token on."""
    if isinstance(config, MtpConfig) or (isinstance(config, EagleConfig) and config.kind == "eagle"):
        first, second = jnp.split(weights["fc"], 2, axis=1)
        swapped = weights | {"fc": jnp.concatenate([second, first], axis=1)}
        yield Suspect("order of embedding and state", "exchange the two halves of its projection", config, swapped)
    if isinstance(config, MedusaConfig) and config.num_heads > 1:
        lists = {path: weights[path] for path in ("blocks", "heads") if path in weights}
        turned = weights | {path: [*heads[1:], heads[0]] for path, heads in lists.items()}
        yield Suspect("heads one earlier", "drop the file's first head: it guesses the next token", config, turned)


def _layers_of(config: Drafter) -> ModelConfig | None:
    if isinstance(config, ModelConfig):
        return config
    return None if isinstance(config, MedusaConfig | MlpSpeculatorConfig) else config.model


def _with_layers(config: Drafter, model: ModelConfig) -> Drafter:
    return model if isinstance(config, ModelConfig) else config.model_copy(update={"model": model})


def _ropes(config: Drafter, weights: Any, target: ModelConfig) -> Iterator[Suspect]:
    """The target's rotation, or the default's base, where the drafter has another: configs copy one or the other."""
    model = _layers_of(config)
    if model is None or model.rope is None:
        return
    own = model.rope
    bare = RopeConfig(theta=DEFAULT_THETA, partial_factor=own.partial_factor, is_interleaved=own.is_interleaved)
    others = {"rope theta": bare}
    if target.rope is not None:
        kept = {"is_interleaved": own.is_interleaved, "partial_factor": own.partial_factor}
        others["rope of the target"] = target.rope.model_copy(update=kept)
    for name, rope in others.items():
        if rope != own and (name == "rope of the target" or rope != target.rope):
            scaling = "no rope_scaling" if rope.kind == "default" else f"the target's rope_scaling ({rope.kind})"
            setting = f'"rope_theta": {rope.theta} and {scaling} in the draft\'s config.json'
            changed = _with_layers(config, model.model_copy(update={"rope": rope}))
            yield Suspect(name, setting, changed, weights)


def _interleaved(config: Drafter, weights: Any) -> Iterator[Suspect]:
    """Query and key rows that the file keeps in pairs (2j, 2j + 1)."""
    model = _layers_of(config)
    if model is None or model.rope is None or model.rope.is_interleaved or model.rope.partial_factor != 1.0:
        return
    if model.mla is not None:
        return
    Q, G, H = model.num_heads, model.num_kv_heads, model.head_dim
    once = {"q_norm": halves_of_pairs(1), "k_norm": halves_of_pairs(1)}

    def turned(layer: dict[str, Any]) -> dict[str, Any]:
        changed = dict(layer)
        for path in ("qkv", "qkv_bias"):
            if path in layer:
                rows = np.asarray(layer[path])
                q, k, v = np.split(rows, [Q * H, (Q + G) * H])
                parts = [halves_of_pairs(Q)(q), halves_of_pairs(G)(k), v]
                changed[path] = jnp.asarray(np.concatenate(parts))
        for path in once.keys() & layer.keys():
            changed[path] = jnp.asarray(once[path](np.asarray(layer[path])))
        return changed

    if isinstance(config, MtpConfig):
        changed = weights | {"layer": turned(weights["layer"])}
    elif isinstance(weights.get("layers"), list):
        changed = weights | {"layers": [turned(layer) for layer in weights["layers"]]}
    else:
        return
    yield Suspect("interleaved rotation", "reorder q and k rows: the file keeps them in pairs", config, changed)


def _vocabulary(config: Drafter, weights: Any, target: ModelConfig, target_weights: Any) -> Iterator[Suspect]:
    """What of embedding, head and id map may be the target's, or read in the other form."""
    if isinstance(config, ModelConfig):
        return
    for path, words, file_name in (("embed", "embedding", "embed_tokens"), ("head", "vocabulary head", "lm_head")):
        own, other = weights.get(path), target_weights.get(path, target_weights["embed"])
        is_pair = isinstance(own, jax.Array) and isinstance(other, jax.Array)
        if is_pair and own is not other and own.shape == other.shape:
            name, setting = f"{words} of the target", f"leave the draft's own {file_name}.weight out of its files"
            yield Suspect(name, setting, config, weights | {path: other})
    if "target_ids" in weights:
        ids = np.asarray(weights["target_ids"])
        place = np.arange(len(ids), dtype=ids.dtype)
        for form, other in (("the target's ids themselves", ids - place), ("offsets", ids + place)):
            is_map = len(np.unique(other)) == len(other) and other.min() >= 0 and other.max() < target.vocab_size
            if is_map and not np.array_equal(other, ids):
                yield Suspect(
                    f"id map read as {form}", f"write the draft's id map as {form}", config,
                    weights | {"target_ids": jnp.asarray(other)},
                )  # fmt: skip
