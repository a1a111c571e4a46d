"""Host. Writes a family's name table from one line a parameter, for the parameters its specs have."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxspec.config.model import ModelConfig
from jaxspec.types import ArraySpec
from jaxspec.weights.names import TensorSource
from jaxspec.weights.transforms import Axes, RowOrder

Names = Mapping[str, TensorSource]


# Experts [out, in], as files have them -> [in, out], as they are multiplied.
_in_out = Axes((0, 2, 1))
# One expert as a stack of one, so that experts join along the stack.
_alone = Axes((0, 2, 1), is_lone=True)

# Where a parameter of a layer lies in most Hugging Face checkpoints, after "model.layers.N.".
HF_ATTENTION: Names = {
    "attention_norm": TensorSource(("input_layernorm.weight",)),
    "qkv": TensorSource(tuple(f"self_attn.{n}_proj.weight" for n in "qkv")),
    "qkv_bias": TensorSource(tuple(f"self_attn.{n}_proj.bias" for n in "qkv")),
    "q_norm": TensorSource(("self_attn.q_norm.weight",)),
    "k_norm": TensorSource(("self_attn.k_norm.weight",)),
    "o": TensorSource(("self_attn.o_proj.weight",)),
    "o_bias": TensorSource(("self_attn.o_proj.bias",)),
    "mlp_norm": TensorSource(("post_attention_layernorm.weight",)),
}
HF_MLP: Names = {
    "gate_up": TensorSource(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "gate_up_bias": TensorSource(("mlp.gate_proj.bias", "mlp.up_proj.bias")),
    "down": TensorSource(("mlp.down_proj.weight",)),
    "down_bias": TensorSource(("mlp.down_proj.bias",)),
}
# The same in GGUF files, after "blk.N.".
GGUF_ATTENTION: Names = {
    "attention_norm": TensorSource(("attn_norm.weight",)),
    "qkv": TensorSource(tuple(f"attn_{n}.weight" for n in "qkv")),
    "qkv_bias": TensorSource(tuple(f"attn_{n}.bias" for n in "qkv")),
    "q_norm": TensorSource(("attn_q_norm.weight",)),
    "k_norm": TensorSource(("attn_k_norm.weight",)),
    "o": TensorSource(("attn_output.weight",)),
    "o_bias": TensorSource(("attn_output.bias",)),
    "mlp_norm": TensorSource(("ffn_norm.weight",)),
}
GGUF_MLP: Names = {
    "gate_up": TensorSource(("ffn_gate.weight", "ffn_up.weight")),
    "gate_up_bias": TensorSource(("ffn_gate.bias", "ffn_up.bias")),
    "down": TensorSource(("ffn_down.weight",)),
    "down_bias": TensorSource(("ffn_down.bias",)),
}
GGUF_EXPERTS: Names = {
    "router": TensorSource(("ffn_gate_inp.weight",)),
    "router_bias": TensorSource(("exp_probs_b.bias",)),
    "experts_gate": TensorSource(("ffn_gate_exps.weight",), (_in_out,)),
    "experts_up": TensorSource(("ffn_up_exps.weight",), (_in_out,)),
    "experts_down": TensorSource(("ffn_down_exps.weight",), (_in_out,)),
    "shared.gate_up": TensorSource(("ffn_gate_shexp.weight", "ffn_up_shexp.weight")),
    "shared.gate_up_bias": TensorSource(("ffn_gate_shexp.bias", "ffn_up_shexp.bias")),
    "shared.down": TensorSource(("ffn_down_shexp.weight",)),
    "shared.down_bias": TensorSource(("ffn_down_shexp.bias",)),
}
# The outermost tensors; head names with a leading "/" do not stand under the model's prefix.
HF_ENDS: Names = {
    "embed": TensorSource(("embed_tokens.weight",)),
    "final_norm": TensorSource(("norm.weight",)),
}
GGUF_ENDS: Names = {
    "embed": TensorSource(("token_embd.weight",)),
    "final_norm": TensorSource(("output_norm.weight",)),
    "head": TensorSource(("output.weight",)),
    "head_bias": TensorSource(("output.bias",)),
}


def hf_experts(config: ModelConfig, router: str, expert: str, gate: str, up: str, down: str) -> Names:
    """Experts stored one by one: `expert` with {e} for its number, then the names of its three matrices."""
    assert config.moe is not None
    numbers = range(config.moe.num_experts)

    def stacked(part: str) -> TensorSource:
        return TensorSource(tuple(f"{expert.format(e=e)}{part}.weight" for e in numbers), (_alone,) * len(numbers))

    return {
        "router": TensorSource((f"{router}.weight",)),
        "router_bias": TensorSource((f"{router}.e_score_correction_bias",)),
        "experts_gate": stacked(gate),
        "experts_up": stacked(up),
        "experts_down": stacked(down),
        "shared.gate_up": TensorSource(("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")),
        "shared.gate_up_bias": TensorSource(("mlp.shared_experts.gate_proj.bias", "mlp.shared_experts.up_proj.bias")),
        "shared.down": TensorSource(("mlp.shared_experts.down_proj.weight",)),
        "shared.down_bias": TensorSource(("mlp.shared_experts.down_proj.bias",)),
    }


def hf_mlp_experts(config: ModelConfig, router: str) -> Names:
    """Experts under their most common names; none in a model without them."""
    if config.moe is None:
        return {}
    return hf_experts(config, router, "mlp.experts.{e}.", "gate_proj", "up_proj", "down_proj")


def later_layers(config: ModelConfig, before: str) -> tuple[str, ...]:
    """Patterns of the tensors in layers past the model's own, where its multi-token-prediction modules lie."""
    first = config.num_layers
    return tuple(rf"{before}{i}\..*" for i in range(first, first + config.num_mtp_layers))


def hf_sources(config: ModelConfig, specs: Any, layer: Names, ends: Names = HF_ENDS) -> dict[str, TensorSource]:
    """The sources of every parameter of `specs` in a Hugging Face checkpoint."""
    prefix = config.tensor_prefix
    table = fill(specs, ends, lambda name: prefix + name, lambda i, name: f"{prefix}layers.{i}.{name}", layer)
    if "head" in specs:
        table["head"] = TensorSource((hf_head(config),))
    if "head_bias" in specs:
        table["head_bias"] = TensorSource((hf_head(config).removesuffix("weight") + "bias",))
    return table


def hf_head(config: ModelConfig) -> str:
    """The head stands beside the model's own tensors, inside a wrapper that holds both."""
    wrapper = config.tensor_prefix.removesuffix("model.") if config.tensor_prefix.endswith(".model.") else ""
    return f"{wrapper}lm_head.weight"


def hf_unread(config: ModelConfig) -> tuple[str, ...]:
    """Old files keep rotary buffers; some fine-tunes of tied models keep a head, which the tie overrules."""
    head = hf_head(config).replace(".", r"\.")
    return (r".*\.rotary_emb\.inv_freq", *((head,) if config.tie_word_embeddings else ()))


def gguf_sources(specs: Any, layer: Names, ends: Names = GGUF_ENDS) -> dict[str, TensorSource]:
    """The sources of every parameter of `specs` in a GGUF file."""
    return fill(specs, ends, lambda name: name, lambda i, name: f"blk.{i}.{name}", layer)


def fill(
    specs: Any,
    ends: Names,
    outer_name: Callable[[str], str],
    layer_name: Callable[[int, str], str],
    layer: Names,
) -> dict[str, TensorSource]:
    """A source for each parameter of `specs` that `ends` and `layer` name."""
    table = {}
    for path in (path for path in specs if path != "layers" and path in ends):
        table[path] = _renamed(ends[path], outer_name)
    for i, tree in enumerate(specs["layers"]):
        for path in leaf_paths(tree):
            table[f"layers.{i}.{path}"] = _renamed(layer[path], lambda name, i=i: layer_name(i, name))
    return table


def leaf_paths(tree: Any, prefix: str = "") -> list[str]:
    """Paths of a tree of dicts, their keys joined by dots."""
    if isinstance(tree, ArraySpec):
        return [prefix.removesuffix(".")]
    return [path for key, child in tree.items() for path in leaf_paths(child, f"{prefix}{key}.")]


def _renamed(source: TensorSource, rename: Callable[[str], str]) -> TensorSource:
    return TensorSource(tuple(rename(name) for name in source.names), source.transforms)


def halves_of_pairs(num_heads: int, rows: slice = slice(None)) -> RowOrder:
    """Reorders each head's rows (or those in `rows`) from pairs (2j, 2j + 1) to (j, j + half), q's and k's alike.

    Scores stay what they were, and every model runs the half-split rotation.
    """

    def reorder(weight: np.ndarray) -> np.ndarray:
        heads = weight.reshape(num_heads, -1, *weight.shape[1:])
        turning = heads[:, rows]
        count = turning.shape[1]
        turning = turning.reshape(num_heads, count // 2, 2, *weight.shape[1:]).swapaxes(1, 2)
        turning = turning.reshape(num_heads, count, *weight.shape[1:])
        if count == heads.shape[1]:
            return turning.reshape(weight.shape)
        start = rows.indices(heads.shape[1])[0]
        return np.concatenate([heads[:, :start], turning], axis=1).reshape(weight.shape)

    return RowOrder(reorder)
