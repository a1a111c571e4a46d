"""Device. Heads that draft in one pass, whatever their files look like: each draft, and the distribution it is drawn
from, against an independent numpy computation; and files to be refused, by name."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.cache.pages import pool_shape
from jaxspec.errors import ConfigError, JaxspecError, WeightsError
from jaxspec.models.heads import eagle as eagle_head
from jaxspec.models.heads.load import open_head
from jaxspec.proposers import drawing
from jaxspec.proposers.base import RowView
from jaxspec.proposers.dflash import dflash
from jaxspec.proposers.eagle import eagle
from jaxspec.sampling.table import neutral_table
from jaxspec.weights.checkpoint import open_checkpoint
from scripts.check_golden import run_drafter
from tests.models.paging import read_head
from tests.oracle.folders import TINY, write_llama
from tests.oracle.goldens import assert_close
from tests.oracle.head_folders import HIDDEN, VOCAB, edit_config, write_dflash, write_eagle
from tests.oracle.parallel_heads import NumpyDflash, NumpyPEagle
from tests.quick import heavy_but
from tests.weights.zips import PROTO, STOP, integer, pack, state, storage, tensor

K, LENGTH, PAGE = 3, 16, 4


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("parallel") / "target", seed=1, num_layers=3)


def drafts_after(contexts, config, draft_weights, opened, oracle):
    """What a proposer of the head drafts after each context, which a round committed at once; as one that draws: the
    first row draws the likeliest, the others the second."""
    checkpoint, family, target_weights = opened
    rows, num_pages = len(contexts), LENGTH // PAGE
    common = {
        "target_logits": lambda weights, hidden: family.logits(weights, checkpoint.config, hidden),
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_tokens": K,
        "max_model_len": LENGTH,
        "sample_method": "probabilistic",
        "pool_shape": pool_shape(config.model, rows * num_pages, PAGE),
        "pool_dtype": jnp.float32,
    }
    proposer = dflash(config, **common) if config.kind != "eagle3" else eagle(eagle_head.HEAD, config, **common)
    pages_BM = jnp.arange(rows * num_pages, dtype=jnp.int32).reshape(rows, num_pages)
    history_BC = np.zeros((rows, LENGTH), np.int32)
    seen_BJX = np.zeros((rows, K + 1, HIDDEN * (1 + len(config.aux_streams))), np.float32)
    for row, ids in enumerate(contexts):
        hidden, streams = oracle.hidden([ids[:-1]])
        history_BC[row, : len(ids)] = ids
        seen = [hidden[0], *(streams[i, 0] for i in config.aux_streams)]
        seen_BJX[row, : len(ids) - 1] = np.concatenate(seen, axis=-1)
    len_B = jnp.asarray([len(ids) for ids in contexts], jnp.int32)
    rows_B = jnp.arange(rows, dtype=jnp.int32)
    view = RowView(
        rows_B=rows_B,
        is_active_B=jnp.ones(rows, bool),
        history_BC=jnp.asarray(history_BC),
        len_B=len_B,
        max_len_B=jnp.full(rows, LENGTH, jnp.int32),
        pages_BM=pages_BM,
        table=dataclasses.replace(neutral_table(rows), temperature_B=jnp.ones(rows, jnp.float32)),
    )
    state = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan) if a.ndim == 4 else a, proposer.init(rows))
    state = proposer.commit(state, view.replace(len_B=jnp.ones_like(len_B)), seen_BJX, len_B - 1)
    is_second_B = (rows_B > 0).astype(jnp.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "process", lambda logits_BJV, table: logits_BJV)
        patch.setattr(
            drawing, "draw", lambda logits_BV, key_B2, table: jax.lax.top_k(logits_BV, 2)[1][rows_B, is_second_B]
        )
        propose = jax.jit(proposer.propose)
        drafts, _ = propose({"target": target_weights, "draft": draft_weights}, state, view)
    assert (np.asarray(drafts.counts_B) == K).all()
    return np.asarray(drafts.token_ids_BK), np.asarray(drafts.logits_BKV)


CONTEXTS = [[3, 1, 4, 1, 5], [2, 7], [1, 6, 1, 8]]
P_EAGLE = {
    "as published": {"prefix": "model.", "num_layers": 2, "stored": ("embed_tokens",)},
    "speculators": {"is_speculators": True, "draft_vocab_size": 20, "stored": ("t2d",), "streams": (0, 1, 2)},
    "norms before fc": {"stored": ("input_norm",), "norm_before_fc": True, "biases": ("q",), "attention_bias": True},
    "no streams": {"streams": (), "eagle_config": {"use_aux_hidden_state": False}},
}
SLIDING = {"layers": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, "num_layers": 2}
DFLASH = {
    "plain": {"num_layers": 2},
    "sliding layers": SLIDING | {"rope_theta": 500.0},
    "sliding layers that look ahead": SLIDING | {"layout": "speculators"},
    "causal, scaled": {"layout": "nested", "causal": True, "attention_value_scale": 0.5, "stored": ("bias",)},
    "anchored speculators": {"layout": "speculators", "sample_from_anchor": True, "draft_vocab_size": 20},
    "mask vector": {"stored": ("mask_embedding", "lm_head"), "mask_token_id": 90, "logit_scale": 0.25},
}
DSPARK = {
    "vanilla": {"stored": ("confidence_head",)},
    "gated": {"markov": "gated", "layout": "nested", "logit_scale": 0.5},
    "rnn": {"markov": "rnn", "draft_vocab_size": 20},
    "speculators": {"layout": "speculators", "draft_vocab_size": 20},
    "more tokens": {"embedded": VOCAB + 4, "mask_token_id": VOCAB + 2, "stored": ("lm_head",)},
    "more tokens, target's head": {"embedded": VOCAB + 4, "mask_token_id": VOCAB + 2, "sample_from_anchor": False},
}
HEADS = {
    **{f"p_eagle, {name}": ("p_eagle", options) for name, options in P_EAGLE.items()},
    **{f"dflash, {name}": ("dflash", options) for name, options in DFLASH.items()},
    **{f"dspark, {name}": ("dspark", {"markov": "vanilla"} | options) for name, options in DSPARK.items()},
}


QUICK = ("p_eagle, as published", "dflash, sliding layers", "dspark, gated", "dspark, speculators")


@pytest.mark.parametrize("name", heavy_but(HEADS, QUICK.__contains__))
def test_drafts_and_what_they_are_drawn_from(name, tmp_path, opened, oracle):
    """Every draft's distribution, given the drafts before it where it follows from them."""
    kind, options = HEADS[name]
    if kind == "p_eagle":
        folder = write_eagle(tmp_path, "eagle3", seed=2, mask_token_id=5, **options)
        twin = NumpyPEagle(folder, oracle)
        twin.weights = {name.removeprefix("model."): array for name, array in twin.weights.items()}
    else:
        folder = write_dflash(tmp_path, seed=3, **options)
        twin = NumpyDflash(folder, oracle)
    config, weights = read_head(kind, folder, opened)
    ids_BK, logits_BKV = drafts_after(CONTEXTS, config, weights, opened, oracle)
    for row, context in enumerate(CONTEXTS):
        said = ids_BK[row].tolist()
        wanted = twin.draft_logits(context, K) if kind == "p_eagle" else twin.walk(context, K, said)[1]
        ids = [twin.target_id(draft_id) for draft_id in range(wanted.shape[1])]
        assert_close(logits_BKV[row][:, ids], wanted)
        assert (np.delete(logits_BKV[row], ids, axis=1) == -np.inf).all(), "tokens that the draft does not know"
        if row == 0:
            assert said == twin.drafts(context, K)
    assert np.unique(ids_BK).size > 1


def change(folder, remove=(), **config):
    arrays = load_file(folder / "model.safetensors")
    save_file({name: array for name, array in arrays.items() if name not in remove}, folder / "model.safetensors")
    return edit_config(folder, **config)


W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
REFUSED = {
    "no learned state": ("p_eagle", {"remove": ["mask_hidden"]}, ["mask_hidden", "parallel_drafting"]),
    "no mask token": ("p_eagle", {"mask_token_id": None}, ["mask_token_id", "pard_token", "ptd_token_id"]),
    "a mask token that is none": ("p_eagle", {"mask_token_id": "m"}, ["mask_token_id", "'m'"]),
    "a mask token without a row": ("p_eagle", {"mask_token_id": 32}, ["mask_token_id=32", "32"]),
    "no markov head": ("dspark", {"remove": [W1, W2]}, ["missing", W1, W2]),
    "another markov head": ("dspark", {"markov_head_type": "fir"}, ["markov_head_type", "'fir'", "vanilla"]),
    "a rank that is not the file's": ("dspark", {"markov_rank": 7}, [W1, "[32, 6]", "[32, 7]"]),
    "a kind that is not the file's": ("dspark", {"markov_head_type": "gated"}, ["gate_proj.weight"]),
    "another way to join": ("dspark", {"dflash_config": {"projector_type": "domino"}}, ["projector_type", "domino"]),
    "more tokens without an embedding": ("dspark", {"vocab_size": 40}, ["40", "32", "embed_tokens.weight"]),
    "fewer tokens": ("dspark", {"vocab_size": 30}, ["30", "32"]),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "words"), REFUSED.values(), ids=REFUSED)
def test_files_that_do_not_fit_are_refused_by_name(kind, changes, words, tmp_path, opened):
    if kind == "p_eagle":
        write_eagle(tmp_path, "eagle3", mask_token_id=5)
    else:
        write_dflash(tmp_path, markov="vanilla")
    with pytest.raises(JaxspecError) as caught:
        read_head(kind, change(tmp_path, **changes), opened)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_users_mask_token_goes_before_the_configs(tmp_path, opened):
    for kind, folder in (
        ("p_eagle", write_eagle(tmp_path / "a", "eagle3", mask_token_id=5)),
        ("dspark", write_dflash(tmp_path / "b", markov="vanilla")),
    ):
        with open_head(kind, folder, opened[0], mask_token_id=7) as head:
            assert head.config.mask_token_id == 7


def test_what_is_left_unread_is_said(tmp_path, opened, caplog):
    write_dflash(tmp_path, markov="vanilla", stored=("confidence_head",))
    with caplog.at_level("INFO"):
        read_head("dspark", tmp_path, opened)
    assert "confidence head: left unread" in caplog.text
    with pytest.raises(ConfigError, match="projector_type"):
        read_head("dflash", edit_config(tmp_path, dflash_config={"projector_type": "xpress"}), opened)


ROWS, OUTSIDE = 128, 200  # of the target's table, and a token without one


@pytest.fixture
def golden(tmp_path):
    """The golden, with a mask token that has no row; the target's lies beside it. Also the row it was made with."""
    for name in ("dflash", "qwen3"):
        shutil.copytree(TINY / name, tmp_path / name)
    folder = tmp_path / "dflash"
    config = json.loads((folder / "config.json").read_text())["dflash_config"]
    row = load_file(TINY / "qwen3" / "model.safetensors")["model.embed_tokens.weight"][config["mask_token_id"]]
    return edit_config(folder, dflash_config=config | {"mask_token_id": OUTSIDE}), row.astype(np.float32)


def vector(size):
    return tensor(storage(num_values=size), shape=(size,), strides=(1,))


def test_a_mask_embedding_of_its_own_stands_for_the_token(golden):
    """With the row that the recorded numbers were made with, which the table does not have under this id."""
    folder, row = golden
    (folder / "mask_embedding.pt").write_bytes(pack(PROTO + vector(row.size) + STOP, data=row.tobytes()))
    found, expected = run_drafter(folder, json.loads((folder / "case.json").read_text()), "dflash")
    for name in ("pass1", "pass2"):
        assert_close(found[f"{name}_logits"], expected[f"{name}_logits"])


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (None, ["mask_token_id=200", f"embedding of {ROWS}", "mask_embedding.pt"]),
        ({"mask_token_id": integer(127), "embedding": vector(40)}, ["token 127", "200"]),
        ({"mask_token_id": integer(200), "embedding": tensor(storage(num_values=40), shape=(39,), strides=(1,))},
         ["40 numbers", "[39]"]),
        ({"mask_token_id": integer(200)}, ["40 numbers", "NoneType"]),
    ],
)  # fmt: skip
def test_a_mask_token_without_an_embedding_is_refused(golden, entries, words):
    folder, row = golden
    if entries is not None:
        (folder / "mask_embedding.pt").write_bytes(pack(state(**entries), data=row.tobytes()))
    with pytest.raises(WeightsError) as caught:
        run_drafter(folder, json.loads((folder / "case.json").read_text()), "dflash")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_mask_embedding_may_name_its_token(golden):
    folder, row = golden
    entries = {"mask_token_id": integer(OUTSIDE), "embedding": vector(row.size)}
    (folder / "mask_embedding.pt").write_bytes(pack(state(**entries), data=row.tobytes()))
    with open_checkpoint(folder.parent / "qwen3") as target, open_head("dflash", folder, target) as head:
        np.testing.assert_array_equal(head.mask_embedding, row)
