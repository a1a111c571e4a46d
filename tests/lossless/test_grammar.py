"""Device. T10 and B4: a grammar says the same with speculation, at each of a block's positions, whatever is drafted."""

import dataclasses

import numpy as np
import pytest

from jaxspec import RequestError, SamplingParams
from tests.lossless.engines import MAX_MODEL_LEN, VOCAB_SIZE, custom, make_engine
from tests.lossless.replay import HostReplay, Script, replay_proposer, set_scripts
from tests.oracle.automata import (
    AUTOMATA,
    CHOICE,
    EOS,
    LETTERS,
    LOOP,
    MARKER,
    MARKER_TEXT,
    NESTED,
    OPEN,
    add_byte_level_tokenizer,
    ids,
)
from tests.oracle.folders import write_llama
from tests.oracle.llama import Answer, NumpyLlama, assert_says, continuation, row_of

K = 4
NUM_TOKENS = 16
EOS_IDS = (EOS, 30)  # the second is none of the tokenizer's
PROMPTS = ([3, 9, 3, 9, 3, 9, 3], [21, 5, 8, 13, 30, 2])
NEIGHBOUR = [29, 28, 27]
DRAWS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.2, "top_p": 0.95, "seed": 11}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grammar") / "model"
    return add_byte_level_tokenizer(write_llama(folder, seed=4, vocab_size=VOCAB_SIZE, eos_token_id=list(EOS_IDS)))


@pytest.fixture(scope="module")
def oracle(folder):
    return NumpyLlama(folder)


@pytest.fixture(scope="module")
def device(folder):
    proposer = replay_proposer(K, MAX_MODEL_LEN)
    return make_engine(folder, custom(K), proposer=proposer, enable_structured_outputs=True), proposer


@pytest.fixture(scope="module")
def host(folder):
    proposer = HostReplay(K)
    return make_engine(folder, custom(K), proposer=proposer, enable_structured_outputs=True), proposer


def constrained(automaton, **params):
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "structured_outputs": dict(automaton.constraint)} | params)


def plain(oracle, prompt, automaton, params, choice=0, begins_after=None):
    """The naive loop under the automaton, to the token that ends it."""
    stop_ids = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(EOS_IDS))

    def constrained_text(output):
        if begins_after is None:
            return output
        return output[output.index(begins_after) + 1 :] if begins_after in output else None

    ids_, leads = [], []
    while len(ids_) < params.max_tokens:
        text = constrained_text(ids_)
        allowed = set(range(VOCAB_SIZE)) if text is None else automaton.allowed(text, EOS_IDS, params.ignore_eos)
        if len(ids_) < params.min_tokens:
            allowed -= stop_ids
        is_allowed_V = np.isin(np.arange(VOCAB_SIZE), sorted(allowed))
        keep = lambda logits_V, _: np.where(is_allowed_V, logits_V, -np.inf)  # noqa: B023, E731
        one = continuation(oracle, [*prompt, *ids_], 1, row_of(params, choice), keep)
        ids_ += one.token_ids
        leads += one.leads
        text = constrained_text(ids_)
        is_closed = text is not None and (automaton.is_complete(text) or (bool(text) and text[-1] in EOS_IDS))
        if is_closed or (ids_[-1] in stop_ids and len(ids_) >= params.min_tokens):
            break
    return Answer(ids_, leads)


def check_states(core, automata):
    """Each running answer's grammar stands where a replay of its committed tokens does."""
    for request, sequence in core._sequences.values():
        automaton = automata.get(request.request_id)
        if automaton is not None:
            mask_JU = np.full((1, 1), 0xFFFFFFFF, np.uint32)
            sequence.progress.grammar.fill_masks([], mask_JU)
            allowed = automaton.allowed(sequence.progress.token_ids, EOS_IDS, request.params.ignore_eos)
            assert {v for v in range(VOCAB_SIZE) if mask_JU[0, 0] >> v & 1} == allowed


def run(replay, scripts, requests):
    """requests: (prompt, params, automaton); every state checked after every step."""
    engine, proposer = replay
    set_scripts(engine, proposer, scripts)
    core, automata, added = engine.core, {}, []
    num_compiled = engine.compiles_after_ready
    for index, (prompt, params, automaton) in enumerate(requests):
        automata[str(index)] = automaton
        added.append(core.add_request(str(index), {"prompt_token_ids": list(prompt)}, params))
    while core.has_work:
        core.step()
        check_states(core, automata)
    core.scheduler.audit()
    assert core.scheduler.num_used == 0
    assert engine.compiles_after_ready == num_compiled
    assert [request.error for request in added] == [None] * len(added)
    return [request.output() for request in added]


def junk_after(token_ids):
    return [*token_ids, *[(token + 3) % VOCAB_SIZE for token in token_ids[-6:]]]


def drafters(answers, prompts, automata, oracle):
    """{name: scripts}: right and on past the end; never legal; legal but another letter; unmasked; short."""
    scripts = {name: [] for name in ("right", "illegal", "legal", "unconstrained", "short", "end")}
    for answer, prompt, automaton in zip(answers, prompts, automata, strict=True):
        known, start = junk_after([*prompt, *answer.token_ids]), len(prompt)
        illegal, legal, ends = {}, {}, {}
        for place in range(len(answer.token_ids)):
            allowed = automaton.allowed(answer.token_ids[:place], EOS_IDS)
            others = sorted(allowed - {answer.token_ids[place]})
            illegal[start + place] = next(v for v in (place % 32, 25, EOS, 30) if v not in allowed)
            legal[start + place] = others[place % len(others)] if others else answer.token_ids[place]
            ends[start + place] = EOS_IDS[place % 2]
        scripts["right"].append(Script(known))
        scripts["illegal"].append(Script(known, wrong=illegal))
        scripts["legal"].append(Script(known, wrong=legal))
        scripts["end"].append(Script(known, wrong={at: eos for at, eos in ends.items() if at % 3 == 0}))
        free = continuation(oracle, list(prompt), NUM_TOKENS).token_ids
        told = {start + place: free[place] for place in range(len(answer.token_ids))}
        scripts["unconstrained"].append(Script(known, wrong=told))
        scripts["short"].append(Script(known, num_drafts={at: at % 3 for at in range(start, len(known))}))
    return scripts


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", AUTOMATA)
def test_text_is_plain_decodings_whoever_drafts(name, draw, device, oracle):
    """Two grammars in one batch, neither in row 0, where an answer without one goes on as ever."""
    automata = [AUTOMATA[name], LOOP if name != "loop" else OPEN]
    params = [constrained(automaton, **DRAWS[draw]) for automaton in automata]
    answers = [plain(oracle, *case) for case in zip(PROMPTS, automata, params, strict=True)]
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        assert answer.token_ids != continuation(oracle, list(prompt), len(answer.token_ids)).token_ids
    free = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **DRAWS[draw])
    neighbour = continuation(oracle, NEIGHBOUR, NUM_TOKENS, row_of(free))

    requests = [(NEIGHBOUR, free, None), *zip(PROMPTS, params, automata, strict=True)]
    accepted = {}
    for drafter, scripts in {"none": [], **drafters(answers, PROMPTS, automata, oracle)}.items():
        known = [Script([*NEIGHBOUR, *neighbour.token_ids])] if scripts else []
        outputs = run(device, [*scripts, *known], requests)
        for output, answer, automaton in zip(outputs, [neighbour, *answers], [None, *automata], strict=True):
            completion = output.outputs[0]
            assert_says(completion.token_ids, answer)
            if automaton is not None:
                text = [v for v in answer.token_ids if v not in EOS_IDS]
                is_whole = automaton.is_complete(text) or len(text) < len(answer.token_ids)
                assert completion.finish_reason == ("stop" if is_whole else "length")
                assert completion.text == "".join(LETTERS[v] for v in text)
        figures = [output.metrics.speculative_decoding for output in outputs[1:]]
        accepted[drafter] = sum(one["num_accepted_draft_tokens"] for one in figures)
        assert (sum(one["num_draft_tokens"] for one in figures) > 0) == (drafter != "none")
    assert accepted["right"] > accepted["short"] > 0
    assert accepted["illegal"] == 0


@pytest.mark.parametrize(
    ("where", "offset"), [*[("device", offset) for offset in range(K + 1)], ("host", 0), ("host", 2), ("host", K)]
)
def test_an_end_at_each_offset_of_a_block(where, offset, request, oracle):
    """The closing letter, or EOS where the text may go on, with drafts beyond it."""
    replay = request.getfixturevalue(where)
    automata = (NESTED, CHOICE, OPEN)
    prompts = (*PROMPTS, [7, 7])
    params = [
        constrained(one, temperature=0, max_tokens=30, logit_bias={EOS: 3.0} if one is OPEN else None)
        for one in automata
    ]
    answers, scripts = [], []
    for prompt, one, automaton in zip(prompts, params, automata, strict=True):
        # The bias only brings the end nearer: of three answers one ends by EOS.
        biased = lambda ids: oracle.next_logits(ids) + (np.arange(VOCAB_SIZE) == EOS) * 3.0  # noqa: E731
        source = dataclasses.make_dataclass("Biased", ["next_logits"])(biased) if automaton is OPEN else oracle
        answer = plain(source, prompt, automaton, one)
        assert len(answer.token_ids) < 30
        anchor = len(prompt) + len(answer.token_ids) - 1 - offset
        answers.append(answer)
        scripts.append(
            Script(junk_after([*prompt, *answer.token_ids]), num_drafts=dict.fromkeys(range(len(prompt), anchor), 0))
        )
    assert answers[2].token_ids[-1] in EOS_IDS
    outputs = run(replay, scripts, list(zip(prompts, params, automata, strict=True)))
    for output, answer in zip(outputs, answers, strict=True):
        assert_says(output.outputs[0].token_ids, answer)
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


LIMITS = {
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 12},
    "min_tokens, EOS ignored": {"min_tokens": 14, "ignore_eos": True},
    "stop id": {"stop_token_ids": ids("hj0d")},
    "stop id, min_tokens": {"stop_token_ids": ids("j"), "min_tokens": 6},
    "cut": {"max_tokens": 5},
}


@pytest.mark.parametrize("name", LIMITS)
def test_what_else_ends_an_answer(name, device, oracle):
    """A text that cannot go on ends whatever min_tokens and ignore_eos say; one that can goes on until they are met."""
    automata, prompts = (OPEN, CHOICE, NESTED), ([5, 8, 2], *PROMPTS)
    params = [constrained(automaton, temperature=0, **LIMITS[name]) for automaton in automata]
    answers = [plain(oracle, *case) for case in zip(prompts, automata, params, strict=True)]
    scripts = drafters(answers, prompts, automata, oracle)
    for drafter in ("right", "illegal", "end"):
        outputs = run(device, scripts[drafter], list(zip(prompts, params, automata, strict=True)))
        for output, answer, one in zip(outputs, answers, params, strict=True):
            completion = output.outputs[0]
            assert_says(completion.token_ids, answer)
            last = answer.token_ids[-1]
            assert completion.stop_reason == (last if last in (one.stop_token_ids or ()) else None)
            assert (completion.finish_reason == "length") == (
                completion.stop_reason is None
                and len(answer.token_ids) == one.max_tokens
                and last not in EOS_IDS
                and not any(automaton.is_complete(answer.token_ids) for automaton in automata)
            )


def test_a_stop_string_cuts_a_constrained_text(device, oracle):
    params = constrained(NESTED, temperature=0)
    answer = plain(oracle, PROMPTS[0], NESTED, params)
    text = "".join(LETTERS[v] for v in answer.token_ids)
    params = dataclasses.replace(params, stop='a"')
    (output,) = run(device, [Script([*PROMPTS[0], *answer.token_ids])], [(PROMPTS[0], params, NESTED)])
    assert output.outputs[0].text == text[: text.index('a"')] == '{"'
    assert output.outputs[0].stop_reason == 'a"'


def test_each_of_n_answers_has_its_own_state(device, oracle):
    params = constrained(LOOP, n=3, temperature=1.3, seed=5)
    answers = [plain(oracle, PROMPTS[0], LOOP, params, choice) for choice in range(3)]
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    scripts = [Script(junk_after([*PROMPTS[0], *answer.token_ids])) for answer in answers]
    (output,) = run(device, scripts, [(PROMPTS[0], params, LOOP)])
    for completion, answer in zip(output.outputs, answers, strict=True):
        assert_says(completion.token_ids, answer)


@pytest.fixture(scope="module")
def reasoners(oracle):
    """(prompt, answer, where it says the marker), the text after it constrained."""
    rng, found = np.random.default_rng(1), []
    params = constrained(LOOP, temperature=0, max_tokens=24, ignore_eos=True)
    while len(found) < 3:
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(2, 12)).tolist()
        free = continuation(oracle, prompt, 24).token_ids
        if MARKER in free[K + 1 : 16]:
            answer = plain(oracle, prompt, LOOP, params, begins_after=MARKER)
            if MARKER in answer.token_ids[K + 1 : 16] and min(answer.leads) > 1e-3:
                found.append((prompt, answer, answer.token_ids.index(MARKER)))
    return found, params


@pytest.mark.parametrize("offset", range(K + 1))
def test_a_mask_begins_straight_after_the_marker_at_each_offset_of_a_block(offset, device, reasoners, oracle):
    cases, params = reasoners
    constraint = {**LOOP.constraint, "reasoning_end_str": MARKER_TEXT}
    params = dataclasses.replace(params, structured_outputs=constraint)
    right, wrong = [], []
    for prompt, answer, at in cases:
        known, marker = [*prompt, *answer.token_ids], len(prompt) + at
        single = dict.fromkeys(range(len(prompt), marker - offset), 0)
        right.append(Script(known, num_drafts=single))
        # What the model would have said next without a grammar: forbidden only from after the marker on.
        free = continuation(oracle, known[: marker + 1], K).token_ids
        wrong.append(Script(known, wrong={marker + 1 + i: token for i, token in enumerate(free)}, num_drafts=single))
    for scripts in (right, wrong):
        outputs = run(device, scripts, [(prompt, params, None) for prompt, _, _ in cases])
        for output, (_, answer, _) in zip(outputs, cases, strict=True):
            assert_says(output.outputs[0].token_ids, answer)


def test_an_aborted_answer_leaves_nothing_behind(device, oracle):
    engine, proposer = device
    params = constrained(LOOP, temperature=0)
    answer = plain(oracle, PROMPTS[0], LOOP, params)
    set_scripts(engine, proposer, [Script([*PROMPTS[0], *answer.token_ids])])
    core = engine.core
    gone = core.add_request("gone", {"prompt_token_ids": PROMPTS[0]}, dataclasses.replace(params, n=2))
    stays = core.add_request("stays", {"prompt_token_ids": PROMPTS[0]}, params)
    while not gone.sequences[0].progress.token_ids:
        core.step()
    core.abort("gone")
    while core.has_work:
        core.step()
    assert gone.error is None
    assert_says(stays.sequences[0].progress.token_ids, answer)
    (output,) = run(device, [], [(PROMPTS[0], params, LOOP)])
    assert_says(output.outputs[0].token_ids, answer)


@pytest.mark.parametrize("where", ["device", "host"])
def test_parameters_that_leave_no_token_end_their_request_alone(where, request, oracle):
    engine, proposer = request.getfixturevalue(where)
    set_scripts(engine, proposer, [])
    good = constrained(CHOICE, temperature=0, allowed_token_ids=ids("abc"), logit_bias={ids("a")[0]: 50})
    bad = dataclasses.replace(good, allowed_token_ids=ids("ad"))  # after "ad" comes "g", which is not allowed
    core = engine.core
    failing = core.add_request("failing", {"prompt_token_ids": PROMPTS[1]}, bad)
    other = core.add_request("other", {"prompt_token_ids": PROMPTS[0]}, constrained(OPEN, temperature=0))
    while core.has_work:
        core.step()
    assert isinstance(failing.error, RequestError)
    assert "left no token" in str(failing.error)
    assert failing.error.param == "structured_outputs"
    assert failing.sequences[0].progress.finish_reason == "abort"
    assert_says(other.sequences[0].progress.token_ids, plain(oracle, PROMPTS[0], OPEN, other.params))
    assert core.scheduler.num_used == 0
    if where == "host":
        assert sorted(proposer.finished[-2:]) == ["failing-0", "other-0"], "each told once"
    with pytest.raises(RequestError, match="left no token"):
        engine.generate({"prompt_token_ids": PROMPTS[1]}, bad, use_tqdm=False)
    (output,) = engine.generate({"prompt_token_ids": PROMPTS[1]}, good, use_tqdm=False)
    assert output.outputs[0].text == "abc"


def test_a_refused_grammar_is_not_queued(device):
    engine, _ = device
    bad = constrained(OPEN, structured_outputs={"regex": "("})
    with pytest.raises(RequestError, match="cannot be compiled") as caught:
        engine.generate([{"prompt_token_ids": [1]}] * 2, [constrained(OPEN), bad], use_tqdm=False)
    assert caught.value.param == "structured_outputs"
    assert not engine.core.has_work
