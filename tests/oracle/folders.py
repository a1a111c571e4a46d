"""Host. Model folders made for tests: real Llama checkpoints with random weights, as small as a test wants them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.serve.fake import CHAT_TEMPLATE, LETTERS, letter_tokenizer

TINY = Path(__file__).resolve().parent.parent / "data" / "goldens" / "tiny"


def _kinds(folder: Path) -> list[str]:
    return json.loads((folder / "case.json").read_text())["kind"].split("+")


TARGETS = [folder.name for folder in sorted(TINY.iterdir()) if "target" in _kinds(folder)]

# (folder, kind of drafter): a folder of its own, or a module in a target's.
DRAFTERS = [(folder.name, kind) for folder in sorted(TINY.iterdir()) for kind in _kinds(folder) if kind != "target"]


def write_llama(
    folder: Path,
    *,
    seed: int,
    vocab_size: int = 32,
    num_layers: int = 2,
    hidden_size: int = 16,
    intermediate_size: int = 32,
    max_position_embeddings: int = 128,
    eos_token_id: int | list[int] | None = None,
    spread: float = 0.3,
    head_spread: float = 1.0,
    num_heads: int = 4,
    num_kv_heads: int = 2,
) -> Path:
    """A Llama folder, untied; the wider the spreads, the surer its distributions."""
    rng = np.random.default_rng(seed)
    size, ffn = 4, intermediate_size
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": ffn,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": size,
        "max_position_embeddings": max_position_embeddings,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "torch_dtype": "float32",
    }

    def random(*shape, scale=spread):
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": random(vocab_size, hidden_size, scale=1.0),
        "model.norm.weight": 1 + random(hidden_size, scale=0.1),
        "lm_head.weight": random(vocab_size, hidden_size, scale=head_spread),
    }
    for i in range(num_layers):
        name = f"model.layers.{i}."
        weights |= {
            name + "input_layernorm.weight": 1 + random(hidden_size, scale=0.1),
            name + "post_attention_layernorm.weight": 1 + random(hidden_size, scale=0.1),
            name + "self_attn.q_proj.weight": random(num_heads * size, hidden_size, scale=2 * spread),
            name + "self_attn.k_proj.weight": random(num_kv_heads * size, hidden_size, scale=2 * spread),
            name + "self_attn.v_proj.weight": random(num_kv_heads * size, hidden_size),
            name + "self_attn.o_proj.weight": random(hidden_size, num_heads * size),
            name + "mlp.gate_proj.weight": random(ffn, hidden_size),
            name + "mlp.up_proj.weight": random(ffn, hidden_size),
            name + "mlp.down_proj.weight": random(hidden_size, ffn),
        }
    return write_folder(folder, config, weights)


def write_like(folder: Path, original: Path, *, seed: int, noise: float) -> Path:
    """A drafter for `original`: its weights, each disturbed by `noise` of their spread."""
    rng = np.random.default_rng(seed)
    weights = {
        name: (tensor + noise * tensor.std() * rng.standard_normal(tensor.shape)).astype(np.float32)
        for name, tensor in load_file(original / "model.safetensors").items()
    }
    return write_folder(folder, json.loads((original / "config.json").read_text()), weights)


def add_tokenizer(folder: Path, letters: str = LETTERS + "#") -> Path:
    """One token a letter, with a chat template."""
    letter_tokenizer(letters).backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


def write_folder(folder: Path, config: dict, weights: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder
