"""Host. Golden folders as GGUF files, as llama.cpp's converter writes them: its names, permutations and shifts."""

import json
import re

import gguf
import numpy as np

from jaxspec.weights.safetensors import SafetensorsReader

# Hugging Face name within a layer -> GGUF name.
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    # GPT-2
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ENDS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
        "wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}  # fmt: skip
EXPERTS = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down",
           "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}  # fmt: skip


def permute(weights, num_heads):
    """As llama.cpp's converter does it, for its interleaved rotary embedding."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def read_tensors(folder):
    with SafetensorsReader(folder) as reader:
        return {name: np.array(reader.read(name, np.dtype(np.float32))) for name in reader.tensors}


def converted(folder, arch):
    """{GGUF name: tensor}."""
    config, found, experts = json.loads((folder / "config.json").read_text()), {}, {}
    num_heads, num_kv = config.get("num_attention_heads"), config.get("num_key_value_heads")
    for name, tensor in read_tensors(folder).items():
        stem, kind = name.removeprefix("model.").removeprefix("transformer.").rsplit(".", 1)
        if kind == "inv_freq" or name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        if arch.startswith("gemma") and stem.endswith("norm"):
            tensor = tensor + 1
        if arch == "gpt2" and stem.split(".")[-1].startswith("c_") and kind == "weight":
            tensor = tensor.T
        if stem in ENDS:
            found[f"{ENDS[stem]}.{kind}"] = tensor
            continue
        _, layer, part = stem.split(".", 2)
        if arch == "deepseek2" and int(layer) >= config["num_hidden_layers"]:
            continue  # its converter leaves them out
        blk = f"blk.{layer}."
        if expert := re.fullmatch(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)", part):
            experts.setdefault(f"{blk}{EXPERTS[expert[2]]}_exps.weight", {})[int(expert[1])] = tensor
        elif kind == "e_score_correction_bias":
            found[f"{blk}exp_probs_b.bias"] = tensor.reshape(-1)
        elif part == "self_attn.kv_b_proj":
            nope = config["qk_nope_head_dim"]
            heads = tensor.reshape(num_heads, -1, tensor.shape[1])
            found[f"{blk}attn_k_b.weight"] = heads[:, :nope].swapaxes(1, 2)
            found[f"{blk}attn_v_b.weight"] = heads[:, nope:]
        else:
            if arch == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = permute(tensor, {"q": num_heads, "k": num_kv}[part[10]])
            table = LAYER | (GEMMA if arch.startswith("gemma") else {})
            if arch == "glm4moe":
                table["post_attention_layernorm"] = "post_attention_norm"
            found[f"{blk}{table.get(part, f'nextn.{part}')}.{kind}"] = tensor
    for name, stack in experts.items():
        found[name] = np.stack([stack[e] for e in range(len(stack))])
    rope = config.get("rope_scaling") or {}
    if "long_factor" in rope:
        for length in ("long", "short"):
            found[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    return found


def metadata_of(folder, arch):
    """{key after the architecture: value}."""
    config = json.loads((folder / "config.json").read_text())
    rope, turning = config.get("rope_scaling") or {}, None
    head_dim = config.get("head_dim")
    if "partial_rotary_factor" in config:
        head_dim = head_dim or config["hidden_size"] // config["num_attention_heads"]
        turning = int(head_dim * config["partial_rotary_factor"])
    gemma2 = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    names = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.sliding_window": "sliding_window",
        "rope.freq_base": "rope_theta",
        "expert_count": next((key for key in ("num_local_experts", "num_experts", "n_routed_experts",
                                              "moe_num_experts") if key in config), "-"),
        "expert_used_count": "moe_k" if "moe_k" in config else "num_experts_per_tok",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "nextn_predict_layers": "num_nextn_predict_layers",
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length_mla": "v_head_dim",
        **gemma2,
    }  # fmt: skip
    if arch == "gpt2":
        names = {"block_count": "n_layer", "context_length": "n_positions", "embedding_length": "n_embd",
                 "attention.head_count": "n_head", "attention.layer_norm_epsilon": "layer_norm_epsilon"}  # fmt: skip
    found = {key: config[name] for key, name in names.items() if config.get(name) is not None}
    if arch == "gpt2":
        found["feed_forward_length"] = 4 * config["n_embd"]
    if head_dim and arch != "deepseek2":
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if turning:
        found["rope.dimension_count"] = turning
    if arch == "glm4moe":
        found["block_count"] += found["nextn_predict_layers"]
    if arch in ("glm4moe", "deepseek2"):
        found["expert_gating_func"] = 2
    if arch == "deepseek2":
        found.pop("nextn_predict_layers", None)
        rank, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
        found |= {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + turning,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + turning,
            "rope.dimension_count": turning,
        }
    if "query_pre_attn_scalar" in config and config["query_pre_attn_scalar"] != head_dim:
        found["attention.scale"] = config["query_pre_attn_scalar"] ** -0.5
    if rope.get("type") == "yarn" and arch == "deepseek2":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    if "original_max_position_embeddings" in config:
        found["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    return found


FLOATS = ("epsilon", "freq_base", "softcapping", "weights_scale", "attention.scale", "multiplier")


def write_gguf(path, folder, arch):
    """The folder's model as a file of that architecture."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata_of(folder, arch).items():
        add = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}.get(
            float if key.endswith(FLOATS) else type(value), writer.add_uint32
        )
        add(f"{arch}.{key}", value)
    for name, tensor in converted(folder, arch).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
