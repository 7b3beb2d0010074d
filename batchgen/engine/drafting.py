"""Drafting: lengthens sequences of a step by drafted tokens, out of what the step has left over. No torch."""

from batchgen.engine.block_manager import BlockManager
from batchgen.engine.metrics import Counters
from batchgen.engine.sequence import Sequence
from batchgen.engine.speculation import Speculation
from batchgen.engine.step import StepBuilder


class Drafting:
    """Joins speculation to the scheduler.

    Drafts come last: they take tokens of the budget and blocks that nobody else wanted in this step, and what
    they leave of blocks is given back when they are judged. So they never cause a preemption.
    """

    def __init__(self, speculation: Speculation, blocks: BlockManager, counters: Counters):
        self.speculation = speculation
        speculation.choices = counters.choices
        self._blocks = blocks

    def extend(self, step: StepBuilder) -> None:
        """Add drafts to a step that is otherwise complete."""
        if not step.draftable or step.budget <= 0:
            return
        sequences = [each.sequence for each in step.draftable]
        # The last token of a sequence is drawn, never drafted: with it the sequence ends.
        rooms = [each.request.max_total_tokens - len(each.token_ids) - 1 for each in sequences]
        drafts = self.speculation.draft(sequences, rooms, step.in_flight.num_rows, step.budget)
        for draftable, tokens in zip(step.draftable, drafts, strict=True):
            if tokens:
                count = self._blocks.grow_for_drafts(draftable.sequence, len(tokens))
                if count:
                    step.add_drafts(draftable, tuple(tokens[:count]))

    def judged(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Of so many drafted tokens of a sequence the first so many were drawn."""
        self.speculation.judged(sequence.seq_id, num_drafted, num_accepted)
        if not sequence.is_finished:
            self._blocks.trim(sequence)
