"""Host. `jaxspec.Engine` as its users hold it: streams side by side, parameters at their ends, traces."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxspec import ConfigError, Engine, RequestError, SamplingParams
from tests.lossless.engines import make_engine

TINY = Path(__file__).resolve().parent / "data" / "goldens" / "tiny" / "llama"
LIMIT = 32
PROMPT, OTHER = {"prompt_token_ids": [5, 6, 7, 5, 6]}, {"prompt_token_ids": [9, 10, 11]}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    return make_engine(TINY, {"method": "ngram", "num_speculative_tokens": 2}, max_model_len=LIMIT)


def ids_of(engine, params, prompt=PROMPT):
    (output,) = engine.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].token_ids


def test_streams_side_by_side_both_reach_their_end(engine):
    """Each steps the engine for both; what came meanwhile is given out at the next turn."""
    asked = [(PROMPT, dataclasses.replace(GREEDY, max_tokens=16)), (OTHER, GREEDY)]
    alone = [ids_of(engine, params, prompt) for prompt, params in asked]
    streams = [engine.stream(prompt, params) for prompt, params in asked]
    seen = [[next(stream)] for stream in streams]
    for outputs, stream in zip(seen, streams, strict=True):
        outputs += stream
    for outputs, expected in zip(seen, alone, strict=True):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [id for output in outputs for id in output.outputs[0].token_ids_delta] == expected
        assert outputs[-1].outputs[0].token_ids == expected


def test_a_stream_goes_on_after_the_engine_answered_others(engine):
    stream = engine.stream(PROMPT, GREEDY)
    first = next(stream)
    assert not first.finished
    expected = ids_of(engine, GREEDY)
    (last,) = stream
    assert last.finished
    assert last.outputs[0].token_ids == expected


def test_parameters_at_their_ends(engine):
    """As good as greedy is greedy; what exceeds every limit is the limit."""
    greedy = ids_of(engine, GREEDY)
    almost = SamplingParams(temperature=1e-6, max_tokens=6, ignore_eos=True, top_k=2**40)
    assert almost.temperature == 0
    assert ids_of(engine, almost) == greedy
    plain = {"seed": 3, "max_tokens": 6, "ignore_eos": True}
    assert ids_of(engine, SamplingParams(top_k=2**62, **plain)) == ids_of(engine, SamplingParams(**plain))
    assert len(ids_of(engine, SamplingParams(max_tokens=None, min_tokens=2**62))) == LIMIT - 5


@pytest.mark.parametrize("ids", ["abc", None, {1: 2}, np.int32(3), np.array(3), np.zeros((2, 2), int)])
def test_what_is_no_list_of_ids_is_called_so(engine, ids):
    with pytest.raises(RequestError, match="must be a list of token ids"):
        engine.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)


def test_a_second_trace_compiles_nothing(engine):
    rounds = engine.trace(PROMPT, GREEDY)
    assert [id for one in rounds for id in one.token_ids] == ids_of(engine, GREEDY)
    compiles = engine.compiles_after_ready
    again = engine.trace(PROMPT, GREEDY)
    assert [one.token_ids for one in again] == [one.token_ids for one in rounds]
    assert again is not rounds
    assert engine.compiles_after_ready == compiles


def test_a_tokenizer_that_was_asked_for_must_be_there(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Engine(str(TINY), tokenizer=str(tmp_path), compilation_cache_dir=None)
