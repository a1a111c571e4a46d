"""Host. One table of methods: aliases, choices of the command line, the support table and vLLM's keys agree with it."""

import argparse
import importlib.util
import logging
import re
from pathlib import Path

import pytest

from jaxspec.config.engine import EngineConfig
from jaxspec.config.load import add_flags
from jaxspec.config.methods import METHODS, canonical_method, extra_slots, initial_method
from jaxspec.config.speculative import FEATURE_KEYS, SpeculativeConfig
from jaxspec.config.speculative_keys import KEYS
from jaxspec.config.support import FEATURES, SUPPORT, check_support
from jaxspec.errors import ConfigError
from jaxspec.proposers import registry

# What vLLM documents, written down from its documentation.
VLLM_DEFAULTS = {
    "enforce_eager": None, "num_speculative_tokens": None, "model": None, "method": None,
    "draft_tensor_parallel_size": None, "quantization": None, "moe_backend": None, "attention_backend": None,
    "kv_cache_dtype": None, "max_model_len": None, "revision": None, "code_revision": None,
    "index_share_for_mtp_iteration": None, "disable_padded_drafter_batch": False, "disable_eagle_block_drop": False,
    "use_local_argmax_reduction": False, "use_heterogeneous_vocab": False, "prompt_lookup_max": None,
    "prompt_lookup_min": None, "parallel_drafting": False, "num_speculative_tokens_per_batch_size": None,
    "suffix_decoding_max_tree_depth": 24, "suffix_decoding_max_cached_requests": 10000,
    "suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_min_token_prob": 0.1, "draft_load_config": None,
    "rejection_sample_method": "standard", "synthetic_acceptance_rates": None, "synthetic_acceptance_length": None,
    "enable_adaptive_verification": False, "draft_sample_method": "greedy", "dspark_draft_topk": None,
}  # fmt: skip
MTP_NAMES = (
    "deepseek_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "glm_ocr_mtp", "ernie_mtp",
    "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "longcat_flash_mtp",
    "bailing_hybrid_mtp", "minimax_m3_mtp", "kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "hy_v3_mtp",
    "gemma4_mtp", "inkling_mtp",
)  # fmt: skip
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def test_there_is_one_table():
    assert registry.METHODS is METHODS
    assert {name for name in METHODS if not name.startswith("ngram+")} == {
        "ngram", "suffix", "draft_model", "pard", "eagle", "eagle3", "p_eagle", "mtp", "medusa",
        "mlp_speculator", "dflash", "dspark", "self", "custom",
    }  # fmt: skip
    behind = set(METHODS) - {"ngram", "suffix"} | {"model"}
    assert {name for name in METHODS if name.startswith("ngram+")} == {
        f"ngram+{name}" for name in behind if not name.startswith("ngram+")
    }


def test_looking_up_first_is_as_what_drafts_behind_it():
    """What that needs, its aliases, and whether it is built."""
    for name, method in METHODS.items():
        if (behind := METHODS.get(name.removeprefix("ngram+"))) is not None:
            assert (method.needs, method.is_built, method.num_tokens) == (
                behind.needs,
                behind.is_built,
                behind.num_tokens,
            )
    names = {"ngram+peagle": "ngram+p_eagle", "ngram+deepseek_mtp": "ngram+mtp", "ngram+self": "ngram+self"}
    assert {name: canonical_method(name) for name in names} == names
    for name in ("ngram+ngram", "ngram+suffix", "ngram+", "ngram+eagel"):
        with pytest.raises(ConfigError, match="unknown speculative method"):
            canonical_method(name)


def test_the_command_line_offers_exactly_these():
    parser = argparse.ArgumentParser()
    add_flags(parser, [EngineConfig])
    (action,) = [one for one in parser._actions if "--speculative-method" in one.option_strings]
    assert list(action.choices) == list(METHODS)
    assert parser.parse_args(["--speculative-method", "[ngram]"]).__dict__["speculative.method"] == "ngram"


@pytest.mark.parametrize("name", MTP_NAMES)
def test_mtp_names_are_deprecated_and_mean_mtp(caplog, name):
    assert canonical_method(name) == "mtp"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{name!r} is deprecated and replaced with mtp" in record.getMessage()


def test_other_spellings():
    names = {"[ngram]": "ngram", "ngram_gpu": "ngram", "custom_class": "custom", "peagle": "p_eagle", "mtp": "mtp"}
    assert {name: canonical_method(name) for name in names} == names
    with pytest.raises(ConfigError, match="did you mean 'medusa'"):
        canonical_method("medussa")
    with pytest.raises(ConfigError, match="'extract_hidden_states' is refused"):
        canonical_method("extract_hidden_states")


@pytest.mark.parametrize(
    ("method", "model", "found"),
    [
        (None, "ngram", "ngram"),
        (None, "[ngram]", "ngram"),
        (None, "Qwen2.5-0.5B", "draft_model"),
        (None, "https://h/x.y", "draft_model"),
        (None, "single", "draft_model"),
        (None, "me/eagle3-head", "draft_model"),
        (None, "mtp", "draft_model"),
        (None, "my_package.drafts.Best", "custom"),
        (None, "a.b", "custom"),
        (None, "a..b", "draft_model"),
        ("[ngram]", None, "ngram"),
        ("eagle3", "a.b", "eagle3"),
    ],
)
def test_the_method_before_any_file_is_looked_at(method, model, found):
    assert initial_method(method, model) == found


def test_a_folder_whose_name_looks_like_code_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert initial_method(None, "llama3.awq") == "custom"
    (tmp_path / "llama3.awq").mkdir()
    assert initial_method(None, "llama3.awq") == "draft_model"


def test_extra_slots_are_vllms():
    K = 5
    plain = {name: extra_slots(name, K) for name in METHODS if not name.startswith("ngram+")}
    assert {name: slots for name, slots in plain.items() if slots} == {
        "draft_model": 1, "pard": K, "p_eagle": K - 1, "dflash": K, "dspark": K - 1,
    }  # fmt: skip
    parallel = {name: extra_slots(name, K, is_parallel=True) for name in ("eagle3", "draft_model", "dflash", "dspark")}
    assert parallel == {"eagle3": K - 1, "draft_model": K, "dflash": K, "dspark": K - 1}


def test_every_key_of_vllms_has_a_status():
    assert set(VLLM_DEFAULTS) <= set(KEYS)
    own = set(KEYS) - set(VLLM_DEFAULTS)
    ours = {"prompt_lookup_match", "eagle_aux_hidden_state_layer_ids", "exit_layer", "mask_token_id"}
    assert own == ours | {"synthetic_acceptance_rate"}  # an older vLLM's
    assert {name: key.neutral for name, key in KEYS.items() if name in VLLM_DEFAULTS} == VLLM_DEFAULTS
    honoured = {name for name, key in KEYS.items() if key.status == "honoured"}
    assert honoured == set(SpeculativeConfig.model_fields)
    assert all(key.note for key in KEYS.values() if key.status != "honoured")


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.status != "honoured"])
def test_what_is_not_honoured_is_noted_or_refused(caplog, name):
    key = KEYS[name]
    plain = SpeculativeConfig(**NGRAM)
    assert SpeculativeConfig(**NGRAM, **{name: key.neutral}) == plain
    asks = True if isinstance(key.neutral, bool) or name == "enforce_eager" else "something"
    assert caplog.records == []
    if key.status == "noted":
        assert SpeculativeConfig(**NGRAM, **{name: asks}) == plain
        assert name in caplog.text
        assert key.note in caplog.text
    else:
        with pytest.raises(ConfigError, match=name):
            SpeculativeConfig(**NGRAM, **{name: asks})


def test_support_says_what_configs_are_refused():
    assert SUPPORT.keys() == METHODS.keys()
    assert all(row.keys() == FEATURES.keys() for row in SUPPORT.values())
    asks = {"dspark_draft_topk": 2}
    for key, feature in FEATURE_KEYS.items():
        for method, row in SUPPORT.items():
            says = r"is refused with|is refused, got|not supported yet|needs 'model'|must be provided"
            given = {"method": method, "num_speculative_tokens": 4, key: asks.get(key, True)}
            refused = None
            try:
                SpeculativeConfig(**given)
            except ConfigError as error:
                refused = str(error)
                assert re.search(says, refused)
            assert (row[feature] is not None) == (refused is not None and "is refused with" in refused), (method, key)


@pytest.mark.parametrize(
    ("method", "feature", "says"),
    [
        ("eagle", "heterogeneous_vocab", "only works with method='draft_model'"),
        ("ngram", "parallel_drafting", "parallel_drafting only works with"),
        ("eagle3", "pipeline_parallel", "'eagle3' is refused with pipeline_parallel_size"),
        ("medusa", "expert_load_balancing", "'medusa' is refused with enable_eplb"),
        ("mtp", "adaptive_verification", "only works with method='dspark'"),
        ("suffix", "several_rounds", "guesses on the host"),
    ],
)
def test_limits_name_method_feature_and_reason(method, feature, says):
    with pytest.raises(ConfigError) as caught:
        check_support(method, ["block", feature])
    assert says in str(caught.value)
    check_support("ngram", ["block", "coupled", "synthetic", "exact", "batch_size_schedule", "several_rounds"])


def test_the_document_is_what_the_tables_say():
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("methods_doc", root / "scripts" / "methods_doc.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (root / "docs" / "methods.md").read_text(encoding="utf-8") == module.methods_doc()
