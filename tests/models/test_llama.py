"""Device. The Llama skeleton against recorded outputs of transformers, over shuffled pages of a pool full of NaN."""

import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.models.paging import Pager
from tests.oracle.folders import TINY, write_folder
from tests.oracle.llama import NumpyLlama

GOLDENS = ["llama", "llama31", "mistral-swa", "qwen2", "qwen3", "qwen3-bf16", "llama-7layer"]
ONE_PASS = [[24, 24]]
CHUNKS = [[1, 9], [7, 0], [8, 6], [0, 1], [8, 8]]  # tokens of each row, call after call


def read_golden(name):
    tolerance = json.loads((TINY / name / "case.json").read_text())["tolerance"]
    with np.load(TINY / name / "expected.npz") as arrays:
        return dict(arrays), {"atol": tolerance["logits_atol"], "rtol": tolerance["logits_rtol"]}


@pytest.mark.parametrize(
    ("name", "page_size"), [*((name, 4) for name in GOLDENS), ("mistral-swa", 1), ("mistral-swa", 16), ("llama", 32)]
)
def test_goldens(name, page_size):
    expected, tolerance = read_golden(name)
    ids_BT = expected["input_ids"]
    for cuts in (ONE_PASS, CHUNKS):
        pager = Pager(TINY / name, num_rows=2, max_len=40, page_size=page_size)
        found = [[], []]
        for cut in cuts:
            rows = [ids_BT[b, pager.len_B[b] : pager.len_B[b] + cut[b]].tolist() for b in range(2)]
            for b, pair in enumerate(pager.feed(rows, pad_to=26)):
                found[b].append(pair)
        for b in range(2):
            hidden, logits = (np.concatenate(parts) for parts in zip(*found[b], strict=True))
            np.testing.assert_allclose(hidden, expected["final_hidden"][b], **tolerance)
            np.testing.assert_allclose(logits, expected["logits"][b], **tolerance)


@pytest.mark.parametrize("name", GOLDENS)
def test_greedy_continuation_token_by_token(name):
    expected, _ = read_golden(name)
    pager = Pager(TINY / name, num_rows=1, max_len=40, page_size=4)
    fed, token_ids = expected["input_ids"][0].tolist(), []
    for _ in range(12):
        ((_, logits),) = pager.feed([fed])
        token_ids.append(int(logits[-1].argmax()))
        fed = token_ids[-1:]
    assert min(expected["greedy_gaps"]) > 1e-3
    assert token_ids == expected["greedy_tokens"].tolist()


@pytest.mark.parametrize("name", ["llama", "mistral-swa"])
def test_what_was_taken_back_leaves_no_trace(name):
    """Wrong tokens fed and forgotten at every distance, as rejected drafts are; for the window too."""
    model, rng = NumpyLlama(TINY / name), np.random.default_rng(0)
    ids = rng.integers(0, 128, 30).tolist()
    pager = Pager(TINY / name, num_rows=1, max_len=40, page_size=4)
    for position, token_id in enumerate(ids):
        ((_, logits),) = pager.feed([[token_id, *rng.integers(0, 128, position % 7)]], pad_to=7)
        pager.rewind(0, position % 7)
        np.testing.assert_allclose(logits[0], model.next_logits(tuple(ids[: position + 1])), atol=1e-3)


def test_a_row_does_not_depend_on_its_neighbours():
    ids = np.random.default_rng(1).integers(0, 128, (3, 20)).tolist()
    alone = Pager(TINY / "llama", num_rows=3, max_len=32, page_size=4).feed([ids[0], [], []])[0]
    for others in ([ids[1], ids[2]], [ids[2][:3], []], [ids[0], ids[0]]):
        beside = Pager(TINY / "llama", num_rows=3, max_len=32, page_size=4).feed([ids[0], *others])[0]
        np.testing.assert_allclose(beside[1], alone[1], atol=2e-5)
        assert (beside[1].argmax(axis=1) == alone[1].argmax(axis=1)).all()


# As llama.cpp's converter does it, for its interleaved rotary embedding.
def llama_cpp_permute(weights, num_heads):
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path, folder, arch):
    """The folder's model as llama.cpp's converter writes it."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q"])
    writer.add_head_count_kv(heads["k"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        plain = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        stem, kind = name.rsplit(".", 1)
        if stem not in plain:
            _, _, index, part = stem.split(".", 3)
            plain[stem] = f"blk.{index}.{GGUF_NAMES[part]}"
            if arch == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = llama_cpp_permute(tensor, heads[part[10]])
        writer.add_tensor(f"{plain[stem]}.{kind}", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("name", "arch"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_the_same_model_as_a_gguf_file(tmp_path, name, arch):
    expected, tolerance = read_golden(name)
    path = write_gguf(tmp_path / "model.gguf", TINY / name, arch)
    rows = Pager(path, num_rows=2, max_len=24, page_size=8).feed(expected["input_ids"].tolist())
    for (_, logits), wanted in zip(rows, expected["logits"], strict=True):
        np.testing.assert_allclose(logits, wanted, **tolerance)


def test_biases_of_attention_and_mlp(tmp_path):
    """attention_bias and mlp_bias, which no golden has; a GGUF file permutes q's and k's too."""
    config = json.loads((TINY / "llama" / "config.json").read_text()) | {"attention_bias": True, "mlp_bias": True}
    weights = load_file(TINY / "llama" / "model.safetensors")
    rng = np.random.default_rng(3)
    for name in [name for name in weights if "_proj" in name]:
        bias = rng.standard_normal(len(weights[name])).astype(np.float32) * 0.3
        weights[name.replace(".weight", ".bias")] = bias
    folder = write_folder(tmp_path / "biased", config, weights)
    ids = rng.integers(0, 128, (1, 20)).tolist()
    wanted = NumpyLlama(folder).logits(ids)[0]
    ((_, logits),) = Pager(folder, num_rows=1, max_len=20, page_size=4).feed(ids)
    np.testing.assert_allclose(logits, wanted, atol=2e-3, rtol=1e-3)
    attention_only = {name: tensor for name, tensor in weights.items() if not ("mlp" in name and "bias" in name)}
    folder = write_folder(tmp_path / "attention", config | {"mlp_bias": False}, attention_only)
    path = write_gguf(tmp_path / "model.gguf", folder, "llama")
    ((_, logits),) = Pager(path, num_rows=1, max_len=20, page_size=4).feed(ids)
    np.testing.assert_allclose(logits, NumpyLlama(folder).logits(ids)[0], atol=2e-3, rtol=1e-3)
