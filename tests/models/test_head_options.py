"""Device. Every option of a head's files against independent numpy formulas (files to be refused:
tests/tools/test_mutations.py)."""

import functools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.cache.pages import pool_shape, slots_of
from jaxspec.config.hf_eagle import eagle_config
from jaxspec.config.speculative import SpeculativeConfig
from jaxspec.engine.drafts import find_draft
from jaxspec.errors import JaxspecError, WeightsError
from jaxspec.models.base import Tokens
from jaxspec.models.heads import eagle, medusa, mtp
from jaxspec.models.heads.base import head_logits
from jaxspec.models.heads.load import load_head, open_head, target_ids
from jaxspec.models.registry import family_of
from jaxspec.weights.checkpoint import open_checkpoint
from jaxspec.weights.load import load
from tests.models.paging import read_head
from tests.oracle import head_folders
from tests.oracle.folders import TINY, write_llama
from tests.oracle.goldens import assert_close
from tests.oracle.head_folders import HIDDEN, VOCAB, edit_config, write_eagle, write_medusa
from tests.oracle.heads import NumpyEagle, NumpyMedusa, NumpyMimo
from tests.oracle.llama import NumpyLlama

NUM_LAYERS, T, PAGE = 5, 9, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("heads") / "target", seed=1, num_layers=NUM_LAYERS)


EAGLE = {
    "plain": {},
    "fc bias": {"biases": ("fc",)},
    "qkv bias": {"biases": ("q",), "qkv_bias": True},
    "several layers": {"num_layers": 2},
    "own embedding": {"stored": ("embed_tokens",)},
    "norms of other families": {"stored": ("norm", "input_layernorm")},
    "linear scaling": {"rope_scaling": {"type": "linear", "factor": 1.0}, "rope_theta": 77.0},
}
THREE = (2, 2, 2)
EAGLE3 = {
    "plain": {},
    "published names": {"layer_0": "midlayer.", "stored": ("embed_tokens",)},
    "prefixed names": {"prefix": "model.", "draft_vocab_size": 20, "stored": ("t2d",)},
    "default streams": {"streams": THREE, "eagle_aux_hidden_state_layer_ids": None},
    "outputs of layers": {"streams": (1, 3)},
    "ids as they are": {"streams": (2, 4)},
    "speculators": {"is_speculators": True, "streams": (1, 3)},
    "speculators, before": {"is_speculators": True, "norm_before_residual": False},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"stored": ("input_norm",), "norm_before_fc": True},
    "norm before fc, nested": {"stored": ("input_norm",), "eagle_config": {"norm_before_fc": True}},
    "norm a stream": {"stored": ("fc_norm",), "fc_norm": True, "norm_output": True},
    "norm output": {"norm_output": True, "is_speculators": True},
    "no streams": {"streams": (), "eagle_config": {"use_aux_hidden_state": False}},
    "biases": {"biases": ("q", "o", "fc"), "attention_bias": True},
    "tied": {"tie_word_embeddings": True, "stored": ("embed_tokens",)},
    "scaled": {"logit_scale": 0.25, "stored": ("lm_head",)},
    "layers": {"num_layers": 3},
    "layers of SGLang": {"num_layers": 2, "later_norm": "hidden_norm"},
    "qwen3": {"qk_norm": True, "is_speculators": True, "draft_vocab_size": 12},
    "other base": {"rope_theta": 500.0},
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [("eagle", options) for options in EAGLE.values()] + [("eagle3", options) for options in EAGLE3.values()],
    ids=[f"eagle, {name}" for name in EAGLE] + [f"eagle3, {name}" for name in EAGLE3],
)
def test_eagle_options(kind, options, tmp_path, opened, oracle):
    folder = edit_config(write_eagle(tmp_path, kind, seed=2, **options))
    config, weights = read_head(kind, folder, opened)
    twin = NumpyEagle(folder, oracle, kind)
    twin.weights = {twin_name(name): tensor for name, tensor in twin.weights.items()}
    twin.config.pop("rope_theta", None) if "rope_scaling" in options else None
    _, family, target_weights = opened
    ids = np.random.default_rng(0).integers(0, VOCAB, T + 1).tolist()
    rows = twin.rows(ids[:-1])
    logits, states = twin.run(np.array([twin.feature(row) for row in rows]), ids[1:])
    features = eagle.features(weights, config, jnp.asarray(rows, jnp.float32)[None])
    hidden, state, _ = run(config, weights, tuple(ids[1:]), features)
    if "head" in weights:
        found = head_logits(weights["head"], hidden, config.logit_scale)
    else:
        found = family.logits(target_weights, opened[0].config, hidden)
    assert_close(found[0], logits)
    assert_close(state[0], states)
    if "d2t" in twin.weights:
        wanted = [twin.target_id(draft) for draft in range(len(twin.weights["d2t"]))]
        assert weights["target_ids"].tolist() == wanted


def twin_name(name):
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def run(config, weights, ids, features_BTD, forward=eagle.forward):
    num_pages = -(-T // PAGE)
    positions = jnp.arange(T, dtype=jnp.int32)[None]
    pages = jnp.arange(num_pages, dtype=jnp.int32)[None]
    tokens = Tokens(
        token_ids_BT=jnp.asarray([ids], jnp.int32),
        positions_BT=positions,
        slots_BT=slots_of(positions, pages, PAGE),
        pages_BM=pages,
    )
    pool = jnp.full(pool_shape(config.model, num_pages, PAGE), jnp.nan, jnp.float32)
    return forward(weights, config, tokens, features_BTD, pool)


@pytest.mark.parametrize("names", ["original", "vllm"])
@pytest.mark.parametrize("heads", ["each", "one", "none"])
def test_medusa_layouts(names, heads, tmp_path, opened, oracle):
    write_medusa(tmp_path, seed=3, num_blocks=2, names=names, heads=heads)
    config, weights = read_head("medusa", tmp_path, opened)
    twin, (checkpoint, family, target_weights) = NumpyMedusa(tmp_path, oracle), opened
    hidden = np.random.default_rng(0).standard_normal((1, HIDDEN)).astype(np.float32)
    turned = medusa.blocks(weights, config, jnp.asarray(hidden), 3)
    found = (
        family.logits(target_weights, checkpoint.config, turned)
        if heads == "none"
        else medusa.own_logits(weights, config, turned)
    )
    assert_close(found[0], np.stack([twin.logits(hidden[0].astype(np.float64), i) for i in range(3)]))


def change(folder, tensors=(), **config):
    """A folder's tensors and config changed; `...` removes."""
    arrays = load_file(folder / "model.safetensors") | dict(tensors)
    save_file({name: array for name, array in arrays.items() if array is not ...}, folder / "model.safetensors")
    return edit_config(folder, **config)


def test_what_loads_says_what_it_shares(tmp_path, opened, caplog):
    """An embedding like the target's is the target's; a tie flag gives way to a smaller stored head."""
    table = np.asarray(opened[2]["embed"])
    write_eagle(tmp_path, "eagle3", draft_vocab_size=20, stored=("t2d",))
    with caplog.at_level("INFO"):
        config, weights = read_head(
            "eagle3", change(tmp_path, {"embed_tokens.weight": table}, tie_word_embeddings=True), opened
        )
    assert weights["embed"] is opened[2]["embed"]
    assert config.has_head
    assert "embedding: the target's (the stored one is equal)" in caplog.text
    assert "holds offsets" in caplog.text


def test_the_users_streams_go_before_the_configs(tmp_path, opened):
    folder = write_eagle(tmp_path, "eagle3", streams=(0, 1))
    with open_head("eagle3", folder, opened[0], aux_layer_ids=(4, 2)) as head:
        assert head.config.aux_streams == (4, 2)


def test_both_forms_of_an_id_map():
    kept = np.array([3, 4, 9, 30])
    marks = np.isin(np.arange(32), kept)
    offsets = kept - np.arange(4)
    for t2d in (marks, None):
        assert target_ids(offsets, t2d, 32).tolist() == kept.tolist()
    assert target_ids(kept, marks, 32).tolist() == kept.tolist()
    assert target_ids(kept, None, 32).tolist() == kept.tolist(), "as offsets, the last would be 33 of 32"
    assert target_ids(np.zeros(4, np.int64), None, 32).tolist() == [0, 1, 2, 3]
    with pytest.raises(WeightsError, match="t2d"):
        target_ids(offsets, ~marks, 32)


def test_a_specforge_flag_is_not_eagle_3_1s(tmp_path, opened):
    """Its norm_output speaks of the norm before the head; only what feeds the normed state back means that."""
    folder = write_eagle(tmp_path, "eagle3", norm_output=True)
    shapes = {name: array.shape for name, array in load_file(folder / "model.safetensors").items()}
    values = json.loads((folder / "config.json").read_text())
    read = functools.partial(eagle_config, "eagle3", shapes=shapes, target=opened[0].config, aux_layer_ids=None)
    assert read(config=values).norm_output
    assert not read(config=values | {"architectures": ["LlamaForCausalLMEagle3"]}).norm_output


def test_ernies_module(tmp_path):
    """Norms of token and state, a projection, one dense layer that turns interleaved pairs, and no norm behind it."""
    folder = shutil.copytree(TINY / "ernie4-5-moe", tmp_path / "ernie")
    config = json.loads((folder / "config.json").read_text())
    D, F = config["hidden_size"], config["intermediate_size"]
    size = D // config["num_attention_heads"]
    num_heads, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
    rng = np.random.default_rng(1)
    shapes = {"linear_proj.0.weight": (D, 2 * D), "linear_proj.0.bias": (D,)}
    shapes |= {f"{part}_norm.0.weight": (D,) for part in ("emb", "hidden")}
    shapes |= {f"block.0.{part}_layernorm.weight": (D,) for part in ("input", "post_attention")}
    heads = {"q": num_heads, "k": num_kv, "v": num_kv}
    shapes |= {f"block.0.self_attn.{part}_proj.weight": (count * size, D) for part, count in heads.items()}
    shapes["block.0.self_attn.o_proj.weight"] = (D, num_heads * size)
    shapes |= {f"block.0.mlp.{part}_proj.weight": (F, D) for part in ("gate", "up")}
    shapes["block.0.mlp.down_proj.weight"] = (D, F)
    w = {name: (0.3 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    save_file({f"model.mtp_{name}": tensor for name, tensor in w.items()}, folder / "mtp.safetensors")
    target_file = folder / "model.safetensors"
    save_file(load_file(target_file) | load_file(folder / "mtp.safetensors"), target_file)
    (folder / "mtp.safetensors").unlink()
    with open_checkpoint(folder) as checkpoint:
        family = family_of(checkpoint.config.family)
        table = family.name_table(checkpoint.config, "hf")
        target_weights = load(checkpoint.reader, family.specs(checkpoint.config, np.float32), table)
        with open_head("mtp", None, checkpoint) as head:
            weights = load_head(head, checkpoint.config, target_weights, jnp.float32)
    ids, state = rng.integers(0, config["vocab_size"], T), rng.standard_normal((T, D)).astype(np.float32)
    found, _, _ = run(head.config, weights, ids.tolist(), jnp.asarray(state)[None], mtp.forward)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + config["rms_norm_eps"]) * w[weight]

    table = np.asarray(target_weights["embed"], np.float64)
    pair = [norm(table[ids], "emb_norm.0.weight"), norm(state.astype(np.float64), "hidden_norm.0.weight")]
    h = np.concatenate(pair, axis=-1) @ w["linear_proj.0.weight"].T + w["linear_proj.0.bias"]
    x = norm(h, "block.0.input_layernorm.weight")
    turn = np.exp(1j * np.arange(T)[:, None] * config["rope_theta"] ** (-2 * np.arange(size // 2) / size)[None])
    parts = {}
    for part, count in heads.items():
        y = (x @ w[f"block.0.self_attn.{part}_proj.weight"].T).reshape(T, count, size)
        if part != "v":
            pairs = (y[..., ::2] + 1j * y[..., 1::2]) * turn[:, None]
            y = np.stack([pairs.real, pairs.imag], axis=-1).reshape(T, count, size)
        parts[part] = np.repeat(y, num_heads // count, axis=1)
    score = np.einsum("thd,shd->hts", parts["q"], parts["k"]) / np.sqrt(size)
    weight = np.where(np.tril(np.ones((T, T), bool)), np.exp(score - score.max()), 0)
    weight /= weight.sum(axis=-1, keepdims=True)
    out = np.einsum("hts,shd->thd", weight, parts["v"]).reshape(T, -1)
    h = h + out @ w["block.0.self_attn.o_proj.weight"].T
    y = norm(h, "block.0.post_attention_layernorm.weight")
    gate = y @ w["block.0.mlp.gate_proj.weight"].T
    h = h + (gate / (1 + np.exp(-gate)) * (y @ w["block.0.mlp.up_proj.weight"].T)) @ w["block.0.mlp.down_proj.weight"].T
    assert_close(found[0], h)


def read_target(folder):
    """(checkpoint's config, weights, the MTP head's config and weights) of a target with modules."""
    with open_checkpoint(folder) as checkpoint:
        family = family_of(checkpoint.config.family)
        table = family.name_table(checkpoint.config, "hf")
        weights = load(checkpoint.reader, family.specs(checkpoint.config, np.float32), table)
        with open_head("mtp", None, checkpoint) as head:
            return checkpoint.config, weights, head.config, load_head(head, checkpoint.config, weights, jnp.float32)


@pytest.mark.parametrize("num_modules", [1, 2])
def test_mimos_modules(num_modules, tmp_path):
    """The state before the embedding in the projection, and the target's state before its final norm."""
    twin = NumpyMimo(NumpyLlama(head_folders.write_mimo(tmp_path, seed=2, num_modules=num_modules)))
    target, target_weights, config, weights = read_target(tmp_path)
    assert (config.aux_streams, config.num_modules) == ((target.num_layers,), num_modules)
    rng = np.random.default_rng(0)
    ids, state = rng.integers(0, VOCAB, T).tolist(), rng.standard_normal((T, HIDDEN)).astype(np.float32)
    modules = weights.get("modules", [weights])
    assert len(modules) == num_modules
    for k, module in enumerate(modules):
        forward = functools.partial(mtp.forward, module=k)
        hidden, fed_back, _ = run(config, module, ids, jnp.asarray(state)[None], forward)
        assert_close(hidden[0], twin.run(k, state.astype(np.float64), ids))
        np.testing.assert_array_equal(hidden, fed_back)
        assert module["embed"] is target_weights["embed"]


def test_a_second_module_of_deepseeks_kind_lies_in_the_layer_behind(tmp_path):
    """It says what the same tensors say as a first and only one; a golden shows that these are read as they should."""
    name = "glm4-moe-mtp"
    own = load_file(TINY / name / "model.safetensors")
    n = json.loads((TINY / name / "config.json").read_text())["num_hidden_layers"]
    first = {tensor: array for tensor, array in own.items() if tensor.startswith(f"model.layers.{n}.")}
    other = {tensor: array[..., ::-1].copy() for tensor, array in first.items()}
    two = shutil.copytree(TINY / name, tmp_path / "two")
    later = {tensor.replace(f"layers.{n}.", f"layers.{n + 1}."): array for tensor, array in other.items()}
    save_file(own | later, two / "model.safetensors")
    edit_config(two, num_nextn_predict_layers=2)
    one = shutil.copytree(TINY / name, tmp_path / "one")
    save_file(own | other, one / "model.safetensors")
    _, _, config_2, weights_2 = read_target(two)
    _, _, config_1, weights_1 = read_target(one)
    assert (config_2.num_modules, config_1.num_modules) == (2, 1)
    D = config_1.model.hidden_size
    rng = np.random.default_rng(0)
    ids, state = rng.integers(0, 20, T).tolist(), jnp.asarray(rng.standard_normal((1, T, D)), jnp.float32)
    found, _, _ = run(config_2, weights_2["modules"][1], ids, state, functools.partial(mtp.forward, module=1))
    wanted, _, _ = run(config_1, weights_1, ids, state, mtp.forward)
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(np.asarray(run(config_2, weights_2["modules"][0], ids, state, mtp.forward)[0] - wanted)).max() > 0.1


def test_modules_can_come_from_another_copy_of_the_target(tmp_path):
    """Quantised copies often leave them out."""
    name = "glm4-moe-mtp"
    _, _, _, wanted = read_target(TINY / name)
    bare = shutil.copytree(TINY / name, tmp_path / "bare")
    own = load_file(bare / "model.safetensors")
    n = json.loads((bare / "config.json").read_text())["num_hidden_layers"]
    save_file(
        {key: a for key, a in own.items() if not key.startswith(f"model.layers.{n}.")}, bare / "model.safetensors"
    )
    with open_checkpoint(bare) as checkpoint:
        asked = {"method": "mtp", "num_speculative_tokens": 1}
        with pytest.raises(JaxspecError, match="holds no MTP modules"):
            find_draft(SpeculativeConfig(**asked), checkpoint)
        found = find_draft(SpeculativeConfig(**asked, model=str(TINY / name)), checkpoint)
        assert found.path == TINY / name
        family = family_of(checkpoint.config.family)
        table = family.name_table(checkpoint.config, "hf")
        weights = load(checkpoint.reader, family.specs(checkpoint.config, np.float32), table)
        with open_head("mtp", found.path, checkpoint) as head:
            loaded = load_head(head, checkpoint.config, weights, jnp.float32)
    assert loaded.keys() == wanted.keys()
    np.testing.assert_array_equal(loaded["fc"], wanted["fc"])
    with open_checkpoint(TINY / name) as checkpoint:
        assert find_draft(SpeculativeConfig(**asked, model=str(TINY / name)), checkpoint).path is None
