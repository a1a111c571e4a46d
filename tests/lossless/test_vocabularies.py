"""Device. T16: a drafter of another vocabulary, or of another padding, drafts what both have and loses nothing; what
only seems to be the target's vocabulary is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec import ConfigError, SamplingParams
from tests.lossless.engines import draft_model, make_engine
from tests.lossless.test_every_proposer import answer_of, histogram_of, make_requests
from tests.oracle.folders import add_tokenizer, write_folder, write_llama
from tests.oracle.llama import NumpyLlama, assert_says, continuation
from tests.quick import heavy_but
from tests.serve.fake import LETTERS

K = 3
TARGET = LETTERS + "#"  # 32 tokens
OTHER = "?zyxwvuts01234 5:abcdefghijklmnop!"  # other tokens at other ids, most of them shared
PADDED = TARGET  # its model has more rows


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return add_tokenizer(write_llama(tmp_path_factory.mktemp("vocabularies") / "target", seed=4, vocab_size=32), TARGET)


@pytest.fixture(scope="module")
def target_oracle(target):
    return NumpyLlama(target)


def write_rearranged(folder, original, letters, size, *, loud=0.0):
    """The original with its rows where `letters` has them; rows of no shared token are random, `loud` ones tempting."""
    rng = np.random.default_rng(0)
    weights = load_file(original / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = rng.standard_normal((size, weights[name].shape[1])).astype(np.float32) * (1 + loud)
        for index, letter in enumerate(letters):
            if letter in TARGET:
                rows[index] = weights[name][TARGET.index(letter)]
        weights[name] = rows
    config = json.loads((original / "config.json").read_text()) | {"vocab_size": size}
    return add_tokenizer(write_folder(folder, config, weights), letters)


@pytest.fixture(scope="module")
def other(target):
    return write_rearranged(target.parent / "other", target, OTHER, len(OTHER))


@pytest.fixture(scope="module")
def padded(target):
    return write_rearranged(target.parent / "padded", target, PADDED, 40, loud=5.0)


def drafted(folder, letters):
    """What the drafter says in the target's ids: its likeliest shared tokens, fed what it knows of the text."""
    oracle = NumpyLlama(folder)
    unknown = letters.index("?")
    is_shared = np.array([letter in TARGET for letter in letters] + [False] * 40)

    def only_shared(score_V, output):
        return np.where(is_shared[: len(score_V)], score_V, -np.inf)

    def guess(ids, limit):
        fed = [letters.index(TARGET[token]) if TARGET[token] in letters else unknown for token in ids]
        return [TARGET.index(letters[token]) for token in continuation(oracle, fed, limit, edit=only_shared).token_ids]

    return guess


CASES = {
    "other": (OTHER, {"use_heterogeneous_vocab": True}),
    "padded": (PADDED, {}),
}


@pytest.mark.parametrize("name", heavy_but(CASES, lambda name: name == "other"))
def test_greedy_drafts_are_the_drafts_likeliest_shared_tokens(request, target, target_oracle, name):
    letters, more = CASES[name]
    folder = request.getfixturevalue(name)
    engine = make_engine(target, draft_model(K, folder, **more))
    guess = drafted(folder, letters)
    requests = make_requests(seed=2)
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    num_accepted = 0
    for output, (prompt, params) in zip(outputs, requests, strict=True):
        answer = answer_of(target_oracle, prompt, params)
        assert_says(output.outputs[0].token_ids, answer)
        stats = output.metrics.speculative_decoding
        num_accepted += stats["num_accepted_draft_tokens"]
        if min(answer.leads) > 1e-3:
            assert stats["acceptance_histogram"] == histogram_of(K, prompt, answer.token_ids, guess)
    assert num_accepted > 20


@pytest.mark.heavy
def test_drawn_drafts_lose_nothing_either(target, other, target_oracle):
    """q is the draft's distribution over the shared tokens; what it leaves out is drawn from the residual."""
    config = draft_model(K, other, "probabilistic", use_heterogeneous_vocab=True, rejection_sample_method="coupled")
    engine = make_engine(target, config)
    requests = make_requests(seed=3)
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    for output, (prompt, params) in zip(outputs, requests, strict=True):
        assert_says(output.outputs[0].token_ids, answer_of(target_oracle, prompt, params))
    assert sum(output.metrics.speculative_decoding["num_accepted_draft_tokens"] for output in outputs) > 20


def refusal(target, folder, **more):
    with pytest.raises(ConfigError) as caught:
        make_engine(target, draft_model(K, folder, **more))
    return str(caught.value)


def test_what_is_not_the_targets_vocabulary_is_refused(target, padded, tmp_path):
    swapped = PADDED.replace("g", "%").replace("m", "g").replace("%", "m")
    folder = write_rearranged(tmp_path / "swapped", target, swapped, 40)
    assert "id 6 is 'g' in the target and 'm' in the draft" in refusal(target, folder)
    folder = write_rearranged(tmp_path / "same size", target, swapped, 32)
    assert "id 6 is 'g' in the target and 'm' in the draft" in refusal(target, folder)
    folder = write_rearranged(tmp_path / "mute", target, PADDED, 40)
    (folder / "tokenizer.json").unlink()
    assert "vocabulary of 40 must equal the target's 32" in refusal(target, folder)
    assert "needs both tokenizers, and the draft" in refusal(target, folder, use_heterogeneous_vocab=True)


@pytest.mark.heavy
def test_tokens_of_nobody_else_are_unknown(target, other):
    """A prompt of letters that the drafter has none of is drafted for all the same."""
    engine = make_engine(target, draft_model(K, other, use_heterogeneous_vocab=True), max_num_seqs=1)
    (output,) = engine.generate("nopqr", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8
    assert output.metrics.speculative_decoding["num_draft_tokens"] > 0
