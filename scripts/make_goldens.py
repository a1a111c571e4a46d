"""Makes tiny golden checkpoints with transformers and torch: python scripts/make_goldens.py OUT [NAME...]

Needs the extra `parity`. Each folder holds random weights in a published format and what transformers says with them in
float32: the layout scripts/check_golden.py reads. Names and options: CASES, below.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

VOCAB, PROMPT, GREEDY = 64, 24, 12
MIN_GAP = 0.03  # between the best and the second logit of every greedy step: no rounding changes the text
MAX_ROUNDING = 3e-6  # of float32 against float64, relative to the largest logit
LLAMA = {
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# name: (model type, changes to LLAMA, what they exercise)
CASES = {
    "llama-bias": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 12,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        ["attention_bias and mlp_bias", "explicit head_dim 12", "linear rope scaling"],
    ),
    "qwen3-swa-yarn": (
        "qwen3",
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
        ["window 6 from layer 1 on", "yarn with its default attention factor"],
    ),
    "phi3-plain": (
        "phi3",
        {"sliding_window": 7, "num_key_value_heads": 4},
        ["no longrope", "window 7", "untied", "as many kv heads as heads"],
    ),
    "gemma2-bias-untied": (
        "gemma2",
        {
            "head_dim": 8,
            "query_pre_attn_scalar": 12,
            "sliding_window": 5,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 8.0,
        },
        ["no attention softcap", "attention_bias", "untied", "window 5"],
    ),
    "gemma3-linear": (
        "gemma3_text",
        {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            "rope_theta": 100000.0,
            "rope_local_base_freq": 5000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "tie_word_embeddings": True,
        },
        ["pattern 2", "linear scaling of the full layers alone"],
    ),
    "gpt2-inverse-untied": (
        "gpt2",
        {
            "n_embd": 20,
            "n_head": 4,
            "n_layer": 3,
            "n_inner": 48,
            "n_positions": 48,
            "scale_attn_by_inverse_layer_idx": True,
        },
        ["scale_attn_by_inverse_layer_idx", "n_inner", "untied", "transformer. prefix"],
    ),
    "mixtral-swa": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 6, "intermediate_size": 24},
        ["window 6", "one expert a token of three"],
    ),
    "qwen3-moe-mixed": (
        "qwen3_moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
        ["norm_topk_prob false", "layer 1 dense", "attention_bias"],
    ),
    "deepseek-v3-plain": (
        "deepseek_v3",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.2,
            "num_nextn_predict_layers": 0,
        },
        ["no q_lora_rank", "one group", "two shared experts", "norm_topk_prob false", "no rope scaling"],
    ),
    "deepseek-v3-bias": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 6,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "rope_interleave": False,
            "num_nextn_predict_layers": 0,
        },
        ["attention_bias of both latents and the output", "rope_interleave false"],
    ),
    "glm4-moe-qk-norm": (
        "glm4_moe",
        {
            "head_dim": 12,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "num_hidden_layers": 2,
        },
        ["use_qk_norm", "two groups, the better one kept", "no biases"],
    ),
    "ernie4-5-moe": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 3,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 10,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "tie_word_embeddings": True,
        },
        ["interleaved rope", "softmax router with correction bias", "two shared experts", "first layer dense", "tied"],
    ),
    "ernie4-5-bias": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 10,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "use_bias": True,
        },
        ["use_bias in attention, dense and shared layers", "untied"],
    ),
}


def load_model(folder: Path):
    """The folder as transformers reads it, in float32, without fused kernels."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def make_model(model_type: str, changes: dict, seed: int):
    """A model of random weights, loud enough that its logits tell tokens apart."""
    config = transformers.AutoConfig.for_model(model_type, **(base_of(model_type) | changes))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not torch.is_floating_point(tensor) or "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * noise)
            elif tensor.ndim == 1:
                # Gemma's norms multiply by 1 + w; louder ones after each block keep the text from repeating a token.
                is_offset = name.endswith("bias") or (model_type.startswith("gemma") and ".post_" not in name)
                tensor.copy_(0.3 * noise + (0.0 if is_offset else 1.0))
            elif "embed_tokens" in name or "wte" in name or "wpe" in name:
                tensor.copy_(0.3 * noise if model_type.startswith("gemma") else noise)
            elif "lm_head" in name:
                tensor.copy_(noise * 3 / tensor.shape[1] ** 0.5)
            else:
                tensor.copy_(noise * 1.6 / tensor.shape[0 if model_type == "gpt2" else -1] ** 0.5)
    model.tie_weights()
    return model


def greedy_continuation(model, ids_1T):
    """The greedy tokens after a prompt, each from the whole text, and by how much each led."""
    ids, tokens, gaps = list(ids_1T[0]), [], []
    for _ in range(GREEDY):
        with torch.no_grad():
            logits_V = model(torch.tensor([ids])).logits[0, -1]
        best = torch.topk(logits_V, 2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        ids.append(tokens[-1])
    return tokens, gaps


def write_case(folder: Path, name: str) -> str:
    """Writes one folder: the first seed whose greedy text is certain, changes its tokens and hardly rounds."""
    model_type, changes, options = CASES[name]
    for seed in range(1000, 1200):
        ids_BT = np.random.default_rng(seed).integers(3, VOCAB, (2, PROMPT)).astype(np.int32)
        make_model(model_type, changes, seed).save_pretrained(folder)
        write_config(folder, model_type, changes)
        model = load_model(folder)
        tokens, gaps = greedy_continuation(model, ids_BT)
        with torch.no_grad():
            out = model(torch.from_numpy(ids_BT).long(), output_hidden_states=True)
            double = model.double()(torch.from_numpy(ids_BT).long()).logits
        rounding = float((out.logits.double() - double).abs().max() / double.abs().max())
        if min(gaps) >= MIN_GAP and len(set(tokens)) >= 5 and rounding < MAX_ROUNDING:
            break
    else:
        raise SystemExit(f"{name}: no seed gives a certain greedy text")
    arrays = {
        "input_ids": ids_BT,
        "logits": out.logits.numpy(),
        "final_hidden": out.hidden_states[-1].numpy(),
        "greedy_tokens": np.array(tokens, np.int32),
        "greedy_gaps": np.array(gaps, np.float32),
    }
    np.savez_compressed(folder / "expected.npz", **arrays)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    case = {
        "name": name,
        "kind": "target",
        "model_type": model_type,
        "seed": seed,
        "options": options,
        "source": f"scripts/make_goldens.py, {versions}, CPU, float32, eager attention; greedy by full recomputation",
        "rounding": rounding,
    }
    (folder / "case.json").write_text(json.dumps(case, indent=1) + "\n")
    return f"{name}: seed {seed}, std {float(double.std()):.2f}, float32 against float64 {rounding:.1e}"


def write_config(folder: Path, model_type: str, changes: dict) -> None:
    """As published files are written: transformers' own file holds every default of its version."""
    saved = json.loads((folder / "config.json").read_text())
    eps = {key: saved[key] for key in ("rms_norm_eps",) if key in saved}
    config = base_of(model_type) | eps | changes
    config |= {"model_type": model_type, "architectures": saved["architectures"], "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)


def base_of(model_type: str) -> dict:
    """LLAMA, but for a model type with other names for its sizes."""
    shared = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"}
    return {key: value for key, value in LLAMA.items() if model_type != "gpt2" or key in shared}


def main() -> int:
    """Makes the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*CASES, []], help=", ".join(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in arguments.names or CASES:
        folder = arguments.out / name
        folder.mkdir(parents=True, exist_ok=True)
        print(write_case(folder, name), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
