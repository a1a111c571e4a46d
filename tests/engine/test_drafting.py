"""Host. The number of drafts over time: made-up costs, made-up text, no engine."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxspec.engine.drafting import EXPLORE, DraftChooser, Row
from jaxspec.step.costs import RoundCosts, settled, timed_drafts
from jaxspec.step.programs import Shapes

K, WIDTHS = 8, (0, 2, 8)
COSTS = RoundCosts((64, 1024), WIDTHS, {rows: np.array([[1.0, 1.2, 1.8], [2.0, 3.0, 6.0]]) for rows in (1, 4)})


def chooser(*, weighs=False, on_host=False, schedule=None, costs=COSTS):
    shapes = Shapes(
        batch_rows=(1, 4), split_rows=(), chunk_tokens=(16,), pages_per_row=8, max_rows=4, max_model_len=64,
        max_rounds=1, num_host_drafts=K if on_host else 0, widths=() if on_host else (WIDTHS, WIDTHS),
        num_weighed=K if weighs else 0,
    )  # fmt: skip
    speculative = SimpleNamespace(num_speculative_tokens_per_batch_size=schedule)
    return DraftChooser(SimpleNamespace(speculative_config=speculative, num_speculative_tokens=K), shapes, costs)


def row(name="a", length=20, most=None):
    return Row(name, length, most)


def run(chooser, rounds, keeps, names=("a",), most=None):
    """(drafts a round, its seconds) of rounds in which every row keeps `keeps` of the drafts it is given."""
    drafted = []
    bucket = 1 if len(names) == 1 else 4
    for _ in range(rounds):
        choice = chooser.choose([row(name, most=most) for name in names], bucket)
        count = choice.max_drafts if most is None else min(choice.max_drafts, most)
        for name in names:
            chooser.observe(name, count, min(count, keeps))
        chooser.end_round(choice)
        drafted.append(count)
    return drafted


def seconds_of(drafted):
    return sum(float(COSTS.of(1, 20)[count]) for count in drafted)


def test_a_new_engine_tries_and_text_that_is_kept_whole_gets_all_drafts():
    assert run(chooser(), 30, keeps=K)[-10:] == [K] * 10


def test_text_of_which_nothing_is_kept_costs_a_small_share():
    drafted = run(chooser(), 2000, keeps=0)
    assert drafted[-200:].count(0) > 150
    late = drafted[100:]
    assert seconds_of(late) <= len(late) * (1 + EXPLORE) + 0.5
    assert sum(late) > 0, "it goes on looking"
    assert max(late) <= WIDTHS[1], "with few drafts"


def test_text_that_turns_predictable_is_found_again():
    chooser_ = chooser()
    run(chooser_, 300, keeps=0)
    assert run(chooser_, 60, keeps=K)[-20:] == [K] * 20


def test_two_of_eight_kept_gets_a_few_drafts():
    late = run(chooser(), 200, keeps=2)[-50:]
    assert np.mean(late) < 4
    assert min(late) >= 2


def test_a_request_s_own_limit_is_kept_to():
    assert max(run(chooser(), 50, keeps=K, most=3)) == 3
    assert run(chooser(), 50, keeps=K, most=0) == [0] * 50


def test_rows_are_told_apart_and_forgotten():
    chooser_ = chooser(weighs=True)
    for _ in range(20):
        chooser_.observe("good", K, K)
        chooser_.observe("bad", K, 0)
    survival_BK = chooser_.choose([row("good"), row("bad"), row("new")], 4).survival
    assert survival_BK[0, -1] > 0.5 > 0.2 > survival_BK[1, 0]
    assert survival_BK[0, 0] > survival_BK[2, 0] > survival_BK[1, 0]
    chooser_.forget("bad")
    assert chooser_.choose([row("bad")], 1).survival[0] == pytest.approx(survival_BK[2])


def test_a_round_that_weighs_is_told_what_each_width_costs_at_its_context():
    choice = chooser(weighs=True).choose([row(length=20), row("b", length=544)], 4)
    assert choice.max_drafts == K
    assert choice.seconds.tolist() == pytest.approx([1.5, 2.1, 3.9])  # half way between the contexts


def test_a_round_that_weighs_looks_around_when_it_can_afford_to():
    chooser_ = chooser(weighs=True)
    rounds = 0
    while (choice := chooser_.choose([row()], 1)).seconds[0] <= 1.0:
        chooser_.observe("a", 0, 0)
        chooser_.end_round(choice)
        rounds += 1
    assert rounds == pytest.approx(0.2 / EXPLORE, abs=1)  # what a round of the narrowest width costs more
    chooser_.observe("a", 2, 0)  # it did not pay
    chooser_.end_round(choice)
    assert chooser_.choose([row()], 1).seconds[0] == 1.0


def test_a_round_that_one_row_drafts_in_is_paid_for_by_all():
    """A round of the widest kind with one useful draft among four rows takes 1.8 for 5 tokens: 0.55 too much."""
    chooser_ = chooser(weighs=True)
    rows = [row(name) for name in "abcd"]
    for _ in range(40):
        choice = chooser_.choose(rows, 4)
        for name in "abcd":
            chooser_.observe(name, 0, 0)
        chooser_.end_round(choice)
    choice = chooser_.choose(rows, 4)
    assert choice.seconds[0] > 1.0
    before = chooser_._credit
    for name, drafted in (("a", 5), ("b", 0), ("c", 0), ("d", 0)):
        chooser_.observe(name, drafted, min(drafted, 1))
    chooser_.choose(rows, 1)  # the next round may be launched before this one is read
    chooser_.end_round(choice)
    assert before - chooser_._credit == pytest.approx(1.8 - 1.25)


def test_drafts_of_the_host_s_are_weighed_once_they_are_there():
    chooser_ = chooser(on_host=True)
    rows = [row("a"), row("b")]
    for _ in range(20):
        chooser_.observe("a", K, K)
        chooser_.observe("b", K, 0)
    choice = chooser_.choose(rows, 4)
    assert choice.max_drafts == K
    assert chooser_.narrow(choice, rows, np.array([0, 0], np.int32)) == 0
    assert chooser_.narrow(choice, rows, np.array([8, 0], np.int32)) == 8
    assert chooser_.narrow(choice, rows, np.array([0, 8], np.int32)) == 0


@pytest.mark.parametrize("weighs", [True, False])
def test_without_costs_all_drafts_are_made(weighs):
    choice = chooser(weighs=weighs, costs=None).choose([row()], 1)
    assert choice.max_drafts == K
    if weighs:
        assert (choice.survival == 1).all()
        assert len(set(choice.seconds.tolist())) == 1


def test_a_schedule_stands():
    chooser_ = chooser(schedule=(0, 4, 1, 0, 0), costs=None)
    rows = [row(name) for name in "abcd"]
    assert [chooser_.choose(rows[:size], 4).max_drafts for size in (1, 2, 3, 4)] == [4, 1, 0, 0]


def test_costs_between_what_was_timed():
    costs = RoundCosts((10, 20), (0, 1, 2, 3, 8), {1: np.array([[1, 2, 3, 5, 10.0], [3, 4, 5, 7, 12.0]])})
    assert costs.of(1, 15).tolist() == pytest.approx([2, 3, 4, 6, 7, 8, 9, 10, 11])
    assert costs.of(1, 5).tolist() == costs.of(1, 10).tolist()
    assert costs.of(1, 99)[0] == 3


def test_a_disturbed_call_does_not_make_narrow_rounds_dear():
    assert settled(np.array([9.0, 2.0, 4.0])).tolist() == [2.0, 2.0, 4.0]
    assert settled(np.array([1.0, 2.0, 4.0])).tolist() == [1.0, 2.0, 4.0]
    assert settled(np.array([1.0, np.inf, np.inf])).tolist() == [1.0, 1.0, 1.0]
    assert (settled(np.full(2, np.inf)) > 0).all()


def test_what_is_timed():
    assert timed_drafts((0, 2, 8), is_free=True) == (0, 2, 8)
    assert timed_drafts((0, 2, 8), is_free=False) == (0, 1, 2, 3, 8)
    assert timed_drafts((0, 1), is_free=False) == (0, 1)
