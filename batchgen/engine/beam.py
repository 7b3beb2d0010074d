"""BeamSearch: which beams go on with which token, which have finished, and when a search is over. No torch.

The rules are those of transformers' `generate(num_beams=..., do_sample=False)`, so that ids and ranking are
the same:

- The continuations of all beams are ranked by the sum of their log probabilities. One that ends (end of
  sequence, stop token, stop string, length) is a finished sequence if it ranks among the first `width`, and
  is dropped otherwise; the first `width` others are the beams of the next step.
- A finished sequence scores its sum over (its generated length, the end included, ** length_penalty). The
  best `width` are kept.
- With `width` finished, the search is over at once if `early_stopping` is True. If it is False, when the best
  beam, scored as if it ended now, does not beat the worst of them; if it is "never", when it could not even
  if it kept its sum up to the greatest length.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from batchgen.engine.scheduler_output import TokenLogprobs
from batchgen.engine.stop import Stop

# Likeliest tokens of a beam, best first, and their log probabilities.
Candidates = tuple[Sequence[int], Sequence[float]]
NEVER = float("-inf")


class Beam(Protocol):
    """What is asked of an open beam: prompt and generated tokens, and what is to be told of the latter."""

    token_ids: "array[int]"
    logprobs: list[TokenLogprobs]


class Hypothesis(NamedTuple):
    """A finished sequence: its rank is by `score`; `logprob` is the sum over its generated ids."""

    score: float
    logprob: float
    token_ids: "array[int]"
    stop: Stop
    logprobs: list[TokenLogprobs]


class Continuation(NamedTuple):
    """A beam of the next step: beam `parent` of this one and a token more."""

    parent: int
    token: int
    logprobs: TokenLogprobs | None


class BeamSearch:
    """The search of one request.

    Attributes:
        logprobs: of every open beam, the sum over its generated tokens; best first.
        num_generated: tokens that every open beam has.
        finished: the best finished sequences, best first; `width` at most.
        is_done: nothing can change `finished` any more.

    Args:
        width: beams in a step, and sequences kept.
        max_generated: tokens at which every beam ends; the caller's `ends` says so too.
        length_penalty: exponent of the length.
        early_stopping: False, True or "never".
        num_stop_ids: ids that can end a beam.
        has_stop_strings: whether anything else than ids can.
        num_logprobs: how many of the likeliest tokens are told at each position; None tells nothing.
    """

    __slots__ = (
        "_early_stopping",
        "_has_stop_strings",
        "_length_penalty",
        "_max_generated",
        "_num_logprobs",
        "_num_stop_ids",
        "finished",
        "is_done",
        "logprobs",
        "num_generated",
        "width",
    )

    def __init__(
        self,
        width: int,
        max_generated: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        num_stop_ids: int = 1,
        has_stop_strings: bool = False,
        num_logprobs: int | None = None,
    ):
        self.width = width
        self.logprobs = [0.0]
        self.num_generated = 0
        self.finished: list[Hypothesis] = []
        self.is_done = False
        self._max_generated = max_generated
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_stop_ids = num_stop_ids
        self._has_stop_strings = has_stop_strings
        self._num_logprobs = num_logprobs

    @property
    def num_ranked(self) -> int:
        """Continuations looked at in a step, as in transformers: `width` of them go on whatever ends."""
        return max(2, 1 + self._num_stop_ids) * self.width

    @property
    def num_candidates(self) -> int:
        """How many of its likeliest tokens each beam has to offer, so that none of those ranked is missing.

        One beam may make all of the next step's, and before these only the ids that end it can stand.
        """
        needed = self.num_ranked if self._has_stop_strings else self.width + self._num_stop_ids
        return max(needed, self._num_logprobs or 0)

    def advance(
        self,
        beams: Sequence[Beam],
        candidates: Sequence[Candidates],
        ends: Callable[[int, int], Stop | None],
    ) -> list[Continuation]:
        """Take in one step's candidates.

        Args:
            beams: the open beams.
            candidates: of each of them.
            ends: why beam `parent` would end with `token`; None if it would not.

        Returns: the beams of the next step, best first; none when the search is done.
        """
        count = self.num_generated + 1
        is_last = count >= self._max_generated
        going: list[Continuation] = []
        logprobs: list[float] = []
        ended: list[Hypothesis] = []
        for rank, (negated, parent, place, token) in enumerate(self._ranked(candidates)):
            stop = ends(parent, token)
            if stop is None:
                going.append(Continuation(parent, token, self._told(candidates[parent], place)))
                logprobs.append(-negated)
            elif rank < self.width:
                told = self._told(candidates[parent], place)
                ended.append(self._hypothesis(beams[parent], token, -negated, stop, told))
            if rank + 1 >= self.width and (is_last or len(going) == self.width):
                break
        # Of equal scores the one that finished first stays before the other.
        self.finished = sorted([*self.finished, *ended], key=lambda each: -each.score)[: self.width]
        self.num_generated = count
        self.logprobs = logprobs
        self.is_done = not going or not self._can_improve()
        return [] if self.is_done else going

    def _hypothesis(
        self, beam: Beam, token: int, logprob: float, stop: Stop, told: TokenLogprobs | None
    ) -> Hypothesis:
        count = self.num_generated + 1
        generated = beam.token_ids[len(beam.token_ids) - self.num_generated :]
        generated.append(token)
        logprobs = [] if told is None else [*beam.logprobs, told]
        return Hypothesis(logprob / count**self._length_penalty, logprob, generated, stop, logprobs)

    def _told(self, candidates: Candidates, place: int) -> TokenLogprobs | None:
        """What is said of a token: itself, then the likeliest."""
        if self._num_logprobs is None:
            return None
        ids, values = candidates
        most = min(self._num_logprobs, len(ids))
        return TokenLogprobs(
            (ids[place], *ids[:most]), (values[place], *values[:most]), (place + 1, *range(1, most + 1))
        )

    def _ranked(self, candidates: Sequence[Candidates]) -> list[tuple[float, int, int, int]]:
        """(-sum, beam, place in its list, token) of the best continuations, best first."""
        ranked = [
            (-(total + logprob), beam, place, token)
            for beam, (total, (ids, logprobs)) in enumerate(zip(self.logprobs, candidates, strict=True))
            for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True))
            if logprob > NEVER
        ]
        ranked.sort()
        return ranked[: self.num_ranked]

    def _can_improve(self) -> bool:
        """Whether open beams may still change the finished ones, by the rule of `early_stopping`."""
        if len(self.finished) < self.width:
            return True
        if self._early_stopping is True:
            return False
        is_longer_better = self._early_stopping == "never" and self._length_penalty > 0.0
        length = self._max_generated if is_longer_better else self.num_generated
        best_possible: float = self.logprobs[0] / length**self._length_penalty
        return best_possible > self.finished[-1].score
