"""Host. SamplingParams: vLLM's names and defaults, and a refusal that names the field for everything else."""

import dataclasses

import numpy as np
import pytest

from jaxspec.errors import RequestError
from jaxspec.sampling.params import NOT_SUPPORTED_YET, SamplingParams

NAN, INF = float("nan"), float("inf")


def test_defaults_are_vllms():
    params = SamplingParams()
    defaults = {
        "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "ignore_eos": False, "max_tokens": 16, "min_tokens": 0,
        "logprobs": None, "prompt_logprobs": None, "detokenize": True, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "include_stop_str_in_output": False, "truncate_prompt_tokens": None,
        "structured_outputs": None, "logit_bias": None, "allowed_token_ids": None, "extra_args": None,
        "speculative": None, "max_drafts": None,
    }  # fmt: skip
    assert {name: getattr(params, name) for name in defaults} == defaults
    assert (params.stop, params.stop_token_ids, params.bad_words, params.logits_processors) == ((), (), (), ())


@pytest.mark.parametrize(
    ("given", "name", "kept"),
    [
        ({"stop": "a"}, "stop", ("a",)),
        ({"stop": ["a", "bc"]}, "stop", ("a", "bc")),
        ({"stop_token_ids": [3, 1]}, "stop_token_ids", (3, 1)),
        ({"bad_words": ["no"]}, "bad_words", ("no",)),
        ({"allowed_token_ids": [3, 1, 3]}, "allowed_token_ids", (3, 1)),
        ({"speculative": {"enabled": False, "num_speculative_tokens": 3}}, "max_drafts", 0),
        ({"speculative": {"num_speculative_tokens": 3}}, "max_drafts", 3),
        ({"speculative": {"enabled": True}}, "max_drafts", None),
        ({"top_k": -1}, "top_k", 0),
        ({"seed": -1}, "seed", None),
        ({"seed": 2**63 - 1}, "seed", 2**63 - 1),
        ({"temperature": 0}, "is_greedy", True),
        ({"temperature": 1e-6}, "is_greedy", True),
        ({"temperature": 0.01}, "is_greedy", False),
        ({"temperature": np.float32(0.5)}, "temperature", 0.5),
        ({"max_tokens": None, "min_tokens": 7}, "max_tokens", None),
        ({"n": 3, "temperature": 0.0}, "n", 3),
    ],
)
def test_what_is_right_is_kept_in_one_form(given, name, kept):
    assert getattr(SamplingParams(**given), name) == kept


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 1.0, True, "1", None]),
        ("temperature", [-0.1, NAN, INF, -INF, "1", None, True]),
        ("top_p", [0, -0.5, 1.1, NAN, INF, None, "0.9", True]),
        ("top_k", [-2, 1.5, True, "5", None, 2**63]),
        ("min_p", [-0.1, 1.5, NAN, None, "0"]),
        ("seed", [2**63, -(2**63) - 1, 1.5, True, "3"]),
        ("stop", ["", ["a", ""], [1], 5, b"a", {"a": 1}]),
        ("stop_token_ids", [[-1], [1.5], 5, "12", [True]]),
        ("max_tokens", [0, -1, 2.5, True, "16"]),
        ("min_tokens", [-1, 0.5, None, True]),
        ("presence_penalty", [2.1, -2.1, NAN, "1", None, True]),
        ("frequency_penalty", [2.1, -2.1, INF, "1", None]),
        ("repetition_penalty", [0, -1, NAN, INF, None]),
        ("logit_bias", [{1: 101}, {1: NAN}, {"1": 1}, {-1: 1}, {1: "2"}, [1], 5]),
        ("bad_words", [[""], [1], 5, b"a"]),
        ("allowed_token_ids", [[], [-1], [1.5], "12", 5]),
        ("logprobs", [-2, 1.5, True, "5"]),
        ("prompt_logprobs", [-2, 1.5, True]),
        ("logits_processors", [["f"], 5]),
        ("extra_args", [[1], "a"]),
        ("speculative", [True, {"enabled": 1}, {"num_speculative_tokens": -1}, {"k": 1}]),
        ("n", [16385]),
        ("ignore_eos", [1, None, "yes"]),
        ("include_stop_str_in_output", [0]),
        ("skip_special_tokens", [None]),
        ("detokenize", ["no"]),
    ],
)
def test_what_is_wrong_is_refused_by_name(field, values):
    for value in values:
        with pytest.raises(RequestError) as refusal:
            SamplingParams(**{field: value})
        assert refusal.value.param == field
        assert field in str(refusal.value)
        assert repr(value) in str(refusal.value)


def test_contradictions_are_refused():
    with pytest.raises(RequestError, match="max_tokens=3") as refusal:
        SamplingParams(min_tokens=4, max_tokens=3)
    assert refusal.value.param == "min_tokens"
    with pytest.raises(RequestError, match="detokenize") as refusal:
        SamplingParams(stop="x", detokenize=False)
    assert refusal.value.param == "stop"


ASKING = {
    "flat_logprobs": True, "truncate_prompt_tokens": 4,
    "spaces_between_special_tokens": False,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NOT_SUPPORTED_YET))
def test_what_does_not_work_yet_is_refused_unless_it_asks_for_nothing(name):
    with pytest.raises(RequestError, match=f"{name} is not supported yet") as refusal:
        SamplingParams(**{name: ASKING[name]})
    assert refusal.value.param == name
    for neutral in NOT_SUPPORTED_YET[name]:
        SamplingParams(**{name: neutral})


def test_every_field_is_either_checked_or_refused():
    """A field that no check reads would be ignored silently: one wrong value of each must be noticed."""
    for field in dataclasses.fields(SamplingParams):
        with pytest.raises(RequestError):
            SamplingParams(**{field.name: object()})
