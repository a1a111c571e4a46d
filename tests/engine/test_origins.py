"""Host. Each token of an answer says where it came from, and the pieces are the answer, whatever ends it."""

import numpy as np
import pytest

from jaxspec.engine.commit import Progress
from jaxspec.engine.request import Request, Sequence
from jaxspec.metrics.acceptance import AcceptanceStats
from jaxspec.sampling.params import SamplingParams
from jaxspec.scheduler.request import SequenceState
from jaxspec.text.detokenizer import IncrementalDetokenizer
from tests.serve.fake import ids, letter_tokenizer

# (drafted, accepted, the block's letters, their origins)
ROUNDS = [
    (0, 0, "a", ["plain"]),
    (3, 3, "bcde", ["accepted"] * 3 + ["bonus"]),
    (3, 1, "fg", ["accepted", "recovered"]),
    (2, 0, "h", ["recovered"]),
]


def sequence(**params):
    params = SamplingParams(max_tokens=20, **params)
    progress = Progress(params, frozenset(), 20, IncrementalDetokenizer(letter_tokenizer(), ids("x")))
    state = SequenceState("r-0", 1, 21)
    return Sequence(0, state, progress, np.zeros(2, np.uint32), AcceptanceStats(3))


def run(one):
    request = Request("r", None, ids("x"), one.progress.params, [one])
    pieces = []
    for drafted, accepted, block, _ in ROUNDS:
        if not one.is_finished:
            one.commit(ids(block), drafted, accepted)
            output = request.output().outputs[0]
            assert "".join(piece.text for piece in output.pieces_delta) == output.text_delta
            assert [piece.token_id for piece in output.pieces_delta] == output.token_ids_delta
            pieces += output.pieces_delta
    assert request.output().outputs[0].pieces_delta == []
    return pieces


def test_origins_of_a_round():
    one = sequence()
    pieces = run(one)
    assert [piece.origin for piece in pieces] == [origin for *_, origins in ROUNDS for origin in origins]
    assert [piece.text for piece in pieces] == list("abcdefgh")


@pytest.mark.parametrize(("stop", "texts"), [("c", ["a", "b", ""]), ("de", ["a", "b", "c", "", ""])])
def test_a_stop_string_cuts_pieces_and_text_alike(stop, texts):
    one = sequence(stop=stop)
    pieces = run(one)
    assert [piece.text for piece in pieces] == texts
    assert "".join(texts) == one.progress.text
    assert [piece.token_id for piece in pieces] == one.progress.token_ids
