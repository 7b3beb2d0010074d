"""Speculation: which sequences draft tokens in a step, and when drafting is left off. No torch.

A step with drafts takes longer and yields the accepted ones more. Let T(n) be the time of a step of n tokens,
S the sequences that decode. One drafted token costs (T(S + d) - T(S)) / d, one accepted token saves
T(S) / S; so a drafted token pays if the probability that it is accepted is above the quotient of the two.
T is measured, the probability too, for each sequence apart: p for the first drafted token, p² for the second,
and so on. On a small batch a few tokens more cost next to nothing and the quotient is near 0; on a large one
it comes near 1, and nobody drafts.

What is not done is not measured. So a few steps now and then draft on trial, rarer each time that it does not
pay, and one step now and then does not draft although it pays.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from batchgen.engine.ngram import propose
from batchgen.engine.step_times import MeasuredTimes, StepTimes
from batchgen.ngram_settings import NgramSettings

# Steps between two trials: at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 2048
# Steps with drafts in a trial, and how many sequences look one up in each.
_TRIAL_STEPS, _TRIAL_SEQUENCES = 3, 8
# After so many steps with drafts comes one without.
_PLAIN_AFTER = 128
# At least so many steps between two lines in the log.
_QUIET_STEPS = 1000
# How far a draft must be better than the break-even: what is measured is not quite what will be.
_MARGIN = 1.2
# A sequence is taken to be like the others until so many of its own drafted tokens were judged.
_PRIOR_TOKENS = 4.0
# What earlier drafts count after another one: of all sequences, of its own; and after a step without.
_KEPT_OF_ALL, _KEPT_OF_OWN, _KEPT_BY_STEP = 0.99, 0.9, 0.98


log = logging.getLogger(__name__)


class Drafting(Protocol):
    """What is asked of a sequence that may draft."""

    seq_id: int
    token_ids: "array[int]"


class Acceptance:
    """Fading counts of drafted tokens: judged are those whose predecessors were all accepted."""

    __slots__ = ("accepted", "judged", "step")

    def __init__(self, accepted: float = 0.0, judged: float = 0.0):
        self.accepted, self.judged, self.step = accepted, judged, 0

    def add(self, num_drafted: int, num_accepted: int, kept: float) -> None:
        """Take in a draft; what stands behind its first wrong token was not judged."""
        self.accepted = self.accepted * kept + num_accepted
        self.judged = self.judged * kept + min(num_accepted + 1, num_drafted)


class Speculation:
    """Drafts by prompt lookup, as far as they pay.

    Attributes:
        choices: where steps are counted as `draft`, `draft_trial` or `draft_not`.

    Args:
        settings: how to look up, and how far to draft.
        times: the cost model.
    """

    def __init__(self, settings: NgramSettings, times: StepTimes | None = None):
        self.settings = settings
        self.choices: Counter[str] = Counter()
        self._times = MeasuredTimes() if times is None else times
        # Before anything is known every other one is hoped for.
        self._all = Acceptance(4.0, 8.0)
        self._own: dict[int, Acceptance] = {}
        self._drafts_per_row = 0.5 * settings.num_speculative_tokens
        self._step = 0
        self._num_since_plain = 0
        self._trial_steps_left = _TRIAL_STEPS
        self._trial_pause = _FIRST_PAUSE
        self._trial_due = 0
        self._said: tuple[int, bool] | None = None

    def draft(
        self, sequences: Sequence[Drafting], rooms: Sequence[int], num_rows: int, budget: int
    ) -> list[list[int]]:
        """What each sequence drafts in this step; mostly nothing.

        Args:
            sequences: those that may, each computing one token and drawing the next.
            rooms: how many tokens each may draft at most.
            num_rows: draws of the step.
            budget: tokens that the step has room for.
        """
        self._step += 1
        is_trial, break_even = self._judge(num_rows)
        most = self.settings.num_speculative_tokens
        order: Sequence[int] = range(len(sequences))
        if is_trial:
            # It adds half a step at most, and looks at a few sequences, others each time.
            budget = min(budget, max(most, num_rows // 2))
            order = [(self._step + place) % len(order) for place in order[:_TRIAL_SEQUENCES]]
        drafts: list[list[int]] = [[] for _ in sequences]
        for index in order:
            seq_id = sequences[index].seq_id
            count = most if is_trial else self._worthwhile(seq_id, break_even)
            drafts[index] = self._propose(sequences[index], min(count, rooms[index], budget))
            budget -= len(drafts[index])
        self._note(sum(map(len, drafts)), num_rows, is_trial)
        return drafts

    def judged(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """Be told how many drafted tokens of a sequence were accepted."""
        self._all.add(num_drafted, num_accepted, _KEPT_OF_ALL)
        own = self._own.setdefault(seq_id, Acceptance())
        own.add(num_drafted, num_accepted, _KEPT_OF_OWN)
        own.step = self._step

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what is known of sequences that have left."""
        for seq_id in seq_ids:
            self._own.pop(seq_id, None)

    def step_ended(self, num_tokens: int, num_rows: int, seconds: float) -> None:
        """Be told how long a step took; one that computed prompts says nothing of drafts."""
        if num_tokens == num_rows:
            self._times.observe(num_tokens, seconds)

    def break_even(self, num_rows: int) -> float | None:
        """The probability of acceptance above which a drafted token surely pays; None while not known."""
        count = max(round(2 * self._drafts_per_row * num_rows), self.settings.num_speculative_tokens)
        plain_s = self._times.seconds(num_rows)
        more_s = self._times.more_s(num_rows, num_rows + count)
        return None if not plain_s or more_s is None else _MARGIN * more_s / (plain_s / num_rows)

    def _judge(self, num_rows: int) -> tuple[bool, float]:
        """Whether this step is a trial, and the probability above which its tokens are drafted."""
        if self._num_since_plain >= _PLAIN_AFTER or self._times.seconds(num_rows) is None:
            return False, 1.0
        if self._step >= self._trial_due:
            return True, 0.0
        break_even = self.break_even(num_rows)
        if break_even is None:
            return False, 1.0
        self._say(num_rows, break_even)
        return False, break_even

    def _say(self, num_rows: int, break_even: float) -> None:
        """Log whether drafting pays for a sequence like most, when that has changed, but not all the time."""
        chance = self._all.accepted / self._all.judged
        pays = chance > break_even
        if self._said is not None and (self._said[1] == pays or self._step < self._said[0] + _QUIET_STEPS):
            return
        self._said = self._step, pays
        log.info(
            "speculation is %s at %d sequences: it pays when more than %.0f %% of the drafted tokens are "
            "accepted; %.0f %% of those judged were",
            "on" if pays else "off",
            num_rows,
            100 * break_even,
            100 * chance,
        )

    def _worthwhile(self, seq_id: int, break_even: float) -> int:
        """How many tokens a sequence drafts: each is accepted with a probability above `break_even`."""
        chance = likelihood = self._chance(seq_id)
        count = 0
        while count < self.settings.num_speculative_tokens and likelihood > break_even:
            likelihood *= chance
            count += 1
        return count

    def _chance(self, seq_id: int) -> float:
        """Probability that the first drafted token of a sequence is accepted."""
        everybody = self._all.accepted / self._all.judged
        own = self._own.get(seq_id)
        if own is None:
            return everybody
        kept: float = _KEPT_BY_STEP ** (self._step - own.step)
        return (own.accepted * kept + everybody * _PRIOR_TOKENS) / (own.judged * kept + _PRIOR_TOKENS)

    def _propose(self, sequence: Drafting, count: int) -> list[int]:
        longest, shortest = self.settings.prompt_lookup_max, self.settings.prompt_lookup_min
        return propose(sequence.token_ids, count, longest=longest, shortest=shortest)

    def _note(self, num_drafted: int, num_rows: int, is_trial: bool) -> None:
        """Count what this step does, and set the time of the next trial."""
        if num_drafted == 0:
            self.choices["draft_not"] += 1
            self._num_since_plain = 0
            return
        self.choices["draft_trial" if is_trial else "draft"] += 1
        self._num_since_plain += 1
        if not is_trial:
            self._drafts_per_row += 0.1 * (num_drafted / num_rows - self._drafts_per_row)
            self._trial_pause = _FIRST_PAUSE
            self._trial_due = self._step + _FIRST_PAUSE
            return
        self._trial_steps_left -= 1
        if self._trial_steps_left == 0:
            self._trial_steps_left = _TRIAL_STEPS
            self._trial_due = self._step + self._trial_pause
            self._trial_pause = min(2 * self._trial_pause, _LONGEST_PAUSE)
