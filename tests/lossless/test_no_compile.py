"""Device. T18: once an engine is ready nothing compiles, whatever is asked of it."""

import itertools

import pytest

from jaxspec import SamplingParams
from jaxspec.step.compiles import compile_count
from tests.lossless.engines import VOCAB_SIZE, custom, draft_model, make_engine, ngram
from tests.lossless.replay import HostReplay
from tests.oracle.folders import add_tokenizer, write_llama
from tests.quick import heavy_but

CHUNK_TOKENS = 32  # buckets of 16 and 32
ROWS = 4  # buckets of 1 and 4


METHODS = ("plain", "ngram", "probabilistic", "host")


@pytest.fixture(scope="module", params=heavy_but(METHODS, lambda name: name == "ngram"))
def engine(request, tmp_path_factory, drafter):
    folder = write_llama(tmp_path_factory.mktemp("spoken") / "model", seed=4, vocab_size=VOCAB_SIZE)
    config = {
        "plain": None,
        "ngram": ngram(3),
        "probabilistic": draft_model(3, drafter, "probabilistic"),
        "host": custom(3),
    }[request.param]
    proposer = HostReplay(3) if request.param == "host" else None
    rounds = 3 if request.param == "ngram" else 1
    settings = {"max_num_seqs": ROWS, "max_num_batched_tokens": CHUNK_TOKENS, "rounds_per_batch": rounds}
    return make_engine(add_tokenizer(folder), config, proposer=proposer, buckets=True, **settings)


@pytest.fixture(autouse=True)
def nothing_compiles(engine):
    before, counted = compile_count(), engine.compiles_after_ready
    yield
    assert compile_count() - before == 0
    assert engine.compiles_after_ready == counted


def ask(engine, lengths, **params):
    prompts = [{"prompt_token_ids": [index % VOCAB_SIZE for index in range(length)]} for length in lengths]
    params = SamplingParams(**({"max_tokens": 5, "ignore_eos": True} | params))
    return engine.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("num_rows", [*range(1, ROWS + 1), ROWS + 2])
def test_batches(engine, num_rows):
    ask(engine, [3] * num_rows, temperature=0)


def test_lengths_at_the_edges_of_buckets_pages_and_chunks(engine):
    for length in (1, 2, 15, 16, 17, 18, 31, 32, 33, 34, 35, 50, 62, 63):
        ask(engine, [length], temperature=0)
        ask(engine, [length, 5], temperature=0)


def test_sampling(engine):
    for temperature, top_k, top_p, min_p in itertools.product((0.0, 0.7), (0, 3), (1.0, 0.8), (0.0, 0.1)):
        ask(engine, [4, 9], temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ask(engine, [4], seed=1)
    ask(engine, [4], n=3, min_tokens=2, stop_token_ids=[1, 2, 3])
    prompts = [{"prompt_token_ids": [1, 2]}] * 3
    engine.generate(prompts, [SamplingParams(temperature=t) for t in (0, 1, 0.5)], use_tqdm=False)


def test_text_chat_and_stop_strings(engine):
    engine.generate("hello hello", SamplingParams(stop=["ab", "c"]), use_tqdm=False)
    engine.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=4), use_tqdm=False)


def test_streams_and_aborts(engine):
    for output in engine.stream({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=20)):
        assert output.outputs[0].token_ids_delta
    for count, _ in enumerate(engine.stream({"prompt_token_ids": [1] * 40}, SamplingParams(max_tokens=20))):
        if count == 2:
            break
    for steps in range(4):
        engine.core.add_request("leaves", {"prompt_token_ids": [1] * 60}, SamplingParams(max_tokens=3))
        for _ in range(steps):
            engine.core.step()
        engine.core.abort("leaves")
    assert not engine.core.has_work


def test_metrics(engine):
    assert engine.get_metrics()["jaxspec:compiles_after_ready"] == engine.compiles_after_ready
