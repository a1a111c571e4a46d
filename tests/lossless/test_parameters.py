"""Device. T6: every sampling parameter means the same with speculation, whether the drafts are right or wrong."""

import dataclasses

import numpy as np
import pytest

from jaxspec import SamplingParams
from jaxspec.engine.drafting import DraftChooser
from jaxspec.sampling.processors import LogitsProcessor
from tests.lossless.engines import MAX_MODEL_LEN, VOCAB_SIZE, custom, make_engine
from tests.lossless.replay import Script, replay_proposer, set_scripts
from tests.oracle.edits import edited
from tests.oracle.llama import assert_says, continuation, row_of

K = 4
NUM_TOKENS = 18
PROMPTS = ([3, 9, 3, 9, 3, 9, 3], [21, 5, 8, 13, 30, 2])  # the first one is a loop


def even_only(params):
    return np.bool_(bool((params.extra_args or {}).get("even")))


def forbid_odd(logits_BJV, is_wanted_B, context):
    """After an even draft or token only even ids: reads the drafts, as a stateful processor would."""
    import jax.numpy as jnp

    last_B = jnp.take_along_axis(context.history_BC, context.len_B[:, None] - 1, axis=1)
    before_BJ = jnp.concatenate([last_B, context.draft_ids_BK], axis=1)
    is_odd_V = jnp.arange(logits_BJV.shape[2]) % 2 == 1
    is_on_BJ = is_wanted_B[:, None] & (before_BJ % 2 == 0)
    return jnp.where(is_on_BJ[:, :, None] & is_odd_V[None, None], -jnp.inf, logits_BJV)


def halve_repeats(output_token_ids, logits_V):
    """A host processor that depends on the whole answer."""
    for token in set(output_token_ids):
        logits_V[token] -= 0.5 * len(output_token_ids)
    return logits_V


PARAMETERS = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.3},
    "rewarding": {"repetition_penalty": 0.8, "frequency_penalty": -0.4},
    "bias": {"logit_bias": {3: 4.0, 9: -100, 17: 3.5}},
    "allowed": {"allowed_token_ids": [1, 3, 5, 7, 9, 11, 30]},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": list(range(0, VOCAB_SIZE, 3))},
    "device processor": {"extra_args": {"even": True}},
    "host processor": {"logits_processors": [halve_repeats]},
    "all": {
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 2.0},
        "allowed_token_ids": list(range(1, 28)),
        "min_tokens": 9,
        "stop_token_ids": [2, 4, 6],
    },
}
DRAWS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 11}}


def plain(oracle, prompt, params, bad_words_ids=()):
    """The naive loop under the same parameters, up to the token that ends it."""
    stop_ids = params.stop_token_ids or ()

    def edit(logits_V, output):
        x = np.array(logits_V)
        if (params.extra_args or {}).get("even") and [*prompt, *output][-1] % 2 == 0:
            x[1::2] = -np.inf
        for processor in params.logits_processors:
            x = processor(output, x)
        return edited(x, params, prompt, output, bad_words_ids=bad_words_ids, stop_ids=stop_ids)

    answer = continuation(oracle, prompt, params.max_tokens, row_of(params), edit)
    for place, token in enumerate(answer.token_ids):
        if token in stop_ids and place + 1 >= params.min_tokens:
            return answer.cut(place + 1)
    return answer


@pytest.fixture(scope="module")
def engines(target):
    """One that never drafts and one that drafts what it is told, both with the same two processors."""
    processor = LogitsProcessor(even_only, forbid_odd)
    proposer = replay_proposer(K, MAX_MODEL_LEN)
    more = {"logits_processors": [processor], "enable_structured_outputs": True}
    return make_engine(target, **more), make_engine(target, custom(K), proposer=proposer, **more), proposer


def run(engine, params):
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    # A neighbour without any parameter shares every batch.
    prompts.append({"prompt_token_ids": [29, 28, 27]})
    neighbour = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    num_compiled = engine.compiles_after_ready
    outputs = engine.generate(prompts, [params, params, neighbour], use_tqdm=False)
    assert engine.compiles_after_ready == num_compiled
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_means_the_same_with_speculation(name, draw, engines, target_oracle):
    without, with_drafts, proposer = engines
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **PARAMETERS[name] | DRAWS[draw])
    answers = [plain(target_oracle, list(prompt), params) for prompt in PROMPTS]
    bare = dataclasses.replace(params, **{key: getattr(SamplingParams(), key) for key in PARAMETERS[name]})
    unchanged = [plain(target_oracle, list(prompt), bare).token_ids for prompt in PROMPTS]
    assert any(answer.token_ids != ids for answer, ids in zip(answers, unchanged, strict=True)), "it does something"

    neighbour = continuation(target_oracle, [29, 28, 27], NUM_TOKENS)
    for token_ids, answer in zip(run(without, params), [*answers, neighbour], strict=True):
        assert_says(token_ids, answer)
    right = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    wrong = [{at: (ids[at] + 1) % VOCAB_SIZE for at in range(len(ids))} for ids in right]
    bare_drafts = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, unchanged, strict=True)]
    for scripts in (
        [Script(ids) for ids in right],
        [Script(ids, wrong=guess) for ids, guess in zip(right, wrong, strict=True)],
        [
            Script(ids, wrong={at: told[at] for at in range(min(len(ids), len(told)))})
            for ids, told in zip(right, bare_drafts, strict=True)
        ],
    ):
        set_scripts(with_drafts, proposer, scripts)
        for token_ids, answer in zip(run(with_drafts, params), [*answers, neighbour], strict=True):
            assert_says(token_ids, answer)


@pytest.mark.parametrize(
    "speculative", [{"enabled": False}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 2}]
)
def test_a_request_may_draft_less(speculative, engines, target_oracle):
    _, engine, proposer = engines
    answers = [continuation(target_oracle, prompt, NUM_TOKENS) for prompt in PROMPTS]
    set_scripts(engine, proposer, [Script([*p, *a.token_ids]) for p, a in zip(PROMPTS, answers, strict=True)])
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    fewer = dataclasses.replace(params, speculative=speculative)
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    outputs = engine.generate(prompts, [fewer, params], use_tqdm=False)
    for output, answer in zip(outputs, answers, strict=True):
        assert_says(output.outputs[0].token_ids, answer)
    most = [output.metrics.speculative_decoding["acceptance_histogram"] for output in outputs]
    limit = speculative.get("num_speculative_tokens", 0)
    assert sum(most[0][limit + 1 :]) == 0
    assert most[0][limit] > 0 or limit == 0
    assert most[1][K] > 0, "the neighbour drafts as before"


def test_a_failing_host_processor_ends_its_request_alone(engines, target_oracle):
    engine, _, _ = engines

    def fail(output_token_ids, logits_V):
        raise ZeroDivisionError("mine")

    core = engine.core
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    failing = core.add_request(
        "failing", {"prompt_token_ids": [1, 2]}, dataclasses.replace(params, logits_processors=[fail])
    )
    other = core.add_request("other", {"prompt_token_ids": list(PROMPTS[0])}, params)
    while core.has_work:
        core.step()
    assert isinstance(failing.error, ZeroDivisionError)
    assert failing.sequences[0].progress.finish_reason == "abort"
    assert other.error is None
    assert_says(other.sequences[0].progress.token_ids, continuation(target_oracle, PROMPTS[0], NUM_TOKENS))
    with pytest.raises(ZeroDivisionError, match="mine"):
        engine.generate(
            {"prompt_token_ids": [1]}, dataclasses.replace(params, logits_processors=[fail]), use_tqdm=False
        )
    core.scheduler.audit()
    assert core.scheduler.num_used == 0


def test_a_schedule_by_batch_size(engines, target_oracle, monkeypatch):
    _, engine, proposer = engines
    core = engine.core
    answers = [continuation(target_oracle, prompt, NUM_TOKENS) for prompt in PROMPTS]
    set_scripts(engine, proposer, [Script([*p, *a.token_ids]) for p, a in zip(PROMPTS, answers, strict=True)])
    by_batch = core.config.speculative_config.model_copy(
        update={"num_speculative_tokens_per_batch_size": (0, 3, 1, 0)}  # of 0, 1, 2, 3 rows
    )
    config = core.config.model_copy(update={"speculative_config": by_batch})
    monkeypatch.setattr(core, "_drafting", DraftChooser(config, core.parts.programs.shapes, None))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = {"prompt_token_ids": list(PROMPTS[1])}  # so short that three fit one chunk
    for num_rows, most in ((1, 3), (2, 1), (3, 0)):
        outputs = engine.generate([prompt] * num_rows, params, use_tqdm=False)
        for output in outputs:
            assert_says(output.outputs[0].token_ids, answers[1])
            histogram = output.metrics.speculative_decoding["acceptance_histogram"]
            assert sum(histogram[most + 1 :]) == 0
            assert histogram[most] > 0 or most == 0
