"""Rules: the limits that steps keep to, how prompts are cut into chunks, and how long new ones wait."""

from collections.abc import Callable
from dataclasses import dataclass

from batchgen.engine.request_table import RequestTable


@dataclass(slots=True)
class Rules:
    """How requests share the steps; what may change while running is changed here.

    Args:
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens computed in a step.
        enable_chunked_prefill: whether a prompt may be computed over several steps.
        long_prefill_token_threshold: most tokens of one sequence in a step, 0 for no such limit; not heeded
            while its request is alone.
        delay_factor: while others run, new prompts wait this many times the duration of the last step that
            admitted one.
        max_loras: most adapters among those that run; None for no limit.
        skip_window: how many waiting groups that cannot run now are passed over in search of one that can.
        most_overtaken: how many may be admitted before a group that stands ahead of them. Then nobody is
            admitted until it is, so nobody waits for ever.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    delay_factor: float = 0.0
    max_loras: int | None = None
    skip_window: int = 8
    most_overtaken: int = 32


class Chunks:
    """How many tokens of a sequence a step computes.

    Attributes:
        most: of any sequence.
    """

    def __init__(self, rules: Rules, table: RequestTable):
        self._rules = rules
        self._table = table
        self.most = rules.max_num_batched_tokens

    def begin_step(self) -> None:
        """A step begins: look whether a request is alone."""
        table, threshold = self._table, self._rules.long_prefill_token_threshold
        is_alone = len(table.running) + len(table.waiting) + len(table.swapped) == 1
        self.most = self._rules.max_num_batched_tokens if is_alone or not threshold else threshold

    def size(self, rest: int, budget: int) -> int:
        """How many of the `rest` tokens that a sequence lacks it computes in a step with so much budget."""
        rules = self._rules
        if not rules.enable_chunked_prefill and budget < rest <= rules.max_num_batched_tokens:
            return 0
        return min(rest, budget, self.most)


class PromptDelay:
    """Holds new prompts back while others run, so that more of them are computed together."""

    def __init__(self, rules: Rules, table: RequestTable, clock: Callable[[], float]):
        self._rules = rules
        self._table = table
        self._clock = clock
        self._begun_at = 0.0
        self._has_admitted = False
        self._latency_s = 0.0

    def begin_step(self) -> None:
        """A step begins; the one before it has ended."""
        if self._rules.delay_factor:
            now = self._clock()
            if self._has_admitted:
                self._latency_s = now - self._begun_at
            self._begun_at, self._has_admitted = now, False

    def admitted(self) -> None:
        """This step computes a prompt."""
        self._has_admitted = True

    def holds(self) -> bool:
        """Whether waiting groups must wait on: somebody runs, and the oldest has not waited long enough."""
        factor = self._rules.delay_factor
        if not factor or not self._table.running or not self._table.waiting:
            return False
        oldest = min(group.request.arrived_at for group in self._table.waiting)
        return self._clock() - oldest <= factor * self._latency_s
