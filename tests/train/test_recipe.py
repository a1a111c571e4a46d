"""Host. What the recipe asks and keeps, by a model whose every word is known; and whole corpora of a tiny model."""

import numpy as np
import pytest

from jaxspec.errors import ConfigError
from jaxspec.train.data.kinds import BEGINNINGS
from jaxspec.train.data.recipe import DataConfig, make_corpus, make_records
from jaxspec.train.data.shards import read_shard, shard_paths
from tests.oracle.folders import add_tokenizer, write_llama
from tests.serve.fake import letter_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz ?!:\n.#ABCDEFGHIJKLMNOPQRSTUVWXYZ'`,;-+0123456789\x02"
SAID = "so it is written, and it goes on for a while longer."


class Writer:
    """Says SAID whatever it is asked, and remembers who asked what."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, []

    def __call__(self, prompts, params):
        self.calls.append([(self.tokenizer.decode(ids), one) for ids, one in zip(prompts, params, strict=True)])
        return [self.tokenizer.encode(SAID)[: one.max_tokens] for one in params]


def make(**keys):
    tokenizer = letter_tokenizer(LETTERS)
    config = DataConfig(model="m", output="o", records_per_shard=40, **keys)
    writer = Writer(tokenizer)
    return make_records(config, 3, tokenizer, writer), writer, tokenizer


def test_the_model_asks_then_answers_then_works_on_its_answers():
    records, writer, tokenizer = make(seed=2)
    questions, answers, later = writer.calls
    kinds = [record.kind for record in records]
    assert len(records) == 40
    assert set(kinds) == {"chat", "code", "json", "editing", "summary"}
    assert kinds == sorted(kinds, key=lambda kind: kind in ("editing", "summary"))
    asked = []
    for text, params in questions:
        assert text.startswith("user:")
        assert params.max_tokens == 96
        assert any(text == "user:" + words for kind in BEGINNINGS for words in BEGINNINGS[kind])
        asked.append(f"{text}{SAID}\nassistant:")
    assert [text for text, _ in answers] == asked
    assert {params.temperature for _, params in answers} == {0.0, 0.7, 1.0}
    for text, _ in later:
        assert text.startswith("user:")
        assert text.endswith(f"\n\n{SAID}\nassistant:")
    for record, (text, _) in zip(records, answers + later, strict=True):
        assert tokenizer.decode(record.token_ids[: record.num_prompt].tolist()) == text
        assert tokenizer.decode(record.token_ids[record.num_prompt :].tolist()) == SAID
    seeds = [params.seed for call in writer.calls for _, params in call]
    assert len(set(seeds)) == len(seeds)


def test_a_shard_follows_from_seed_and_number():
    (first, *_), (again, *_), (other, *_) = make(seed=2), make(seed=2), make(seed=3)
    assert [r.token_ids.tolist() for r in first] == [r.token_ids.tolist() for r in again]
    assert [r.token_ids.tolist() for r in first] != [r.token_ids.tolist() for r in other]


def test_a_question_that_does_not_end_is_cut_after_a_sentence():
    short, writer, _ = make(seed=2, max_question_tokens=20, kinds={"chat": 1.0})
    assert all(params.max_tokens == 20 for _, params in writer.calls[0])
    assert (short, len(writer.calls)) == ([], 1)  # SAID's first 20 letters hold no end
    records, writer, _ = make(seed=2, max_question_tokens=len(SAID), kinds={"chat": 1.0})
    assert len(records) == 40
    assert all(text.endswith(f"{SAID}\nassistant:") for text, _ in writer.calls[1])


def test_prompts_of_a_file_are_taken_in_order():
    tokenizer = letter_tokenizer(LETTERS)
    config = DataConfig(model="m", output="o", records_per_shard=2, temperatures=(0.0,), max_answer_tokens=5)
    asked = (("chat", "a"), ("json", "b"), ("code", "c"))
    given = [(kind, [{"role": "user", "content": word}]) for kind, word in asked]
    writer = Writer(tokenizer)
    records = make_records(config, 1, tokenizer, writer, given)
    assert [text for text, _ in writer.calls[0]] == ["user:c\nassistant:", "user:a\nassistant:"]
    lengths = [(record.kind, len(record.token_ids) - record.num_prompt) for record in records]
    assert lengths == [("code", 5), ("chat", 5)]


@pytest.mark.parametrize("kinds", [{"poem": 1.0}, {}, {"chat": 0.0}, {"chat": -1.0, "code": 2.0}])
def test_kinds_that_cannot_be_are_refused(kinds):
    with pytest.raises(ConfigError, match="kinds"):
        DataConfig(model="m", output="o", kinds=kinds)


@pytest.mark.heavy
def test_a_corpus_goes_on_where_it_stopped_and_a_lost_shard_comes_back(tmp_path):
    model = add_tokenizer(write_llama(tmp_path / "model", seed=1, vocab_size=len(LETTERS), max_position_embeddings=512),
                          LETTERS)  # fmt: skip
    keys = {
        "model": str(model), "records_per_shard": 6, "max_num_seqs": 4, "max_question_tokens": 8, "dtype": "float32",
        "max_answer_tokens": 12, "max_text_tokens": 8,
    }  # fmt: skip
    whole, parted = (DataConfig(output=str(tmp_path / name), num_tokens=700, **keys) for name in ("whole", "parted"))
    assert make_corpus(whole, show_progress=False) >= 700
    make_corpus(parted.model_copy(update={"num_tokens": 1}), show_progress=False)
    assert len(shard_paths(tmp_path / "parted")) == 1
    make_corpus(parted, show_progress=False)
    (tmp_path / "parted" / "tokens-00000.npz").unlink()
    make_corpus(parted, show_progress=False)
    names = [path.name for path in shard_paths(tmp_path / "whole")]
    assert len(names) > 1
    assert names == [path.name for path in shard_paths(tmp_path / "parted")]
    for name in names:
        one, other = (read_shard(tmp_path / folder / name) for folder in ("whole", "parted"))
        assert np.array_equal(one.token_ids_N, other.token_ids_N)
        assert np.array_equal(one.starts, other.starts)
