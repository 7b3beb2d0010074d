"""Group: the sequences of a request that run together; the unit of admission, preemption and order."""

from enum import Enum, auto
from typing import Protocol

from batchgen.engine.request import Request
from batchgen.engine.sequence import Sequence

Order = tuple[int, int, int]  # rank (priority), arrival, index of the first sample


class GroupState(Enum):
    """Where a group stands."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


class BeamState(Protocol):
    """What a group must know of its beam search."""

    @property
    def num_candidates(self) -> int:
        """Likeliest tokens that each beam needs for the next step."""


class Group:
    """A leader and the samples it forks, of one request.

    A fresh group has one sequence, which computes the prompt, and `pending` samples, which it forks when it
    draws. A forked group that was preempted by recompute begins with one sequence too: the leader computes
    what all have in common, then the others take its blocks, then each computes its own tail.

    Attributes:
        order: place in every queue; smaller goes first, the largest is the first to be preempted.
        sequences: those that are not finished; the first leads.
        pending: indices of samples that the leader's first draw will fork.
        shared_until: while above 0 only the leader computes, up to this many tokens, and draws nothing.
        num_overtaken: how many were admitted before it though it stood ahead of them.
        num_preemptions: how often its blocks were taken.
        lacking, tried_at: blocks that must be free before another try at admission can succeed, as of that
            schedule; hits in the prefix cache may change it.
        beam: the state of a beam search, None otherwise.
    """

    __slots__ = (
        "beam",
        "lacking",
        "num_overtaken",
        "num_preemptions",
        "order",
        "pending",
        "request",
        "sequences",
        "shared_until",
        "state",
        "tried_at",
    )

    def __init__(self, request: Request, rank: int, leader: Sequence, pending: list[int]):
        self.request = request
        self.order: Order = (rank, request.arrival, leader.index)
        self.state = GroupState.WAITING
        self.sequences = [leader]
        self.pending = pending
        self.shared_until = 0
        self.num_overtaken = 0
        self.num_preemptions = 0
        self.lacking = 0
        self.tried_at = 0
        self.beam: BeamState | None = None
        leader.group = self

    @property
    def rank(self) -> int:
        """The priority that the policy reads; a smaller one is strictly ahead."""
        return self.order[0]

    @property
    def width(self) -> int:
        """Sequences that run when it runs, those to be forked included."""
        return len(self.sequences) + len(self.pending)

    @property
    def num_candidates(self) -> int:
        """What each of its rows asks for instead of a draw; 0 unless it is a beam search."""
        return 0 if self.beam is None else self.beam.num_candidates

    @property
    def has_placeholders(self) -> bool:
        """Whether a step under way draws for one of its sequences."""
        return any(sequence.num_placeholders for sequence in self.sequences)

    @property
    def can_split(self) -> bool:
        """Whether its samples may run one after the other; beams may not."""
        return self.beam is None

    def num_shared_tokens(self) -> int:
        """Leading tokens that all sequences have in common, less than the shortest of them has."""
        first, *others = (sequence.token_ids for sequence in self.sequences)
        end = min(map(len, (first, *others))) - 1
        for tokens in others:
            common = min(len(self.request.prompt), end)
            while common < end and tokens[common] == first[common]:
                common += 1
            end = common
        return end

    def num_distinct_tokens(self) -> int:
        """Computed tokens, what all have in common counted once: the cost of a recompute."""
        total = sum(sequence.num_computed_tokens for sequence in self.sequences)
        if len(self.sequences) == 1:
            return total
        return total - self.num_shared_tokens() * (len(self.sequences) - 1)
