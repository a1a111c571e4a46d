"""Host. Conformance cases of drafting that the shipped file lacks pass, and wrong answers among them are failures."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "conformance.py"


@pytest.fixture(scope="module")
def run_case():
    spec = importlib.util.spec_from_file_location("conformance", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda area, given, expected, name="": module.run_case(
        {"area": area, "name": name, "input": given, "expected": expected}
    )


WRONG = {"error": "ValueError", "match": ""}
VOCABULARIES = {"target_vocab": {"\u0120a": 0, "b": 1}, "draft_vocab": {"b": 0, "\u2581a": 1, "u": 2}}
UNKNOWN = {"target_unk": 1, "draft_unk": 2}
RIGHT = [
    ("config", {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}, {"prompt_lookup_max": 2}),
    ("config", {"method": "ngram", "num_speculative_tokens": -1}, WRONG | {"match": "greater than"}),
    ("config", {"method": "suffix", "suffix_decoding_max_cached_requests": -1}, WRONG | {"match": "must be >= 0"}),
    ("config", {"method": "medusa", "parallel_drafting": True}, WRONG),
    ("config", {"method": "ngram", "num_speculative_tokens": 2, "dspark_draft_topk": 4}, WRONG | {"match": "dspark"}),
    ("config", {"method": "ngram", "num_speculative_tokens": 2, "index_share_for_mtp_iteration": True}, WRONG),
    ("config", {"method": "custom_class", "num_speculative_tokens": 2}, WRONG),
    ("config", {"target_tp": 4, "draft_tp": 2}, "ValueError"),
    ("config", {"target_tp": 8, "draft_tp": None, "method": "mlp_speculator"}, 1),
    ("config", {"num_speculative_tokens": 5, "n_predict": 2}, WRONG | {"match": "divisible by n_predict=2"}),
    ("config", {"num_speculative_tokens": 6, "n_predict": 3}, 6),
    ("config", {"num_speculative_tokens": None, "n_predict": None}, WRONG),
    ("config", {"speculative": 100, "draft": 4096, "target": 8192}, 100),
    ("config", {"speculative": 5000, "draft": 8192, "target": 4096}, "ValueError"),
    ("config", {"model": "pkg.mod.Class", "method": None}, "custom_class"),
    ("config", {"model": "[ngram]", "method": None}, "ngram"),
    ("config", {"model": "x", "method": "ngram_gpu"}, "ngram"),
    ("config", {"method": "deepseek_mtp"}, {"method": "mtp", "warning": "deprecated and replaced with mtp"}),
    ("config", {"rejection_sample_method": "synthetic", "rates": None, "length": 2.5, "n": 3}, {"rates": [1, 0.5, 0]}),
    ("config", {"rejection_sample_method": "standard", "rates": [0.5], "length": None, "n": 1}, WRONG),
    ("config", {"rejection_sample_method": "synthetic", "rates": [0.5], "length": 1.5, "n": 1}, WRONG),
    ("vocab_mapping", VOCABULARIES | UNKNOWN | {"ids": [0, 1]}, [1, 0]),
    ("vocab_mapping", VOCABULARIES | UNKNOWN, {"mask_draft": [1, 1, 0], "mask_target": [1, 1], "intersection_size": 2}),
    ("vocab_mapping", VOCABULARIES | UNKNOWN, {"draft_to_target": [1, 0, 1], "masked_logits": "-inf outside"}),
    ("vocab_mapping", VOCABULARIES | {"target_unk": 1, "draft_eos": 0}, {"target_to_draft": [1, 0]}),
    ("vocab_mapping", VOCABULARIES | {"draft_unk": 0}, WRONG),
    ("drafter_inputs", {"tokens": [1, 2, 3], "query_lens": [3], "positions": [7, 8, 9], "num_rejected": [2],
                        "next_tokens": [5], "pad_id": 0},
     {"input_ids": [1, 5, 0, 0], "positions": [7, 8, 0, 0], "rejected_mask": [0, 0, 1, 1], "sample_indices": [1]}),
    ("drafter_inputs", {"tokens": [1, 2], "query_lens": [2], "positions": [7, 8], "num_rejected": [0],
                        "next_tokens": [5], "pad_id": 0, "mask_id": 9, "K": 2, "shift": False},
     {"input_ids": [1, 2, 5, 9], "positions": [7, 8, 9, 10], "rejected_mask": [0, 0, 0, 0], "sample_indices": [2, 3],
      "masked_mask": [0, 0, 0, 1]}),
    ("drafter_inputs", {"batch": 1, "first_argmax": [7], "K": 1, "rule": "step i argmax = base+i"}, [[7]]),
    ("drafter_inputs", {"num_computed": [0, 0], "num_prompt": [9, 100], "num_scheduled": [9, 9]}, False),
    ("drafter_inputs", {"num_computed": [0], "num_prompt": [10], "num_scheduled": [9]}, True),
    ("drafter_inputs", {"method": "draft_model", "parallel": False, "K": 3}, 1),
    ("drafter_inputs", {"method": "dspark", "parallel": True, "K": 3}, 2),
]  # fmt: skip


@pytest.mark.parametrize(("area", "given", "expected"), RIGHT)
def test_kinds_of_cases_that_the_shipped_file_lacks(run_case, area, given, expected):
    assert run_case(area, given, expected) == ("passed", "")


def test_a_case_s_name_says_the_direction(run_case):
    given = VOCABULARIES | UNKNOWN
    assert run_case("vocab_mapping", given, [1, 0, 1], "draft_to_target_all") == ("passed", "")
    assert run_case("vocab_mapping", given, [1, 0, 1], "target_to_draft_all")[0] == "failed"


@pytest.mark.parametrize(
    ("area", "given", "expected"),
    [
        ("config", {"method": "ngram", "num_speculative_tokens": 3}, {"prompt_lookup_max": 4}),
        ("config", {"method": "ngram", "num_speculative_tokens": 3}, WRONG),
        ("config", {"method": "ngram", "num_speculative_tokens": 0}, WRONG | {"match": "unheard of"}),
        ("config", {"method": "ngram", "num_speculative_tokens": 3}, {"unheard_of": 4}),
        ("config", {"target_tp": 4, "draft_tp": 4}, 1),
        ("config", {"method": "mtp"}, {"method": "mtp", "warning": "deprecated"}),
        ("config", {"model": "a/b", "method": None}, "ngram"),
        ("vocab_mapping", VOCABULARIES | UNKNOWN, {"intersection_size": 3}),
        ("vocab_mapping", VOCABULARIES | UNKNOWN, {"unheard_of": 3}),
        ("drafter_inputs", {"batch": 1, "first_argmax": [7], "K": 2, "rule": ""}, [[7, 9]]),
        ("drafter_inputs", {"method": "dspark", "parallel": True, "K": 3}, 3),
        ("drafter_inputs", {"query_lens": [2], "num_rejected": [1]}, {"token_indices": [1]}),
        ("drafter_inputs", {"unheard_of": 1}, []),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_a_failure(run_case, area, given, expected):
    outcome, why = run_case(area, given, expected)
    assert outcome == "failed"
    assert why
