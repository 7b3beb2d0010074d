"""RequestTable: the requests in flight, the queues their groups stand in, and how samples end."""

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.group import Group, GroupState
from batchgen.engine.metrics import Counters
from batchgen.engine.outbox import Outbox
from batchgen.engine.policy import GroupQueue, Rank
from batchgen.engine.request import Request
from batchgen.engine.sequence import Sequence
from batchgen.engine.stop import Stop, check_stop
from batchgen.outputs import FinishReason, RowFailure

ERROR = Stop(FinishReason.ERROR)


class RequestTable:
    """Who is there. Groups enter and leave the queues here and nowhere else.

    Attributes:
        requests: request id -> the request, until its last sample has finished.
        waiting, running, swapped: the queues, each in the order of the policy.
        outbox: what is to be told.
    """

    def __init__(self, blocks: BlockManager, counters: Counters, rank: Rank):
        self.requests: dict[str, Request] = {}
        self.waiting = GroupQueue()
        self.running = GroupQueue()
        self.swapped = GroupQueue()
        self.outbox = Outbox()
        self._blocks = blocks
        self._counters = counters
        self._rank = rank
        self._finished_seq_ids: list[int] = []
        self._num_sequences = 0

    def add(self, request: Request) -> Group:
        """Enter a request; its first sequence waits, for all samples until the prompt is computed."""
        self.requests[request.request_id] = request
        return self._wait_as_group(request, list(range(request.num_unfinished)))

    def run(self, group: Group) -> None:
        """Let a waiting or swapped group run; it has its blocks."""
        self._queue(group).take(group)
        self._enter(group, GroupState.RUNNING)
        group.num_overtaken = 0

    def preempt(self, group: Group) -> None:
        """Take the blocks of a running group; it waits again, with the tokens drawn so far."""
        self.running.take(group)
        group.num_preemptions += 1
        self._wait_again(group)

    def swap_out(self, group: Group) -> None:
        """Let a running group wait whose blocks are in host memory now."""
        self.running.take(group)
        group.num_preemptions += 1
        group.lacking = 0
        self._enter(group, GroupState.SWAPPED)

    def forget_swapped(self, group: Group) -> None:
        """Give up what a swapped group has in host memory; it will be recomputed."""
        self.swapped.take(group)
        self._wait_again(group)

    def fork(self, group: Group) -> list[Sequence]:
        """Make the pending samples of a group out of its leader, whose blocks they share."""
        leader = group.sequences[0]
        forked = [self._new_sequence(group.request, index) for index in group.pending]
        for sequence in forked:
            self._blocks.fork(leader, sequence)
            sequence.group = group
        group.sequences += forked
        group.pending = []
        return forked

    def fork_beam(self, beam: Sequence, index: int) -> Sequence:
        """A further sequence with the tokens and blocks of a beam, in its group."""
        forked = self._new_sequence(beam.request, index)
        forked.token_ids = beam.token_ids[:]
        forked.logprobs = beam.logprobs.copy()
        self._blocks.fork(beam, forked)
        forked.group = beam.group
        forked.group.sequences.append(forked)
        return forked

    def drop_beam(self, beam: Sequence) -> None:
        """Take a beam that does not go on out of its group, which has others."""
        self._leave(beam)

    def end(self, request: Request) -> None:
        """Forget a request of whose samples all was told."""
        self._forget(request)
        self._counters.num_requests_finished += 1

    def unfork(self, group: Group) -> None:
        """Take back a fork whose draws were lost: the leader will draw for the others again."""
        leader, *others = group.sequences
        if others and leader.num_generated == 0:
            group.pending = [sequence.index for sequence in others] + group.pending
            group.sequences = [leader]
            for sequence in others:
                self._blocks.free(sequence)
                sequence.is_finished = True
                self._finished_seq_ids.append(sequence.seq_id)

    def split(self, group: Group, keep: int) -> Group:
        """Let all samples of a group but the first `keep` wait as a further group; they lose their blocks."""
        if group.pending:
            rest, group.pending = group.pending[keep - 1 :], group.pending[: keep - 1]
            return self._wait_as_group(group.request, rest)
        moved = group.sequences[keep:]
        del group.sequences[keep:]
        for sequence in moved:
            self._blocks.free(sequence)
        further = Group(group.request, group.rank, moved[0], [])
        further.sequences = moved
        for sequence in moved:
            sequence.group = further
        group.request.groups.append(further)
        self._enter(further, GroupState.WAITING)
        return further

    def accept(self, sequence: Sequence, token: int, *, is_complete: bool = False) -> None:
        """Append a drawn token, and end the sample if it is the last or its grammar `is_complete`."""
        request, tokens = sequence.request, sequence.token_ids
        tokens.append(token)
        self._counters.generation_tokens += 1
        may_end = token in request.end_ids or len(tokens) >= request.max_total_tokens
        if may_end or is_complete or request.watches_repetition:
            stop = check_stop(sequence, is_complete)
            if stop is not None:
                self.finish(sequence, stop)
                return
        if request.streams:
            self.outbox.tell(sequence)

    def finish(self, sequence: Sequence, stop: Stop, error: RowFailure | None = None) -> None:
        """End a sample and tell its last tokens."""
        self._leave(sequence)
        self.outbox.tell(sequence, stop, error)
        self._sample_done(sequence.request)

    def fail(self, request: Request, failure: RowFailure) -> None:
        """End every unfinished sample of a request with an error; tokens drawn so far are kept."""
        for group in request.groups.copy():
            self.fail_group(group, failure)

    def fail_group(self, group: Group, failure: RowFailure) -> None:
        """End every unfinished sample of a group with an error."""
        group.sequences += self._pending_as_sequences(group)
        for sequence in group.sequences.copy():
            self.finish(sequence, ERROR, failure)

    def drop(self, request_id: str) -> None:
        """Forget a request without another word; an unknown one is ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._forget(request)
        self.outbox.drop(request_id)

    def drop_sample(self, request_id: str, index: int) -> None:
        """Forget one sample of a request without another word; an unknown or finished one is ignored."""
        request = self.requests.get(request_id)
        for group in () if request is None else request.groups.copy():
            for sequence in group.sequences.copy():
                if sequence.index == index:
                    self._leave(sequence)
                    self._sample_done(sequence.request)

    def take_finished_seq_ids(self) -> tuple[int, ...]:
        """Sequences that have left since the last call."""
        finished, self._finished_seq_ids = tuple(self._finished_seq_ids), []
        return finished

    def _forget(self, request: Request) -> None:
        del self.requests[request.request_id]
        for group in request.groups.copy():
            group.pending = []
            for sequence in group.sequences.copy():
                self._leave(sequence)

    def _wait_as_group(self, request: Request, indices: list[int]) -> Group:
        leader = self._new_sequence(request, indices[0])
        group = Group(request, self._rank(request), leader, indices[1:])
        request.groups.append(group)
        self._enter(group, GroupState.WAITING)
        return group

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        sequence = Sequence(self._num_sequences, request, index, self._blocks.num_groups)
        self._num_sequences += 1
        return sequence

    def _pending_as_sequences(self, group: Group) -> list[Sequence]:
        made = [self._new_sequence(group.request, index) for index in group.pending]
        for sequence in made:
            sequence.group = group
        group.pending = []
        return made

    def _queue(self, group: Group) -> GroupQueue:
        if group.state is GroupState.RUNNING:
            return self.running
        return self.waiting if group.state is GroupState.WAITING else self.swapped

    def _wait_again(self, group: Group) -> None:
        for sequence in group.sequences:
            self._blocks.free(sequence)
        group.shared_until = 0
        group.lacking = 0
        self._enter(group, GroupState.WAITING)

    def _enter(self, group: Group, state: GroupState) -> None:
        group.state = state
        self._queue(group).add(group)

    def _leave(self, sequence: Sequence) -> None:
        """Take an unfinished sequence out of its group and give its blocks back."""
        group = sequence.group
        if group.shared_until and sequence is group.sequences[0] and len(group.sequences) > 1:
            # The next one leads, with what is computed of that which all share.
            self._blocks.fork(sequence, group.sequences[1])
        if group.pending and len(group.sequences) == 1:
            self._lead_anew(group)
        group.sequences.remove(sequence)
        self._blocks.free(sequence)
        sequence.is_finished = True
        self._finished_seq_ids.append(sequence.seq_id)
        if not group.sequences:
            self._queue(group).take(group)
            group.state = GroupState.FINISHED
            group.request.groups.remove(group)
        elif len(group.sequences) == 1:
            group.shared_until = 0

    def _lead_anew(self, group: Group) -> None:
        """Before the leader goes, let the first pending sample take its place and its blocks."""
        heir = self._new_sequence(group.request, group.pending.pop(0))
        heir.group = group
        self._blocks.fork(group.sequences[0], heir)
        group.sequences.append(heir)

    def _sample_done(self, request: Request) -> None:
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            del self.requests[request.request_id]
            self._counters.num_requests_finished += 1
