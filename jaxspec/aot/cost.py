"""Host. Bytes and operations of a decode round and of a plain step, counted from the shapes of parameters and pages.

Per device, where a model is split over several. A pass reads every weight that it multiplies once, and of the cache
what each row holds; a mixture of experts reads those experts that some token of the pass is sent to, on average if
routing were even. The time of a pass is at least the longer of reading and computing, plus what devices send to each
other: its roofline. What a kernel reads twice, launches, and work on the host come on top.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.heads import DflashConfig, EagleConfig, HeadConfig, MedusaConfig, MlpSpeculatorConfig, MtpConfig
from jaxspec.config.methods import drafter_of
from jaxspec.config.model import ModelConfig
from jaxspec.config.resolve import ITEM_BYTES, ResolvedConfig
from jaxspec.distributed import Split
from jaxspec.models.heads.load import specs_of
from jaxspec.models.registry import family_of
from jaxspec.types import ArraySpec

# Of the arrays of float32 logits: the head writes them, the verdict reads them.
LOGITS_PASSES = 2
ACTIVATION_BYTES = 4


@dataclass(frozen=True)
class ModelShape:
    """One model, or one head, on one device: bytes and numbers of weights, by when a pass reads them.

    parameters is of the whole model, everything else is a device's part. num_weights: those that each token is
    multiplied with, embedding, experts and head left out. windows: one entry a layer that has a cache.
    """

    parameters: int
    bytes: int
    dense_bytes: int
    num_weights: int
    embed_row_bytes: int
    head_bytes: int
    num_head_weights: int
    expert_bytes: int
    num_expert_weights: int
    expert_share: float  # of the experts, those that one token is sent to; 0: no experts
    features_bytes: int  # of the dense ones, what a recurrent head reads in its first pass alone
    hidden_size: int
    num_exchanges: int  # sums over the devices that a pass takes
    windows: tuple[int | None, ...]
    entry_bytes: int  # of one token in one layer's cache
    key_flops: int  # of one query token on one key of one layer


def _leaves(specs: Any) -> Iterator[tuple[tuple[str, ...], ArraySpec]]:
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, ArraySpec)):
        yield tuple(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path), spec


def _kind(path: tuple[str, ...]) -> str:
    if path[-1].startswith("experts_"):
        return "experts"
    if path[-1] in ("embed", "head", "head_bias"):
        return path[-1].removesuffix("_bias")
    return "features" if path[-1] == "fc" else "dense"


def shape_of(
    specs: Any,
    config: ModelConfig | None,
    *,
    split: Split | None = None,
    kv_dtype: str = "bfloat16",
    int8_names: Sequence[str] = (),
    fc_in_each_pass: bool = True,
) -> ModelShape:
    """Count a tree of ArraySpecs.

    Args:
        specs: with dtypes as they are to lie in memory.
        config: of the layers, if they have a cache.
        split: over devices; None: on one.
        kv_dtype: of the pages.
        int8_names: parameters kept as integers, as `Family.int8_names`.
        fc_in_each_pass: whether the projection "fc" is part of each pass, or of the first alone.
    """
    sizes: dict[str, int] = dict.fromkeys(("dense", "features", "embed", "head", "experts"), 0)
    weights = dict(sizes)
    parameters, embed_row_bytes = 0, 0
    for path, spec in _leaves(specs):
        parameters += math.prod(spec.shape)
        number = _part(spec, split)
        size = number * np.dtype(spec.dtype).itemsize
        if path[-1] in int8_names:
            scales = dataclasses.replace(spec, shape=spec.shape[:1], axes=spec.axes[:1])
            size = number + _part(scales, split) * ITEM_BYTES["float32"]
        sizes[_kind(path)] += size
        if spec.shape[1:]:
            weights[_kind(path)] += number
        if path[-1] == "embed":
            embed_row_bytes = math.prod(spec.shape[1:]) * np.dtype(spec.dtype).itemsize
    is_tied = config is not None and config.tie_word_embeddings and sizes["head"] == 0
    stored = sum(sizes.values())
    if is_tied:
        sizes["head"], weights["head"] = sizes["embed"], weights["embed"]
    features = 0 if fc_in_each_pass else sizes["features"]
    moe = config.moe if config is not None else None
    windows: tuple[int | None, ...] = () if config is None else config.sliding_window_layers[: config.num_layers]
    entry_bytes, key_flops = (0, 0) if config is None else _cache(config, split, kv_dtype)
    return ModelShape(
        parameters=parameters,
        bytes=stored,
        dense_bytes=sizes["dense"] + sizes["features"],
        num_weights=weights["dense"] + weights["features"],
        embed_row_bytes=embed_row_bytes,
        head_bytes=sizes["head"],
        num_head_weights=weights["head"],
        expert_bytes=sizes["experts"],
        num_expert_weights=weights["experts"],
        expert_share=0.0 if moe is None else moe.num_experts_per_token / moe.num_experts,
        features_bytes=features,
        hidden_size=0 if config is None else config.hidden_size,
        num_exchanges=0 if split is None or not split.is_split or config is None else 2 * config.num_layers + 1,
        windows=windows,
        entry_bytes=entry_bytes,
        key_flops=key_flops,
    )


def _part(spec: ArraySpec, split: Split | None) -> int:
    """Numbers of an array that a device holds, those that it is filled up with included."""
    if split is None:
        return math.prod(spec.shape)
    layout = split.layout(spec)
    return math.prod(layout.shape) // (1 if layout.axis is None else split.num_devices)


def _cache(config: ModelConfig, split: Split | None, kv_dtype: str) -> tuple[int, int]:
    """(bytes of a token's entry in a layer, operations of a query token on a key) on a device.

    Latents lie whole on every device; key heads that are fewer than the devices are repeated.
    """
    heads, size = config.cache_heads
    num_devices = 1 if split is None else split.num_devices
    queries = -(-config.num_heads // num_devices)
    if config.mla is None:
        heads = heads if split is None else split.cache_heads // num_devices
        flops = 4 * queries * size
    else:
        flops = 2 * queries * (size + config.mla.kv_lora_rank)
    item = ITEM_BYTES["float32"] + size if kv_dtype == "int8" else size * ITEM_BYTES[kv_dtype]
    return heads * item, flops


def target_shape(config: ModelConfig, resolved: ResolvedConfig) -> ModelShape:
    """The target, as the config keeps it.

    Raises:
        ConfigError: it cannot be split over so many devices.
    """
    family = family_of(config.family)
    names = family.int8_names if resolved.quantization == "int8" else ()
    specs = family.specs(config, _dtype(resolved))
    split = Split(config, resolved.tensor_parallel_size, resolved.enable_expert_parallel)
    split.check()
    return shape_of(specs, config, split=split, kv_dtype=resolved.kv_cache_dtype, int8_names=names)


def drafter_shape(drafter: ModelConfig | HeadConfig, resolved: ResolvedConfig) -> ModelShape:
    """A draft model or a head; what it shares with the target is the target's.

    Raises:
        ConfigError: it cannot be split over so many devices.
    """
    dtype, kv_dtype, drafting = _dtype(resolved), resolved.kv_cache_dtype, resolved.speculative_config
    assert drafting is not None

    def split(layers: ModelConfig) -> Split:
        split = Split(layers, drafting.draft_tensor_parallel_size, resolved.enable_expert_parallel)
        split.check()
        return split

    if isinstance(drafter, ModelConfig):
        specs = family_of(drafter.family).specs(drafter, dtype)
        return shape_of(specs, drafter, split=split(drafter), kv_dtype=kv_dtype)
    layers = None if isinstance(drafter, MedusaConfig | MlpSpeculatorConfig) else drafter.model
    return shape_of(
        specs_of(drafter, dtype),
        None if layers is None else layers.model_copy(update={"tie_word_embeddings": False}),
        split=None if layers is None else split(layers),
        kv_dtype=kv_dtype,
        fc_in_each_pass=not (isinstance(drafter, EagleConfig) and drafter.kind == "eagle3"),
    )


def _dtype(resolved: ResolvedConfig) -> Any:
    return jnp.dtype(resolved.dtype)


def first_layers(config: ModelConfig, number: int) -> ModelConfig:
    """The model with its first layers alone."""
    moe = None if config.moe is None else config.moe.model_copy(update={"layers": config.moe.layers[:number]})
    windows = config.sliding_window_layers[:number]
    return config.model_copy(update={"num_layers": number, "sliding_window_layers": windows, "moe": moe})


@dataclass(frozen=True)
class Pass:
    """One forward pass of a round: whose, over how many tokens a row, and of how many of them it takes logits.

    head: whose vocabulary head it is; times: how often a round makes such a pass; is_first: of a head, the pass that
    projects the target's states.
    """

    name: str
    model: ModelShape
    tokens: int
    logits: int
    head: ModelShape
    times: int = 1
    is_first: bool = True


@dataclass(frozen=True)
class Cost:
    """Of one device: bytes that it reads and writes, operations, bytes that it sends."""

    bytes: float = 0.0
    flops: float = 0.0
    sent_bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops, self.sent_bytes + other.sent_bytes)

    def times(self, number: int) -> "Cost":
        return Cost(self.bytes * number, self.flops * number, self.sent_bytes * number)

    def seconds(self, bandwidth: float, flops: float, link: float) -> float:
        """The roofline: figures of the device, each a second."""
        return max(self.bytes / bandwidth, self.flops / flops) + self.sent_bytes / link


def experts_touched(share: float, tokens: int) -> float:
    """Share of the experts that some of the tokens is sent to, each to `share` of them at random."""
    return 1.0 - (1.0 - share) ** tokens


def cost_of(one: Pass, rows: int, context: int, vocab_size: int, num_devices: int = 1) -> Cost:
    """One of the passes, `times` not counted.

    Args:
        rows: B.
        context: tokens that each row holds.
        vocab_size: of the logits that the head makes.
    """
    model, head, tokens = one.model, one.head, rows * one.tokens
    size = model.dense_bytes - (0 if one.is_first else model.features_bytes)
    size += model.expert_bytes * experts_touched(model.expert_share, tokens)
    size += tokens * model.embed_row_bytes
    keys = [context if window is None else min(context, window) for window in model.windows]
    size += model.entry_bytes * (rows * sum(keys) + tokens * len(keys))
    flops = 2.0 * tokens * (model.num_weights + model.num_expert_weights * model.expert_share)
    flops += model.key_flops * tokens * sum(keys)
    logits = rows * one.logits
    if logits:
        size += head.head_bytes + LOGITS_PASSES * logits * -(-vocab_size // num_devices) * ITEM_BYTES["float32"]
        flops += 2.0 * logits * head.num_head_weights
    # A sum over n devices in a ring: each sends 2 (n - 1) / n of the array.
    ring = 2 * (num_devices - 1) / num_devices
    sent = ring * model.num_exchanges * tokens * model.hidden_size * ACTIVATION_BYTES
    return Cost(size, flops, sent)


def round_passes(
    target: ModelShape, drafter: ModelConfig | HeadConfig | None, draft: ModelShape | None, resolved: ResolvedConfig,
    model: ModelConfig,
) -> list[tuple[Pass, int]]:  # fmt: skip
    """The passes of a round in which every row has all its drafts, each with the size of the vocabulary of its logits.

    Args:
        target, draft: counted.
        drafter, model: what they were counted from.

    Raises: nothing: a proposer of the user's own counts as free, as lookups do.
    """
    V, K = model.vocab_size, resolved.num_speculative_tokens
    verify = [(Pass("verify", target, K + 1, K + 1, target), V)]
    speculative = resolved.speculative_config
    if speculative is None:
        return plain_passes(target, V)
    if speculative.exit_layer is not None:
        first = first_layers(model, speculative.exit_layer)
        own = target_shape(first, resolved)
        return [(Pass("draft step", own, 1, 1, target, times=K), V), *verify]
    if draft is None:
        return verify
    J, head = K + 1, draft if draft.head_bytes else target
    own_vocabulary = V if isinstance(drafter, ModelConfig) else getattr(drafter, "draft_vocab_size", V)
    if head is target:
        own_vocabulary = V
    method = drafter_of(speculative.method)
    if isinstance(drafter, MedusaConfig | MlpSpeculatorConfig):
        return [(Pass("draft", draft, 1, K, head), own_vocabulary), *verify]
    if isinstance(drafter, DflashConfig) or method in ("pard", "p_eagle"):
        return [(Pass("draft in one pass", draft, J + K - 1, K, head), own_vocabulary), *verify]
    if isinstance(drafter, MtpConfig) and drafter.num_modules > 1:
        # Each module is one pass over what is new and its own window; the last one goes on alone.
        n = min(K, drafter.num_modules)
        passes = [Pass("draft, all modules", _modules(draft, n, drafter.num_modules), J + n - 1, n, head)]
        if n < K:
            passes.append(Pass("draft step", _modules(draft, 1, n), 1, 1, head, times=K - n, is_first=False))
        return [*((one, own_vocabulary) for one in passes), *verify]
    passes = [(Pass("first draft", draft, J, 1, head), own_vocabulary)]
    if K > 1:
        passes.append((Pass("draft step", draft, 1, 1, head, times=K - 1, is_first=False), own_vocabulary))
    return [*passes, *verify]


def _modules(shape: ModelShape, number: int, of: int) -> ModelShape:
    """Of so many modules, which are all alike, those that a pass runs."""
    read = ("dense_bytes", "num_weights", "expert_bytes", "num_expert_weights", "num_exchanges")
    return dataclasses.replace(
        shape, **{name: getattr(shape, name) * number // of for name in read}, windows=shape.windows[:number]
    )


def plain_passes(target: ModelShape, vocab_size: int) -> list[tuple[Pass, int]]:
    """One token a row, without a drafter."""
    return [(Pass("plain", target, 1, 1, target), vocab_size)]
