"""Host. `Engine`: batches, streams, chats, traces and metrics, and what an error leaves behind."""

import re

import numpy as np
import pytest

from jaxspec import ConfigError, Engine, RequestError, SamplingParams
from tests.lossless.engines import custom, draft_model, make_engine, ngram
from tests.lossless.replay import HostReplay, Script
from tests.oracle.edits import edited
from tests.oracle.folders import write_llama
from tests.oracle.llama import assert_says, continuation
from tests.quick import heavy_but

K = 3
GREEDY = SamplingParams(temperature=0, max_tokens=14)


@pytest.fixture(scope="module")
def engine(spoken):
    return make_engine(spoken, ngram(K))


def test_results_in_vllms_shape_and_in_order(engine, oracle):
    prompts = ["hello", {"prompt_token_ids": [3, 1, 4]}, {"prompt": "shown", "prompt_token_ids": [7]}]
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=3), GREEDY]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["hello", None, "shown"]
    assert [output.prompt_token_ids for output in outputs] == [[7, 4, 11, 11, 14], [3, 1, 4], [7]]
    assert len({output.request_id for output in outputs}) == 3
    for output, one in zip(outputs, params, strict=True):
        (completion,) = output.outputs
        assert output.finished
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert_says(completion.token_ids, continuation(oracle, output.prompt_token_ids, one.max_tokens))
        assert completion.text == engine.tokenizer.decode(completion.token_ids)
        times = output.metrics
        assert times.arrival_time <= times.first_token_time <= times.finished_time


def test_one_prompt_alone_and_default_parameters(engine):
    (output,) = engine.generate("hello", use_tqdm=False)
    assert len(output.outputs[0].token_ids) == SamplingParams().max_tokens


def test_the_bar_can_be_drawn(engine, capsys):
    engine.generate(["a", "b"], GREEDY, use_tqdm=True)
    assert "requests: 100%" in capsys.readouterr().err


def test_stop_strings_end_answers_where_the_text_says(engine):
    whole = engine.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = whole[5:7]
    (completion,) = engine.generate("hello", SamplingParams(temperature=0, max_tokens=14, stop=stop), use_tqdm=False)[
        0
    ].outputs
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert engine.core.scheduler.num_used == 0


def test_bad_words_are_never_written(engine, oracle):
    """Words of one, two and three tokens, in the middle of what would have been said; each alone and all together."""
    whole = engine.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0]
    bad = [whole.text[3:5].strip(), whole.text[6:9].strip(), whole.text[11].strip()]
    words = [word for word in bad if word]
    assert len(words) > 1
    for chosen in (*([word] for word in words), words):
        params = SamplingParams(temperature=0, max_tokens=14, bad_words=chosen)
        (answer,) = engine.generate("hello", params, use_tqdm=False)[0].outputs
        assert not any(word in answer.text for word in chosen)
        sequences = [engine.tokenizer.encode(form, add_special_tokens=False) for w in chosen for form in (w, f" {w}")]
        prompt = engine.tokenizer.encode("hello")

        def edit(logits_V, output, sequences=sequences, params=params, prompt=prompt):
            return edited(logits_V, params, prompt, output, bad_words_ids=sequences)

        assert_says(answer.token_ids, continuation(oracle, prompt, 14, edit=edit))


def test_logprobs_come_with_their_tokens_text(engine):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=0)
    (output,) = engine.generate("hello", params, use_tqdm=False)
    (answer,) = output.outputs
    texts = [entry[token].decoded_token for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert "".join(texts) == answer.text
    assert [one.decoded_token for entry in output.prompt_logprobs[1:] for one in entry.values()] == list("ello")
    pieces = [one.outputs[0] for one in engine.stream("hello", params)]
    assert pieces[-1].logprobs == answer.logprobs


def test_a_streams_deltas_join_to_the_whole(engine):
    (whole,) = engine.generate("hello", GREEDY, use_tqdm=False)
    outputs = list(engine.stream("hello", GREEDY))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert "".join(output.outputs[0].text_delta for output in outputs) == whole.outputs[0].text
    ids = [token_id for output in outputs for token_id in output.outputs[0].token_ids_delta]
    assert ids == whole.outputs[0].token_ids == outputs[-1].outputs[0].token_ids
    assert all(output.outputs[0].token_ids_delta for output in outputs)


def test_closing_a_stream_ends_its_request(engine):
    stream = engine.stream("hello", SamplingParams(max_tokens=40))
    next(stream)
    assert engine.core.scheduler.num_used > 0
    stream.close()
    assert engine.core.scheduler.num_used == 0
    assert not engine.core.has_work


def test_a_stream_and_a_batch_side_by_side(engine):
    (alone,) = engine.generate("hello", GREEDY, use_tqdm=False)
    stream = engine.stream("hello", GREEDY)
    first = next(stream)
    (beside,) = engine.generate("hello", GREEDY, use_tqdm=False)
    rest = list(stream)
    assert beside.outputs[0].token_ids == rest[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    ids = [token_id for output in [first, *rest] for token_id in output.outputs[0].token_ids_delta]
    assert ids == alone.outputs[0].token_ids


def test_chat_renders_the_template_and_adds_no_tokens(engine, oracle):
    messages = [{"role": "user", "content": "hi"}]
    (output,) = engine.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "user:hi\nassistant:"
    assert output.prompt_token_ids == engine.tokenizer.encode(output.prompt, add_special_tokens=False)
    assert_says(output.outputs[0].token_ids, continuation(oracle, output.prompt_token_ids, 14))
    both = engine.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in both] == [output.outputs[0].token_ids] * 2


def test_parameters_one_for_all_or_one_each(engine):
    with pytest.raises(RequestError, match="got 2 for 3 prompts") as caught:
        engine.generate(["a", "b", "c"], [GREEDY, GREEDY], use_tqdm=False)
    assert caught.value.param == "sampling_params"


def test_an_id_in_use_is_refused_and_its_owner_goes_on(engine):
    core = engine.core
    request = core.add_request("same", {"prompt_token_ids": [1, 2]}, GREEDY)
    with pytest.raises(RequestError, match="'same' is in use"):
        core.add_request("same", {"prompt_token_ids": [3]}, GREEDY)
    while core.has_work:
        core.step()
    assert request.is_finished
    core.add_request("same", {"prompt_token_ids": [3]}, GREEDY)  # free again
    core.abort("same")
    core.abort("never heard of")
    assert not core.has_work


def test_metrics_count_what_the_answers_say(engine):
    def read():
        metrics = engine.get_metrics()
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        return [metrics[f"vllm:spec_decode_{name}"] for name in names] + [metrics["vllm:generation_tokens"]]

    before = read()
    outputs = engine.generate(["abab", "hello", "aaaa"], GREEDY, use_tqdm=False)
    figures = [output.metrics.speculative_decoding for output in outputs]
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_output_tokens")
    grown = [now - then for now, then in zip(read(), before, strict=True)]
    assert grown == [sum(figure[name] for figure in figures) for name in names]
    assert grown[3] == 3 * 14
    metrics = engine.get_metrics()
    assert metrics["vllm:num_requests_running"] == metrics["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("method", heavy_but(("ngram", "probabilistic", "host"), lambda method: method == "ngram"))
def test_a_trace_shows_every_round_of_what_generate_says(spoken, drafter, oracle, method):
    host = HostReplay(K)
    config = {"ngram": ngram(K), "probabilistic": draft_model(K, drafter, "probabilistic")}
    engine = make_engine(spoken, config.get(method, custom(K)), proposer=host if method == "host" else None)
    prompt = [1, 2, 3, 1, 2, 3]
    answer = continuation(oracle, prompt, 14)
    host.scripts = [Script(prompt + answer.token_ids, wrong={10: 0, 15: 1})]
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=14)):
        (wanted,) = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        rounds = engine.trace({"prompt_token_ids": prompt}, params)
        ids = [token_id for one in rounds for token_id in one.token_ids]
        assert ids == wanted.outputs[0].token_ids
        figures = wanted.metrics.speculative_decoding
        assert sum(len(one.draft_token_ids) for one in rounds) == figures["num_draft_tokens"]
        assert sum(one.num_accepted for one in rounds) == figures["num_accepted_draft_tokens"]
        anchor = len(prompt)
        for one in rounds:
            assert one.anchor == anchor
            fed = (prompt + ids)[:anchor] + list(one.draft_token_ids)
            logits_TV = oracle.logits([fed])[0, anchor - 1 :]
            np.testing.assert_allclose(one.target_logits_JV, logits_TV, atol=1e-3)
            assert one.token_ids[: one.num_accepted] == one.draft_token_ids[: one.num_accepted]
            last = "bonus" if one.num_accepted == len(one.draft_token_ids) else "recovered"
            assert one.origins == (*["accepted"] * one.num_accepted, last)[: len(one.token_ids)]
            assert (one.draft_logits_KV is None) == (method != "probabilistic")
            anchor += len(one.token_ids)
    assert not engine.core.has_work
    (again,) = engine.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
    assert_says(again.outputs[0].token_ids, answer)


def test_a_trace_needs_the_engine_to_itself(engine):
    stream = engine.stream("hello", GREEDY)
    next(stream)
    with pytest.raises(RequestError, match="to itself"):
        engine.trace("hello", GREEDY)
    stream.close()
    with pytest.raises(RequestError, match="n=2") as caught:
        engine.trace("hello", SamplingParams(n=2))
    assert caught.value.param == "n"


class Faulty(HostReplay):
    """Says whatever its list holds."""

    def __init__(self, answers):
        super().__init__(K)
        self.answers = answers

    def propose(self, request_ids):
        return self.answers.pop() if self.answers else [[] for _ in request_ids]


def test_a_host_drafter_that_breaks_its_word_ends_the_request_alone(spoken, oracle):
    faulty = Faulty([])
    engine = make_engine(spoken, custom(K), proposer=faulty)
    for answers, says in (
        ([[]], "one list of at most 3"),
        ([[[1, 2, 3, 4]]], "one list of at most 3"),
        ([[[1], [2]]], "one list of at most 3"),
    ):
        faulty.answers = answers
        with pytest.raises(ConfigError, match=says):
            engine.generate({"prompt_token_ids": [1, 2]}, GREEDY, use_tqdm=False)
        assert not engine.core.has_work
        assert engine.core.scheduler.num_used == 0
        (output,) = engine.generate({"prompt_token_ids": [1, 2]}, GREEDY, use_tqdm=False)
        assert_says(output.outputs[0].token_ids, continuation(oracle, [1, 2], 14))
    assert set(faulty.seen) == set()


def test_a_host_drafter_hears_of_every_token_and_of_the_end(spoken):
    host = HostReplay(K)
    engine = make_engine(spoken, custom(K), proposer=host)
    seen = []
    host.observe = lambda name, prompt, output: seen.append((name, [*prompt], [*output]))
    host.propose = lambda names: [[5, 6] for _ in names]
    (output,) = engine.generate({"prompt_token_ids": [4]}, GREEDY, use_tqdm=False)
    assert seen[0][1:] == ([4], [])
    lengths = [len(ids) for _, _, ids in seen]
    assert lengths == sorted(lengths)
    assert len(host.finished) == 1
    assert output.outputs[0].token_ids[: len(seen[-1][2])] == seen[-1][2]


@pytest.mark.parametrize(
    ("config", "proposer", "says"),
    [
        (custom(K), None, "go together"),
        (ngram(K), HostReplay(K), "go together"),
        (None, HostReplay(K), "go together"),
        (custom(K), HostReplay(K + 1), "drafts custom.num_tokens=4 tokens, the config says num_tokens=3"),
    ],
)
def test_a_drafter_of_ones_own_and_its_config_must_agree(spoken, config, proposer, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        make_engine(spoken, config, proposer=proposer)


def test_a_draft_of_another_vocabulary_is_refused(spoken, tmp_path):
    other = write_llama(tmp_path / "other", seed=0, vocab_size=40)
    with pytest.raises(ConfigError, match="vocabulary of 40 must equal the target's 32"):
        make_engine(spoken, draft_model(K, other))


def test_an_unknown_key_is_refused_by_name(spoken):
    with pytest.raises(ConfigError, match="max_num_seq"):
        Engine(str(spoken), max_num_seq=3)
