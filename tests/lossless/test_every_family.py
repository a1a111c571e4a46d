"""Device. Every method on every family, through the engine: what is said is what plain decoding says, greedy and
sampled, whoever guesses. Drafters have the published layouts, shaped for the target, and random weights, so that what
they say is rarely kept; one that knows the answer sees to it that some is."""

import pytest

from jaxspec import ConfigError, SamplingParams
from jaxspec.config.methods import METHODS, drafter_of
from jaxspec.weights.checkpoint import open_checkpoint
from tests.contracts.members import FAMILY_MEMBERS
from tests.lossless.engines import custom, make_engine, make_parts
from tests.lossless.in_turns import in_turns
from tests.lossless.replay import Script, make_table, replay_proposer
from tests.oracle import head_folders
from tests.oracle.folders import DRAFTERS, TINY, write_llama
from tests.oracle.goldens import read_golden
from tests.oracle.head_folders import edit_config

K, MAX_MODEL_LEN = 2, 40
SIZES = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 3, "max_num_batched_tokens": 8, "num_pages": 40}


def write_parallel_model(folder, vocab_size):
    return edit_config(write_llama(folder, seed=1, vocab_size=vocab_size, num_layers=1), pard_token=vocab_size - 1)


# method: writes a drafter's folder for a target of V tokens and width D
WRITERS = {
    "draft_model": lambda folder, V, D: write_llama(folder, seed=1, vocab_size=V, num_layers=1),
    "pard": lambda folder, V, D: write_parallel_model(folder, V),
    "eagle": lambda folder, V, D: head_folders.write_eagle(folder, "eagle", vocab_size=V, hidden_size=D),
    "eagle3": lambda folder, V, D: head_folders.write_eagle(
        folder, "eagle3", vocab_size=V, hidden_size=D, draft_vocab_size=V // 2
    ),
    "p_eagle": lambda folder, V, D: head_folders.write_eagle(
        folder, "eagle3", vocab_size=V, hidden_size=D, draft_vocab_size=V // 2, mask_token_id=V - 1
    ),
    "medusa": lambda folder, V, D: head_folders.write_medusa(folder, vocab_size=V, hidden_size=D),
    "mlp_speculator": lambda folder, V, D: head_folders.write_mlp_speculator(folder, vocab_size=V, hidden_size=D),
    "dflash": lambda folder, V, D: head_folders.write_dflash(
        folder, vocab_size=V, hidden_size=D, mask_token_id=V - 1
    ),
    "dspark": lambda folder, V, D: head_folders.write_dflash(
        folder, vocab_size=V, hidden_size=D, mask_token_id=V - 1, markov="vanilla"
    ),
}  # fmt: skip
ALL = ("mtp", *WRITERS)
# test_families.py has the first two on every family; suffix is below; "custom" is the one that knows the answer.
ELSEWHERE = ("ngram", "self", "suffix", "custom")


def test_no_method_is_forgotten():
    assert {drafter_of(name) for name in METHODS} - {"model"} == {*ALL, *ELSEWHERE}


def ask(engine, family):
    """A greedy and a sampled row that draft, and the sampled one without drafts, over the recorded prompt."""
    expected = read_golden(family)
    prompt, length = expected["input_ids"][0].tolist(), len(expected["greedy_tokens"])
    common = {"max_tokens": min(length, MAX_MODEL_LEN - len(prompt)), "ignore_eos": True}
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 3} | common
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(**sampled),
        SamplingParams(**sampled, speculative={"enabled": False}),
    ]
    outputs = engine.generate([{"prompt_token_ids": prompt}] * 3, params, use_tqdm=False)
    greedy, drawn, plain = (output.outputs[0].token_ids for output in outputs)
    assert greedy == expected["greedy_tokens"].tolist()[: len(greedy)]
    assert drawn == plain
    assert [sum(output.metrics.speculative_decoding["acceptance_histogram"]) > 0 for output in outputs[1:]] == [
        True,
        False,
    ]
    return prompt, [greedy, plain]


SOME = ("medusa", "dspark", "mtp")


@pytest.mark.parametrize(
    ("family", "methods"),
    [
        pytest.param("gpt2", SOME, id="gpt2, some"),
        *(pytest.param(family, ALL, id=family, marks=pytest.mark.heavy) for family in FAMILY_MEMBERS),
    ],
)
def test_whoever_guesses_on_the_device(family, methods, tmp_path):
    """Each drafter is found, loaded and made by its own config; then all take turns in one engine's rounds."""
    with open_checkpoint(TINY / family) as checkpoint:
        V, D = checkpoint.config.vocab_size, checkpoint.config.hidden_size
    configs = {}
    for method in methods:
        configs[method] = {"method": method, "num_speculative_tokens": K}
        if method in WRITERS:
            configs[method]["model"] = str(WRITERS[method](tmp_path / method, V, D))
    if (family, "mtp") not in DRAFTERS:
        with pytest.raises(ConfigError, match=r"method 'mtp' was asked for, but .* holds no MTP modules"):
            make_parts(TINY / family, configs.pop("mtp"), **SIZES)
    parts = {method: make_parts(TINY / family, config, **SIZES) for method, config in configs.items()}
    proposers = [one.proposer for one in parts.values()] + [replay_proposer(K, MAX_MODEL_LEN)]
    weights = [one.weights.get("draft") for one in parts.values()] + [None]
    proposer = in_turns(proposers, weights, D)
    engine = make_engine(TINY / family, custom(K), proposer=proposer, **SIZES)
    prompt, answers = ask(engine, family)
    core = engine.core
    table = make_table([Script(prompt + answer) for answer in answers], MAX_MODEL_LEN)
    turns = core.state.proposer
    core.state = core.state.replace(proposer=turns.replace(states=[*turns.states[:-1], table]))
    assert ask(engine, family)[1] == answers
    drafted = dict(zip([*parts, "custom"], core.state.proposer.drafted_n.tolist(), strict=True))
    assert all(drafted.values()), drafted


@pytest.mark.heavy
@pytest.mark.parametrize("family", FAMILY_MEMBERS)
def test_whoever_guesses_on_the_host(family):
    ask(make_engine(TINY / family, {"method": "suffix", "num_speculative_tokens": K}, **SIZES), family)
