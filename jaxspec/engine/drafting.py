"""Host. How many drafts the rows of a round make: by a schedule, or by what they are worth and what they cost.

Where drafts cost nothing to make (lookups, the host's) the round weighs those that it really has, and is told here how
often each row's are kept and what rounds take. Where a model makes them, their number is settled here, before the
round. A little of the time goes into drafts that do not seem to pay, so that text which has turned predictable is
found again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxspec.config.methods import METHODS
from jaxspec.config.resolve import ResolvedConfig
from jaxspec.config.schedule import drafts_at
from jaxspec.metrics.decayed import KEEP_ENGINE, KEEP_REQUEST, DecayedAcceptance, survival
from jaxspec.proposers.widths import best_width
from jaxspec.step.costs import RoundCosts
from jaxspec.step.programs import Shapes

EXPLORE = 0.01  # of the time of plain rounds, for drafts that do not seem to pay
NEVER = 1e9  # seconds of a round that is not to be taken


class Row(NamedTuple):
    """A row of the round to come: whose it is, its tokens so far, and the most drafts its request wants."""

    sequence_id: str
    length: int
    most: int | None


class Choice(NamedTuple):
    """What was settled for a round, or a batch of rounds.

    max_drafts: a row's most. survival: f32[rows, K], seconds: f32[W], where the round weighs its drafts. seconds_k:
    f32, what it takes by the most drafts that a row has; None without costs. explores: it drafts, though that seems
    not to pay.
    """

    max_drafts: int
    survival: np.ndarray | None = None
    seconds: np.ndarray | None = None
    seconds_k: np.ndarray | None = None
    explores: bool = False


class DraftChooser:
    """One engine's. It learns from every round, and forgets a sequence when told to."""

    def __init__(self, config: ResolvedConfig, shapes: Shapes, costs: RoundCosts | None):
        """costs: None where the number of drafts is not chosen by what it pays."""
        self._speculative, self._shapes, self._costs = config.speculative_config, shapes, costs
        self._most = config.num_speculative_tokens
        self._engine = DecayedAcceptance(self._most, KEEP_ENGINE)
        self._sequences: dict[str, DecayedAcceptance] = {}
        self._credit = 0.0  # seconds that may go into drafts that do not seem to pay
        self._round: list[tuple[int, int]] = []  # of the round that is observed: (drafts, accepted) of each row so far

    def choose(self, rows: Sequence[Row], bucket: int, most_rows: int | None = None) -> Choice:
        """For the next round, or batch of rounds, of these rows in this batch bucket. most_rows: of a group, where
        the rows are several groups', which wait for each other; a round's time is then that of the largest."""
        most = self._by_schedule(len(rows) if most_rows is None else most_rows)
        weighs = bool(self._shapes.num_weighed)
        widths = self._shapes.widths_of(bucket) or (0, self._most)
        if self._costs is None or not rows:
            if not weighs:
                return Choice(most)
            # No row, or no costs: every draft counts, and no round is dearer than another.
            return Choice(most, np.ones((len(rows), self._most), np.float32), np.ones(len(widths), np.float32))
        seconds_k = self._costs.of(bucket, max(row.length for row in rows))
        explores = self._may_explore(seconds_k)
        survival_BK = self._survival(rows)
        if weighs:
            return Choice(most, survival_BK, _weighed(seconds_k, widths, explores), seconds_k, explores)
        if self._shapes.num_host_drafts:
            return Choice(most, seconds_k=seconds_k, explores=explores)  # `narrow` weighs them once they are there
        caps_B = np.array([most if row.most is None else min(row.most, most) for row in rows], np.int32)
        best = self._best(survival_BK, caps_B, seconds_k[: most + 1], range(most + 1))
        if best == 0 and explores and caps_B.max() > 0:
            return Choice(self._least_drafts(), seconds_k=seconds_k, explores=True)
        return Choice(best, seconds_k=seconds_k)

    def narrow(self, choice: Choice, rows: Sequence[Row], counts_B: np.ndarray) -> int:
        """How many drafts a row to keep of those that the host has made for the rows that were chosen for."""
        widths = self._shapes.host_drafts
        if choice.seconds_k is None or not counts_B.any():
            return int(counts_B.max())
        seconds_W = _weighed(choice.seconds_k, widths, choice.explores)
        return widths[self._best(self._survival(rows), counts_B, seconds_W, widths)]

    def observe(self, sequence_id: str, num_drafted: int, num_accepted: int) -> None:
        """What became of a row's drafts in the round that goes on."""
        if self._costs is None:
            return
        self._round.append((num_drafted, num_accepted))
        if num_drafted:
            for counted in (self._engine, self._of(sequence_id)):
                counted.observe(num_drafted, num_accepted)

    def end_round(self, choice: Choice) -> None:
        """All rows of a round were observed: what it took, beyond what plain rounds take for as many tokens."""
        rows, self._round = self._round, []
        if not rows:
            return
        assert choice.seconds_k is not None, "rows are kept where there are costs"
        plain, most = float(choice.seconds_k[0]), max(num_drafted for num_drafted, _ in rows)
        if most == 0:
            self._earn(EXPLORE * plain, choice.seconds_k)
        elif choice.explores:
            tokens_a_row = 1 + sum(num_accepted for _, num_accepted in rows) / len(rows)
            took = float(choice.seconds_k[self._round_drafts(most)])
            self._earn(plain * tokens_a_row - took, choice.seconds_k)

    def forget(self, sequence_id: str) -> None:
        """The sequence is over."""
        self._sequences.pop(sequence_id, None)

    def _by_schedule(self, num_rows: int) -> int:
        table = self._speculative.num_speculative_tokens_per_batch_size if self._speculative else None
        return self._most if table is None else drafts_at(table, num_rows, max_tokens=self._most)

    def _survival(self, rows: Sequence[Row]) -> np.ndarray:
        return survival([self._of(row.sequence_id) for row in rows], self._engine.rates())

    def _of(self, sequence_id: str) -> DecayedAcceptance:
        if sequence_id not in self._sequences:
            self._sequences[sequence_id] = DecayedAcceptance(self._most, KEEP_REQUEST)
        return self._sequences[sequence_id]

    def _best(self, survival_BK, counts_B, seconds_W, widths: Sequence[int]) -> int:
        is_active_B = np.ones(len(counts_B), np.bool_)
        return int(best_width(np, survival_BK, counts_B, is_active_B, seconds_W, widths))

    def _least_drafts(self) -> int:
        """Of a round that explores: as many as the narrowest round with drafts holds."""
        shapes = self._shapes
        return (shapes.host_drafts if shapes.num_host_drafts else shapes.widths[0])[1]

    def _round_drafts(self, most: int) -> int:
        """The drafts a row for which a round was timed like the one whose rows had so many at most."""
        shapes = self._shapes
        if not shapes.num_host_drafts and not shapes.num_weighed:
            return most
        widths = shapes.host_drafts if shapes.num_host_drafts else shapes.widths[0]
        return next(width for width in widths if width >= most)

    def _may_explore(self, seconds_k: np.ndarray) -> bool:
        return self._credit >= self._price(seconds_k)

    def _earn(self, seconds: float, seconds_k: np.ndarray) -> None:
        """Up to what two such rounds take: no long plain stretch is followed by a long dear one."""
        self._credit = min(self._credit + seconds, 2 * self._price(seconds_k))

    def _price(self, seconds_k: np.ndarray) -> float:
        """Of a round that explores, beyond a plain one."""
        return float(seconds_k[self._least_drafts()] - seconds_k[0])


def _weighed(seconds_k: np.ndarray, widths: Sequence[int], explores: bool) -> np.ndarray:
    """f32[W]: what rounds of these widths take; one that explores is not plain, whatever it takes."""
    seconds_W = seconds_k[list(widths)]
    if explores:
        seconds_W[0] = NEVER
    return seconds_W


def drafts_are_free(method: str) -> bool:
    """Whether making drafts costs next to nothing, so that they are weighed once they are there."""
    return METHODS[method].needs == "context"
