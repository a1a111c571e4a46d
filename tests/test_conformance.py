"""Host. The shipped vectors pass, what is not built is counted apart, and a wrong answer is a failure."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.quick import heavy_but, heavy_but_first

TESTS = Path(__file__).resolve().parent
VECTORS = TESTS / "data" / "vectors" / "vectors.json"


@pytest.fixture(scope="module")
def conformance():
    spec = importlib.util.spec_from_file_location("conformance", TESTS.parent / "scripts" / "conformance.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DRAWN = {"rejection_random", "synthetic", "block_verification"}  # a program for nearly every case


@pytest.mark.parametrize("drawn", heavy_but([(), DRAWN], lambda areas: not areas), ids=["given", "drawn"])
def test_the_shipped_vectors(conformance, capsys, tmp_path, drawn):
    vectors = [case for case in json.loads(VECTORS.read_text()) if (case["area"] in DRAWN) == bool(drawn)]
    file = tmp_path / "vectors.json"
    file.write_text(json.dumps(vectors))
    assert conformance.main([str(file)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert summary["failures"] == []
    assert summary["failed"] == 0
    assert len(lines) == summary["passed"] + summary["not_yet"] == len(vectors)
    least = {"ngram": 16, "rejection_greedy": 15, "rejection_random": 6, "metadata": 3, "output": 6, "synthetic": 10}
    for area, number in (least | {"block_verification": 3, "dynamic_schedule": 9}).items():
        assert (area in DRAWN) != bool(drawn) or summary["by_area"][area]["passed"] >= number


NGRAM = {"min_n": 2, "max_n": 2, "k": 2, "max_model_len": 64}
COIN = {"vocab": 2, "draft": [0], "draft_probs": None, "target_probs": [[0.5, 0.5]], "bonus": 1}
OTHER_KINDS = [
    ("ngram", NGRAM | {"rows": [[1, 2, 3, 1, 2], [4, 5, 6], [1, 2, 3, 1, 2]], "sampled_token_ids": [[2], [6], []]},
     [[3, 1], [], []]),
    ("rejection_greedy", {"candidates": [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]],
                          "target_predict": [[11, 12, 13, 99], [21, 77, 88, 99], [55, 31, 32, 33]]},
     {"accept_len": [3, 1, 0], "bonus": [99, 77, 55]}),
    ("rejection_random", COIN | {"draft_probs": [[0.5, 0.5]], "target_probs": [[0.25, 0.75]]},
     {"accept_prob": 0.5, "first_token_probs": [0.5, 0.5], "max_num_sampled": 2}),
    ("rejection_random", {"vocab": 4, "draft": [0], "draft_probs": None, "target_probs": [[0.5, 0.3, 0.15, 0.05]],
                          "bonus": 1, "temperature": 2.0, "top_p": 0.75},
     {"first_token_probs": [0.431, 0.334, 0.236, 0.0]}),
    ("rejection_random", COIN | {"target_probs": [[0.25, 0.75]], "rejection_sample_method": "block"},
     {"accept_prob": 0.25, "first_token_probs": [0.25, 0.75]}),
    ("rejection_random", {"draft_pattern": ["valid", "-1"], "K": 2, "target_equals_draft": True,
                          "rejection_sample_method": "block"}, {"max_num_sampled": 2, "frac_num_sampled_2_gt": 0.9}),
    ("rejection_greedy", {"vocab": 50, "prompt": [[1]], "outputs": [[3, 3]], "draft": [[2, 2]], "bonus": [9],
                          "logit_top_token": 2, "logit_top": 10.0, "runner_up_token": 4, "runner_up": 9.0,
                          "presence_penalty": [1.5]}, [[2, 4, -1]]),
    ("rejection_greedy", {"vocab": 50, "prompt": [[2], [5]], "outputs": [[], []], "draft": [[2], [2]], "bonus": [9, 9],
                          "logit_top_token": 2, "logit_top": 10.0, "runner_up_token": 4, "runner_up": 9.0,
                          "repetition_penalty": 1.2}, [[4, -1], [2, 9]]),
    ("rejection_greedy", {"draft": [[1, 2, 3], [2, 2, 3]], "target_argmax": [[1, 2, 3], [2, 2, 3]], "bonus": [4, 4],
                          "runner_up_token": 15, "bad_words": {"0": [[1, 2, 3]], "1": [[2, 2], [9]]}},
     [[1, 2, 15, -1], [2, 15, -1, -1]]),
    ("synthetic", {"rates": [0.9, 0.5, 0.2]}, {"empirical_rates": [0.9, 0.5, 0.2], "tolerance": 0.03}),
    ("synthetic", {"unconditional": [0.8, 0.4]}, {"mean_acceptance_length": 2.2, "tolerance": 0.06}),
    ("synthetic", {"conditional": [0.8, 0.5, 0.0]}, {"unconditional": [0.8, 0.4, 0.0], "tolerance": 1e-9}),
    ("synthetic", {"synthetic_acceptance_length": 5.5, "num_speculative_tokens": 3}, {"error": "ValueError",
                                                                                     "match": "must be in [1, 4]"}),
    ("synthetic", {"rates": [1.0, 0.0], "draft": [[1, 2], [3, 4]], "target_argmax": [[10, 20], [30, 40]],
                   "bonus": [50, 60], "modes": ["random"]}, [[1, 20, -1], [3, 40, -1]]),
    ("block_verification", {"target_probs": [[0.8, 0.2], [0.3, 0.7]], "draft_probs": [[0.5, 0.5], [0.6, 0.4]],
                            "draft": [1, 1], "uniforms": [0.5, 0.6]}, {"num_accepted": 2}),
    ("block_verification", {"target_probs": [[0.9, 0.1]], "draft_probs": [[0.5, 0.5]], "gamma": 1},
     {"block": 0.6, "standard": 0.6}),
    ("dynamic_schedule", {"schedule": [[1, 2, 9]], "max_batch": 3, "k_max": 4}, [0, 4, 4, 4]),
    ("dynamic_schedule", {"schedule": [[1, 2, 3], [5, 6, 1]], "scheduled_requests": [0, 1, 4, 9], "k_max": 3},
     [3, 3, 3, 1]),
    ("dynamic_schedule", {"schedule": [[1, 4]]}, {"error": "ValueError", "match": "three integers"}),
    ("metadata", {"num_draft_tokens": [3, 0, 2, 0, 1], "cu_num_scheduled_tokens": [4, 104, 107, 207, 209]},
     {"bonus_logits_indices": [3, 4, 7, 8, 10], "target_logits_indices": [0, 1, 2, 5, 6, 9]}),
    ("metadata", {"x": [0.0, 0.5], "cu_num_tokens": [2, 3], "replace_from": 0, "replace_to": 1}, [1, 1, 0.5]),
    ("metadata", {"outputs": [[5], [6, 7]], "draft": [[10, 11], []]}, [[5], [5, 10]]),
    ("metadata", {"output_token_ids": [[10, 20, -1], [300, 5, -1]], "vocab_size": 100}, [[10, 20], [5]]),
]  # fmt: skip


@pytest.mark.parametrize(("area", "given", "expected"), heavy_but_first(OTHER_KINDS, key=lambda case: case[0]))
def test_kinds_of_cases_that_the_shipped_file_lacks(conformance, area, given, expected):
    assert conformance.run_case({"area": area, "name": "", "input": given, "expected": expected}) == ("passed", "")


WRONG = [
    ("unheard_of", {}, []),
    ("ngram", NGRAM | {"tokens": [1, 2, 3, 1, 2]}, [3]),
    ("rejection_greedy", {"draft": [[1, 2]], "target_argmax": [[1, 5]], "bonus": [3]}, [[1, 2, 3]]),
    ("rejection_random", COIN, [0, 1]),
    ("rejection_random", COIN, {"accept_prob": 0.6}),
    ("rejection_random", COIN, {"unheard_of": 1}),
    ("synthetic", {"unconditional": [0.8, 0.4]}, {"conditional": [0.8, 0.4]}),
    ("synthetic", {"rates": [0.9, 0.5, 0.2]}, {"empirical_rates": [0.9, 0.5, 0.4], "tolerance": 0.03}),
    ("block_verification", {"target_probs": [[0.8, 0.2]], "draft": [1], "draft_probs": None}, {"joint_ratio": [1]}),
    ("block_verification", {"target_probs": [[0.8, 0.2]], "draft": [1], "draft_probs": None}, {"unheard_of": 1}),
    ("dynamic_schedule", {"schedule": [[1, 2, 3]], "max_batch": 2}, {"length": 2}),
    ("dynamic_schedule", {"schedule": [[1, 2, 3]], "max_batch": 2}, {"error": "ValueError", "match": "start at 1"}),
    ("metadata", {"num_draft_tokens": [1], "cu_num_scheduled_tokens": [2]}, {"logits_indices": [0]}),
    ("metadata", {"num_draft_tokens": [1], "cu_num_scheduled_tokens": [2]}, {"unheard_of": [0]}),
    ("output", {"prev": 0, "new": [5], "eos": 2, "maxt": 9}, {"kept": [5], "finish": "stop"}),
]  # fmt: skip


@pytest.mark.parametrize(("area", "given", "expected"), heavy_but_first(WRONG, key=lambda case: case[0]))
def test_a_wrong_answer_is_a_failure(conformance, area, given, expected):
    outcome, why = conformance.run_case({"area": area, "name": "", "input": given, "expected": expected})
    assert outcome == "failed"
    assert why


def test_a_failure_is_reported_and_exits_1(conformance, tmp_path, capsys):
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([{"area": "unheard_of", "name": "x", "input": {}, "expected": []}]))
    assert conformance.main([str(file)]) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["failures"][0]["name"] == "x"
    assert summary["by_area"] == {"unheard_of": {"passed": 0, "failed": 1, "not_yet": 0}}
