"""Host. T17: the files of a draft tell its method, whatever its name; what was asked for is obeyed or refused."""

import json

import pytest

from jaxspec.config.detect import (
    Drafter,
    DraftTokens,
    check_mtp,
    detect,
    draft_tokens_of,
    has_mtp_modules,
    mask_token_of,
    settle_draft_max_model_len,
    settle_draft_tensor_parallel,
    settle_method,
    settle_num_tokens,
)
from jaxspec.errors import ConfigError
from jaxspec.weights.checkpoint import describe_checkpoint
from tests.oracle.folders import TINY

Q = "layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("config", "shapes", "method"),
    [
        ({"speculators_model_type": "peagle"}, {}, "p_eagle"),
        ({"speculators_model_type": "eagle3"}, {}, "eagle3"),
        ({"speculators_model_type": "dflash2"}, {}, "dflash2"),
        ({"model_type": "eagle"}, {}, "eagle"),
        ({"model_type": "medusa", "architectures": ["LlamaForCausalLM"]}, {}, "medusa"),
        ({"model_type": "mlp_speculator"}, {}, "mlp_speculator"),
        ({"medusa_num_heads": 2}, {}, "medusa"),
        ({"model_type": "deepseek_mtp", "architectures": ["DeepSeekMTPModel"]}, {}, "mtp"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, {}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, {}, "eagle"),
        ({"architectures": ["Qwen3DSparkModel"]}, {}, "dspark"),
        ({"architectures": ["DFlashDraftModel"]}, {}, "dflash"),
        ({"architectures": ["DFlashDraftModel"]}, {"model.markov_head.markov_w1.weight": (9, 4)}, "dspark"),
        ({"architectures": ["DFlash2DraftModel"]}, {}, "dflash2"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, {"mask_hidden": (1, 1, 24)}, "p_eagle"),
        ({"general.architecture": "eagle3"}, {}, "eagle3"),
        ({"model_type": "llama", "pard_token": 9}, {"model.embed_tokens.weight": (9, 8)}, "pard"),
        ({"model_type": "llama", "pard_token": 9}, {"mask_hidden": (1, 1, 24), "d2t": (5,)}, "p_eagle"),
        ({}, {"d2t": (5,)}, "eagle3"),
        ({}, {"midlayer.hidden_norm.weight": (8,)}, "eagle3"),
        ({}, {"fc.weight": (8, 24)}, "eagle3"),
        ({}, {"fc.weight": (8, 16), "layers.0.input_layernorm.weight": (8,)}, "eagle3"),
        ({}, {"fc.weight": (8, 16)}, "eagle"),
        ({}, {"model.fc.weight": (8, 16)}, "eagle"),
        ({"hidden_size": 8}, {Q: (8, 16)}, "eagle3"),
        ({}, {"mask_hidden": (1, 1, 24), "d2t": (5,)}, "p_eagle"),
        ({}, {"hidden_norm.weight": (8,), "layers.0.self_attn.q_norm.weight": (4,)}, "dflash"),
        ({}, {"markov_head.markov_w1.weight": (9, 4), "hidden_norm.weight": (8,)}, "dspark"),
        ({}, {"d2t": (5,), "markov_head.markov_w1.weight": (9, 4)}, "dspark"),
        ({}, {"d2t": (5,), "hidden_norm.weight": (8,), "layers.0.self_attn.q_norm.weight": (4,)}, "dflash"),
        ({}, {"0.0.linear.weight": (8, 8), "0.1.weight": (20, 8)}, "medusa"),
        ({}, {"speculator.emb.0.weight": (20, 8)}, "mlp_speculator"),
        ({"model_type": "llama", "hidden_size": 8}, {"model.embed_tokens.weight": (9, 8), f"model.{Q}": (8, 8)}, None),
        ({"architectures": "LlamaForCausalLM", "model_type": 3}, {}, None),
        # What only the name says is not said.
        ({"_name_or_path": "me/eagle3-mtp-dflash-medusa", "model_type": "llama"}, {"lm_head.weight": (9, 8)}, None),
    ],
)
def test_kinds_by_config_and_tensors(config, shapes, method):
    found = detect(config, shapes)
    assert (None if found is None else found.method) == method
    if found is not None:  # the reason names what is there
        there = [*config, *config.values(), *config.get("architectures", []), *shapes]
        assert any(str(word).removeprefix("model.") in found.because for word in there)


@pytest.mark.parametrize(
    ("name", "method"),
    [("eagle1", "eagle"), ("eagle1-fcbias", "eagle"), ("eagle3", "eagle3"), ("eagle3-speculators", "eagle3"),
     ("medusa", "medusa"), ("mlp-speculator", "mlp_speculator"), ("mlp-speculator-tied", "mlp_speculator"),
     ("dflash", "dflash"), ("llama", None), ("qwen3", None), ("mistral-swa", None)],
)  # fmt: skip
def test_published_layouts(name, method):
    found = detect(*describe_checkpoint(TINY / name))
    assert (None if found is None else found.method) == method


def test_the_name_of_a_folder_never_matters(tmp_path):
    for source in ("llama", "eagle3"):
        for name in ("eagle-x", "eagle3-y", "mtp", "dflash", "dspark", "medusa", "ngram", "llama3.awq"):
            (tmp_path / source).mkdir(exist_ok=True)
            folder = tmp_path / source / name
            folder.symlink_to(TINY / source)
            found = detect(*describe_checkpoint(folder))
            assert (found is None) == (source == "llama")
            assert settle_method(None, str(folder), found) == ("draft_model" if source == "llama" else "eagle3")


EAGLE3, P_EAGLE, PARD = Drafter("eagle3", "tensor 'd2t'"), Drafter("p_eagle", "x"), Drafter("pard", "x")


@pytest.mark.parametrize(
    ("asked", "drafter", "is_parallel", "method"),
    [
        (None, None, False, "draft_model"),
        (None, EAGLE3, False, "eagle3"),
        (None, EAGLE3, True, "p_eagle"),
        (None, None, True, "pard"),
        (None, PARD, False, "pard"),
        ("eagle3", EAGLE3, False, "eagle3"),
        ("draft_model", None, False, "draft_model"),
        ("ngram+model", None, False, "ngram+draft_model"),
        ("ngram+model", EAGLE3, True, "ngram+p_eagle"),
        ("ngram+eagle3", EAGLE3, False, "ngram+eagle3"),
        ("draft_model", PARD, False, "draft_model"),
        ("p_eagle", P_EAGLE, True, "p_eagle"),
    ],
)
def test_a_method_is_told_or_confirmed(asked, drafter, is_parallel, method):
    assert settle_method(asked, "some/model", drafter, is_parallel=is_parallel) == method


@pytest.mark.parametrize(
    ("asked", "drafter", "says"),
    [
        ("eagle", EAGLE3, ("'eagle'", "eagle3 drafter", "d2t", "some/model")),
        ("draft_model", EAGLE3, ("'draft_model'", "eagle3 drafter")),
        ("eagle3", None, ("'eagle3'", "a whole model")),
        ("medusa", Drafter("mlp_speculator", "model_type"), ("'medusa'", "mlp_speculator drafter")),
        ("eagle3", P_EAGLE, ("'eagle3'", "p_eagle drafter")),
        (None, Drafter("dflash2", "speculators_model_type 'dflash2'"), ("dflash2", "none of the methods")),
    ],
)
def test_a_choice_that_the_files_contradict_is_refused_naming_both_sides(asked, drafter, says):
    with pytest.raises(ConfigError) as caught:
        settle_method(asked, "some/model", drafter)
    assert all(word in str(caught.value) for word in says)


@pytest.mark.parametrize(
    ("name", "is_there"),
    [("model.layers.61.eh_proj.weight", True), ("mtp.fc.weight", True), ("model.mtp_layers.0.input_proj.weight", True),
     ("model.mtp_block.0.mlp.up_proj.weight", True), ("model.language_model.mtp.norm.weight", True),
     ("blk.46.nextn.eh_proj.weight", True), ("model.layers.61.mlp.up_proj.weight", False), ("lm_head.weight", False)],
)  # fmt: skip
def test_mtp_modules_are_known_by_their_tensors(name, is_there):
    shapes = {"model.norm.weight": (8,), name: (8, 16)}
    assert has_mtp_modules(shapes) == is_there
    if is_there:
        check_mtp(shapes, "m")
    else:
        with pytest.raises(ConfigError, match="holds no MTP modules"):
            check_mtp(shapes, "m")


def test_a_checkpoint_with_dspark_heads_takes_dspark_and_not_mtp():
    with pytest.raises(ConfigError, match=r"'mtp' was asked for.*say method 'dspark'"):
        check_mtp({"model.norm.weight": (8,), "model.markov_head.markov_w1.weight": (9, 4)}, "deepseek")


@pytest.mark.parametrize(
    ("method", "config", "shapes", "told"),
    [
        ("mlp_speculator", {"n_predict": 4}, {}, (4, "multiple")),
        ("mtp", {"num_nextn_predict_layers": 2}, {}, (2, "multiple")),
        ("mtp", {"mtp_num_hidden_layers": 1, "n_predict": 3}, {}, (1, "multiple")),
        ("mtp", {"n_predict": 3}, {}, (3, "multiple")),
        # The published config says 2 heads of a file with more.
        ("medusa", {"medusa_num_heads": 2}, {f"{i}.{j}.weight": (8, 8) for i in range(5) for j in (0, 1)}, (5, "most")),
        ("medusa", {}, {f"medusa_heads.blocks.{i}.layers.0.weight": (8, 8) for i in range(3)}, (3, "most")),
        ("dflash", {"block_size": 16}, {}, (15, "most")),
        ("dspark", {"block_size": 7}, {}, (7, "most")),
        ("dspark", {"block_size": 7, "speculators_model_type": "dspark"}, {}, (6, "most")),
        ("dspark", {"block_size": 7, "sample_from_anchor": False}, {}, (6, "most")),
        ("dspark", {"dflash_config": {"block_size": 5}}, {}, (5, "most")),
        ("dflash", {"block_size": 7, "sample_from_anchor": True}, {}, (7, "most")),
        ("eagle3", {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}, {}, (3, "default")),
        ("eagle3", {"speculators_config": None}, {}, None),
        ("eagle", {"model_type": "llama"}, {}, None),
        ("draft_model", {"n_predict": "4"}, {}, None),
    ],
)
def test_how_many_drafts_the_files_speak_of(method, config, shapes, told):
    assert draft_tokens_of(method, config, shapes) == (None if told is None else DraftTokens(*told))


def test_the_mask_token_is_the_first_that_is_named():
    named = {"ptd_token_id": 5, "pard_token": 4, "dspark_noise_token_id": 3, "mask_token_id": 2}
    assert mask_token_of(named | {"dflash_config": {"mask_token_id": 1}}) == 1
    assert mask_token_of(named | {"dflash_config": {"mask_token_id": 1}}, 0) == 0, "the user's goes first"
    for token_id, key in ((2, "mask_token_id"), (3, "dspark_noise_token_id"), (4, "pard_token"), (5, "ptd_token_id")):
        assert mask_token_of(named | {"dflash_config": {}}) == token_id
        del named[key]
    with pytest.raises(ConfigError, match="set mask_token_id in speculative_config"):
        mask_token_of({"mask_token_id": None})
    with pytest.raises(ConfigError, match="pard_token must be a token id, got True"):
        mask_token_of({"pard_token": True})


def test_the_number_of_drafts():
    assert settle_num_tokens(None, DraftTokens(3, "default")) == 3
    assert settle_num_tokens(7, DraftTokens(3, "default")) == 7
    assert [settle_num_tokens(k, DraftTokens(3, "multiple")) for k in (1, 2, 3, 6, 9)] == [1, 2, 3, 6, 9]
    assert settle_num_tokens(2, DraftTokens(3, "most")) == 2
    assert settle_num_tokens(4, None) == 4
    with pytest.raises(ConfigError, match="num_speculative_tokens=4 must be divisible by n_predict=3"):
        settle_num_tokens(4, DraftTokens(3, "multiple"))
    with pytest.raises(ConfigError, match="=6 exceeds the 3"):
        settle_num_tokens(6, DraftTokens(3, "most"))
    with pytest.raises(ConfigError, match="num_speculative_tokens must be provided"):
        settle_num_tokens(None, None)


def test_a_draft_is_split_as_the_target_or_not_at_all():
    assert settle_draft_tensor_parallel(None, 4, "eagle3") == 4
    assert settle_draft_tensor_parallel(None, 4, "mlp_speculator") == 1
    assert [settle_draft_tensor_parallel(asked, 4, "draft_model") for asked in (1, 4)] == [1, 4]
    for asked in (2, 3, 8):
        with pytest.raises(ConfigError, match=f"={asked} must be 1 or the target's tensor_parallel_size=4"):
            settle_draft_tensor_parallel(asked, 4, "draft_model")


def test_the_drafts_length():
    assert settle_draft_max_model_len(None, 4096, 2048) == settle_draft_max_model_len(None, 2048, 4096) == 2048
    assert settle_draft_max_model_len(16, 64, 2048) == 16
    for asked in (65, 3000):
        with pytest.raises(ConfigError, match=f"max_model_len={asked}.*64.*2048"):
            settle_draft_max_model_len(asked, 64, 2048)


def test_a_description_is_what_the_files_say():
    config, shapes = describe_checkpoint(TINY / "dflash")
    assert config == json.loads((TINY / "dflash" / "config.json").read_text())
    assert shapes["hidden_norm.weight"] == (config["hidden_size"],)
