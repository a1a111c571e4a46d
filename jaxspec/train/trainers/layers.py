"""Host. Layers of a head that are like its target's: what its config.json says of them, and their fused rows."""

from typing import Any

from jaxspec.config.model import ModelConfig


def layer_values(
    target: ModelConfig,
    *,
    num_layers: int,
    intermediate_size: int | None,
    rope_theta: float,
    num_kv_heads: int | None = None,
) -> dict[str, Any]:
    """The fields of config.json; an intermediate_size or num_kv_heads of None is the target's."""
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or target.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": num_kv_heads or target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": rope_theta,
        "tie_word_embeddings": False,
    }


def fused_rows(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Rows of the pieces of what is fused and not cut into equal ones, as `export.pieces` takes them."""
    return {"qkv": (model.num_heads * model.head_dim, *[model.num_kv_heads * model.head_dim] * 2)}
