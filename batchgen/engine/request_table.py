"""RequestTable: the requests in flight, the queues their sequences stand in, and what is told of them."""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.messages import SampleOutput
from batchgen.engine.metrics import Counters
from batchgen.engine.policy import OrderKey, WaitingQueue
from batchgen.engine.request import Request
from batchgen.engine.sequence import Sequence, SequenceState
from batchgen.engine.stop import Stop, check_stop
from batchgen.outputs import FinishReason, RowFailure

_by_order = attrgetter("order")


class RequestTable:
    """Who is there. Sequences enter and leave the queues here and nowhere else.

    Attributes:
        requests: request id -> its sequences, finished ones included, until the last has finished.
        waiting, running, swapped: the queues. `running` is sorted by the policy; `swapped` stays empty until
            there is a pool in host memory.
    """

    def __init__(self, blocks: BlockManager, counters: Counters, policy: OrderKey):
        self.requests: dict[str, list[Sequence]] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.swapped: deque[Sequence] = deque()
        self._blocks = blocks
        self._counters = counters
        self._policy = policy
        self._outputs: list[SampleOutput] = []
        self._finished_seq_ids: list[int] = []
        self._num_sequences = 0

    def add(self, request: Request) -> Sequence:
        """Enter a request; its first sequence waits, for all samples until the prompt is computed."""
        self.requests[request.request_id] = []
        leader = self.new_sequence(request, 0)
        self.waiting.push(leader)
        return leader

    def new_sequence(self, request: Request, index: int) -> Sequence:
        """A further sample of a request, in no queue yet."""
        sequence = Sequence(self._num_sequences, request, index, self._blocks.num_groups)
        sequence.order = self._policy(sequence)
        self._num_sequences += 1
        self.requests[request.request_id].append(sequence)
        return sequence

    def wait_apart(self, request: Request, indices: Iterable[int]) -> None:
        """Let these samples of a request wait as sequences of their own; no fork will make them."""
        for index in indices:
            self.waiting.push(self.new_sequence(request, index))
        request.is_forked = True

    def run(self, sequence: Sequence) -> None:
        """Put a sequence that is in no queue among those that run."""
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=_by_order)

    def preempt_last(self) -> Sequence:
        """Take the blocks of the last running sequence; it waits again, with the tokens drawn so far."""
        victim = self.running.pop()
        self._blocks.free(victim)
        victim.num_preemptions += 1
        self.waiting.push(victim)
        return victim

    def accept(self, sequence: Sequence, token: int) -> None:
        """Append a drawn token, and end the sample if it is the last."""
        sequence.token_ids.append(token)
        self._counters.generation_tokens += 1
        stop = check_stop(sequence)
        if stop is not None:
            self.finish(sequence, stop)
        elif sequence.request.streams:
            self._tell(sequence, None, None)

    def finish(self, sequence: Sequence, stop: Stop, error: RowFailure | None = None) -> None:
        """End a sample and tell its last tokens."""
        self.leave(sequence)
        self._tell(sequence, stop, error)
        self._sample_done(sequence)

    def fail(self, request: Request, failure: RowFailure) -> None:
        """End every unfinished sample of a request with an error; tokens drawn so far are kept."""
        if not request.is_forked:
            self.wait_apart(request, range(1, request.params.n))
        for sequence in self.requests[request.request_id].copy():
            if not sequence.is_finished:
                self.finish(sequence, Stop(FinishReason.ERROR), failure)

    def drop(self, request_id: str) -> None:
        """Forget a request without another word; an unknown one is ignored."""
        for sequence in self.requests.pop(request_id, ()):
            self.leave(sequence)
        self._outputs = [output for output in self._outputs if output.request_id != request_id]

    def drop_sample(self, request_id: str, index: int) -> None:
        """Forget one sample of a request without another word; an unknown or finished one is ignored."""
        for sequence in self.requests.get(request_id, ()):
            if sequence.index == index and not sequence.is_finished:
                self.leave(sequence)
                self._sample_done(sequence)
                return

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue and give its blocks back."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._blocks.free(sequence)
        was_waiting = sequence.state is SequenceState.WAITING
        sequence.state = SequenceState.FINISHED
        if was_waiting:
            self.waiting.removed(sequence)
        self._finished_seq_ids.append(sequence.seq_id)

    @property
    def has_outputs(self) -> bool:
        """Whether there is anything to be told; a refused request leaves nothing else behind."""
        return bool(self._outputs)

    def take_outputs(self) -> list[SampleOutput]:
        """What is to be told since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_finished_seq_ids(self) -> tuple[int, ...]:
        """Sequences that have left since the last call."""
        finished, self._finished_seq_ids = tuple(self._finished_seq_ids), []
        return finished

    def _sample_done(self, sequence: Sequence) -> None:
        request = sequence.request
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            del self.requests[request.request_id]
            self._counters.num_requests_finished += 1

    def _tell(self, sequence: Sequence, stop: Stop | None, error: RowFailure | None) -> None:
        request = sequence.request
        start = len(request.prompt) + sequence.num_sent_tokens
        sequence.num_sent_tokens = len(sequence.token_ids) - len(request.prompt)
        self._outputs.append(
            SampleOutput(
                request_id=request.request_id,
                index=sequence.index,
                token_ids=sequence.token_ids[start:].tobytes(),
                finish_reason=None if stop is None else stop.finish_reason,
                stop_reason=None if stop is None else stop.stop_reason,
                num_cached_tokens=request.num_cached_tokens,
                error=error,
                serial=request.source.serial,
            )
        )
