"""Host. Models are described without their weights: those that ship, and whatever the user has."""

import shutil
from pathlib import Path

import pytest

from jaxspec.aot.describe import describe
from jaxspec.config.engine import EngineConfig
from jaxspec.config.heads import EagleConfig, MtpConfig
from jaxspec.config.model import ModelConfig
from jaxspec.errors import ConfigError
from jaxspec.weights.checkpoint import open_checkpoint
from tests.aot.paper import MODELS, SHIPPED, fields, on_paper, write_json

TINY = Path(__file__).resolve().parents[1] / "data" / "goldens" / "tiny"


@pytest.mark.parametrize("name", SHIPPED)
def test_every_config_that_ships_is_described(name):
    _, described, resolved = on_paper(name, "h200:2x8")
    assert resolved.speculative_config.method == described.method
    assert described.assumed  # nothing of these is on this machine
    kinds = {"eagle3": EagleConfig, "draft_model": ModelConfig, "mtp": MtpConfig, "ngram": type(None)}
    assert isinstance(described.drafter, kinds[described.method])


def test_an_eagle3_head_reads_the_default_streams():
    _, described, _ = on_paper("llama3.1-8b-eagle3")
    head = described.drafter
    assert (head.aux_streams, head.draft_vocab_size, head.id_map) == ((2, 16, 29), 32000, "d2t")
    assert not head.has_embed  # the target's


def test_what_the_user_says_goes_before_the_description():
    speculative = {
        "method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 3,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }  # fmt: skip
    _, described, resolved = on_paper("llama3.1-8b-eagle3", speculative_config=speculative)
    assert (described.drafter.aux_streams, resolved.num_speculative_tokens) == ((1, 2, 3), 3)


@pytest.mark.parametrize("folder", ["llama31", "deepseek-v3-mtp", "qwen3-moe", "phi3-longrope"])
def test_a_folder_is_described_as_it_would_be_loaded(folder):
    """With its weights, and, all but the dtype that its tensors tell, by its config.json alone."""
    with open_checkpoint(TINY / folder) as checkpoint:
        wanted = checkpoint.config
    assert describe(EngineConfig(model=str(TINY / folder)), []).target.model_copy(
        update={"dtype": wanted.dtype}
    ) == wanted  # fmt: skip


def test_without_weights_the_same_is_described(tmp_path):
    shutil.copy(TINY / "llama31" / "config.json", tmp_path)
    with_weights = describe(EngineConfig(model=str(TINY / "llama31")), [])
    without = describe(EngineConfig(model=str(tmp_path)), [])
    assert with_weights.target == without.target
    assert (with_weights.assumed, len(without.assumed)) == ((), 1)


@pytest.mark.parametrize(
    ("folder", "method", "target"),
    [
        ("eagle3", "eagle3", "llama-7layer"),
        ("eagle1", "eagle", "llama-7layer"),
        ("deepseek-v3-mtp", "mtp", "deepseek-v3-mtp"),
    ],
)
def test_assumed_tensors_count_as_the_real_ones(tmp_path, folder, method, target):
    """A head described by its config.json alone is the one in its files, but for what these repeat of the target."""
    heads = []
    for where in (TINY, tmp_path):
        if where is tmp_path:
            for name in {folder, target}:
                (tmp_path / name).mkdir()
                shutil.copy(TINY / name / "config.json", tmp_path / name)
        speculative = {"method": method, "num_speculative_tokens": 1}
        if method != "mtp":
            speculative["model"] = str(where / folder)
        described = describe(EngineConfig(model=str(where / target), speculative_config=speculative), [])
        assert bool(described.assumed) == (where is tmp_path)
        heads.append(described.drafter)
    real, assumed = heads
    shared = {"has_embed": assumed.has_embed, "has_head": assumed.has_head}
    without_dtypes = {"model": assumed.model.model_copy(update={"dtype": real.model.dtype})}
    assert real.model_copy(update=shared) == assumed.model_copy(update=without_dtypes)


@pytest.mark.parametrize(
    ("model", "speculative", "says"),
    [
        ("nobody/nothing", None, "holds no nobody/nothing.json"),
        ("meta-llama/Llama-3.1-8B-Instruct", {"method": "medusa", "model": "a/b", "num_speculative_tokens": 3},
         "holds no a/b.json"),
        ("Qwen/Qwen3-32B", {"method": "mtp", "num_speculative_tokens": 1}, "known by its tensors alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_described_is_said(model, speculative, says):
    with pytest.raises(ConfigError) as caught:
        describe(EngineConfig(model=model, speculative_config=speculative), [MODELS])
    assert says in str(caught.value)


def test_a_head_whose_tensors_vary_needs_them(tmp_path):
    write_json(tmp_path / "a" / "b.json", {"medusa_num_heads": 3, "hidden_size": 4096})
    config = EngineConfig(
        model="meta-llama/Llama-3.1-8B-Instruct",
        speculative_config={"method": "medusa", "model": "a/b", "num_speculative_tokens": 3},
    )
    with pytest.raises(ConfigError, match="known by its tensors alone"):
        describe(config, [MODELS, tmp_path])


def test_a_head_for_another_target_is_refused():
    speculative = {
        "method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 3,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="vocabulary of 128256 must equal the target's 151936"):
        on_paper("qwen3-32b-eagle3", speculative_config=speculative)
    assert fields("Qwen/Qwen3-32B")["vocab_size"] == 151936
