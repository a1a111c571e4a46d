"""Host. Shards give back what was written, and are refused when anything in them is not as it must be."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxspec.errors import ConfigError, WeightsError
from jaxspec.train.batches import split, training_batch
from jaxspec.train.data.prompts import read_prompts
from jaxspec.train.data.shards import KINDS, read_corpus, read_shard, write_shard
from jaxspec.train.seen import Seen, row_dtype
from jaxspec.train.vocabulary import commonest_tokens, coverage
from tests.train.conftest import VOCAB, some_records

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(VOCAB, np.uint16), (2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_a_shard_holds_what_was_written(tmp_path, vocab_size, dtype):
    records = some_records(7)
    path = tmp_path / "tokens-00000.npz"
    assert write_shard(path, records, vocab_size=vocab_size, about={"seed": 1}) == sum(
        len(r.token_ids) for r in records
    )
    corpus = read_shard(path, vocab_size)
    assert corpus.token_ids_N.dtype == dtype
    assert len(corpus) == 7
    for index, record in enumerate(records):
        found = corpus[index]
        assert found.token_ids.tolist() == record.token_ids.tolist()
        assert (found.num_prompt, found.kind) == (record.num_prompt, record.kind)
    assert not list(tmp_path.glob("*.partial"))


def test_the_shards_that_ship_are_sound():
    """Of the default model: its own answers to its own questions, of every kind."""
    corpus = read_corpus(ROOT / "data" / "smollm2-135m-instruct", vocab_size=49152)
    assert {corpus[i].kind for i in range(len(corpus))} == set(KINDS)
    starts = {tuple(corpus[i].token_ids[:3].tolist()) for i in range(len(corpus))}
    assert len(starts) == 1  # the template's


def test_shards_join_in_order(corpus_folder):
    corpus = read_corpus(corpus_folder, VOCAB)
    records = [*some_records(12, 0), *some_records(12, 1)]
    assert [corpus[i].token_ids.tolist() for i in range(24)] == [r.token_ids.tolist() for r in records]
    assert len(read_corpus(corpus_folder, VOCAB, max_records=5)) == 5


def arrays():
    header = {"format": "jaxspec-tokens-1", "vocab_size": VOCAB, "about": {}}
    return {
        "token_ids": np.array([1, 2, 3, 4, 5], np.uint16),
        "lengths": np.array([3, 2], np.uint32),
        "prompt_lengths": np.array([1, 2], np.uint32),
        "kinds": np.array([0, 4], np.uint8),
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
    }


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"lengths": np.array([3, 3], np.uint32)}, "add up to 6"),
        ({"lengths": np.array([5, 0], np.uint32)}, "empty"),
        ({"lengths": np.array([3, 1, 1], np.uint32)}, "3 lengths"),
        ({"lengths": np.array([2**32 - 1, 6], np.uint32)}, "add up to 4294967301"),
        ({"lengths": np.array([3, 2], np.int64)}, "unsigned"),
        ({"prompt_lengths": np.array([4, 2], np.uint32)}, "longer prompt"),
        ({"kinds": np.array([0, 5], np.uint8)}, "unknown kind"),
        ({"token_ids": np.array([1, 2, 3, 4, VOCAB], np.uint16)}, "ids up to 32"),
        ({"token_ids": np.array([[1, 2, 3, 4, 5]], np.uint16)}, "row"),
        ({"header": np.frombuffer(b"{}", np.uint8)}, "format"),
        ({"header": np.frombuffer(b"{", np.uint8)}, "format"),
        ({"token_ids": np.array([{}], object)}, "pickle"),
    ],
)
def test_an_unsound_shard_is_refused(tmp_path, changed, says):
    path = tmp_path / "tokens-00000.npz"
    np.savez(path, **(arrays() | changed))
    with pytest.raises(WeightsError, match=says):
        read_shard(path, VOCAB)


def test_a_shard_that_is_cut_off_is_refused(tmp_path):
    whole = tmp_path / "whole.npz"
    np.savez(whole, **arrays())
    assert read_shard(whole).num_tokens == 5
    data = whole.read_bytes()
    for size in range(0, len(data), 37):
        (tmp_path / "cut.npz").write_bytes(data[:size])
        with pytest.raises(WeightsError, match="no token shard"):
            read_shard(tmp_path / "cut.npz")


def test_another_vocabulary_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", **arrays())
    with pytest.raises(WeightsError, match="the model's is 33"):
        read_shard(tmp_path / "a.npz", VOCAB + 1)


def test_an_epoch_has_every_record_once_in_an_order_of_its_own(corpus_folder):
    corpus = read_corpus(corpus_folder, VOCAB)
    parts = split(corpus, 4, None, 16)
    assert len(parts.held_out) == 4
    assert sorted([*parts.train, *parts.held_out]) == list(range(24))
    rows = np.zeros(corpus.num_tokens, row_dtype(2, 1, np.float32))
    rows["best"] = np.arange(corpus.num_tokens)  # where the token is
    middle = int(corpus.starts[12])
    seen = Seen([rows[:middle], rows[middle:]], np.array([0, middle]))
    met = []
    for step in range(10):  # 40 conversations: two epochs of 20
        batch = training_batch(corpus, seen, parts.train, step, 5, (2, 2, 16))
        each = (batch.token_ids_BT.reshape(4, 16), batch.best_BT.reshape(4, 16), batch.len_B.reshape(4))
        for ids, places, length in zip(*each, strict=True):
            met.append(tuple(ids[:length]))
            assert not ids[length:].any()
            assert corpus.token_ids_N[places[:length]].tolist() == ids[:length].tolist()
    wanted = sorted(tuple(corpus[int(i)].token_ids) for i in parts.train)
    assert sorted(met[:20]) == wanted
    assert sorted(met[20:]) == wanted
    assert met[:20] != met[20:]
    taught = training_batch(corpus, seen, parts.train, 0, 5, (2, 2, 16), True)
    assert batch.num_prompt_B.min() > 0
    assert not taught.num_prompt_B.any()


def test_too_few_conversations_are_refused(corpus_folder):
    corpus = read_corpus(corpus_folder, VOCAB)
    with pytest.raises(ConfigError, match="held_out=24"):
        split(corpus, 24, None, 16)


def test_the_commonest_tokens_are_those_of_answers(corpus_folder):
    corpus = read_corpus(corpus_folder, VOCAB)
    records = np.arange(len(corpus))
    counts = [0] * VOCAB
    for index in records:
        for token_id in corpus[int(index)].token_ids[corpus[int(index)].num_prompt :]:
            counts[token_id] += 1
    wanted = sorted(sorted(range(VOCAB), key=lambda token_id: (-counts[token_id], token_id))[:9])
    found = commonest_tokens(corpus, records, 9, VOCAB)
    assert found.tolist() == wanted
    share = sum(counts[token_id] for token_id in wanted) / sum(counts)
    assert coverage(corpus, records, found, VOCAB) == pytest.approx(share)


@pytest.mark.parametrize("line", ["{", "[]", '{"messages": []}', '{"messages": [1], "kind": "poem"}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match="jsonl:3"):
        read_prompts(path)
