"""Device. Heads that draft in one pass: how a mask token reads, and what their files may say."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.errors import WeightsError
from jaxspec.models.heads.load import open_head
from jaxspec.weights.checkpoint import open_checkpoint
from scripts.check_golden import run_drafter
from tests.oracle.folders import TINY
from tests.oracle.goldens import assert_close
from tests.oracle.head_folders import edit_config
from tests.weights.zips import PROTO, STOP, integer, pack, state, storage, tensor

ROWS, OUTSIDE = 128, 200  # of the target's table, and a token without one


@pytest.fixture
def dflash(tmp_path):
    """The golden, with a mask token that has no row; the target's lies beside it. Also the row it was made with."""
    for name in ("dflash", "qwen3"):
        shutil.copytree(TINY / name, tmp_path / name)
    folder = tmp_path / "dflash"
    config = json.loads((folder / "config.json").read_text())["dflash_config"]
    row = load_file(TINY / "qwen3" / "model.safetensors")["model.embed_tokens.weight"][config["mask_token_id"]]
    return edit_config(folder, dflash_config=config | {"mask_token_id": OUTSIDE}), row.astype(np.float32)


def vector(size):
    return tensor(storage(num_values=size), shape=(size,), strides=(1,))


def test_a_mask_embedding_of_its_own_stands_for_the_token(dflash):
    """With the row that the recorded numbers were made with, which the table does not have under this id."""
    folder, row = dflash
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
def test_a_mask_token_without_an_embedding_is_refused(dflash, entries, words):
    folder, row = dflash
    if entries is not None:
        (folder / "mask_embedding.pt").write_bytes(pack(state(**entries), data=row.tobytes()))
    with pytest.raises(WeightsError) as caught:
        run_drafter(folder, json.loads((folder / "case.json").read_text()), "dflash")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_mask_embedding_may_name_its_token(dflash):
    folder, row = dflash
    entries = {"mask_token_id": integer(OUTSIDE), "embedding": vector(row.size)}
    (folder / "mask_embedding.pt").write_bytes(pack(state(**entries), data=row.tobytes()))
    with open_checkpoint(folder.parent / "qwen3") as target, open_head("dflash", folder, target) as head:
        np.testing.assert_array_equal(head.mask_embedding, row)
