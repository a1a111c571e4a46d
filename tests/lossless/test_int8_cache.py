"""Device. An int8 cache behind the engine, the drafter's too: with drafts or without, the same tokens."""

import jax
import pytest

from jaxspec import SamplingParams
from jaxspec.tools.checks import MARGINS, margin_of
from jaxspec.types import Int8Pool
from tests.lossless.engines import draft_model, make_engine
from tests.oracle.folders import write_llama

K = 3
PROMPTS = [{"prompt_token_ids": ids} for ids in ([1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 9, 8, 7, 9, 8], [3])]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Exact: the cache rounds what it is given, so what it is given must be the same bits (`exact`)."""
    folder = tmp_path_factory.mktemp("int8")
    target = write_llama(folder / "target", seed=1)
    draft = write_llama(folder / "draft", seed=1, num_layers=1)
    return make_engine(target, draft_model(K, draft), kv_cache_dtype="int8", exact=True, max_model_len=40)


def test_pools_are_integers_and_are_updated_in_place(engine):
    pools = [engine.core.state.pool, engine.core.state.proposer.pool]
    assert all(isinstance(pool, Int8Pool) for pool in pools)
    shapes = engine.core.parts.programs.shapes
    program = engine.core.parts.programs.compiled(f"decode_rounds[B={shapes.batch_rows[-1]}]")
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.core.state))
    assert program.memory_analysis().alias_size_in_bytes == state_bytes


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 5, "top_p": 0.9}], ids=str)
def test_speculation_changes_no_token(engine, sampling):
    def run(**more):
        params = SamplingParams(max_tokens=24, ignore_eos=True, **sampling, **more)
        return engine.generate(PROMPTS, params, use_tqdm=False)

    drafted, plain = run(), run(speculative={"enabled": False})
    assert [out.outputs[0].token_ids for out in drafted] == [out.outputs[0].token_ids for out in plain]
    histogram = [sum(out.metrics.speculative_decoding["acceptance_histogram"]) for out in drafted]
    assert min(histogram) > 0, "no round drafted: the run shows nothing"


def test_verify_allows_for_the_rounding_of_the_cache(engine):
    """In passes of other shapes a sum on the edge of two integers falls to either: more than float32 itself loses."""
    assert engine.core.config.dtype == "float32"
    assert margin_of(engine.core.config) == MARGINS["int8"] > MARGINS["float32"]
