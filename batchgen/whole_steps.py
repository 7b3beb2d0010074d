"""WholeSteps: spells out the sequences that a step only names, for executors that look at each by itself."""

from collections.abc import Sequence
from dataclasses import replace

from batchgen.engine.scheduler_output import ScheduledSequence, SchedulerOutput


class WholeSteps:
    """Remembers the parts of the last step, of which the next one may continue some."""

    def __init__(self) -> None:
        self._step = -1
        # By row of the last step: the part that it was drawn from, if that may go on.
        self._parts: list[ScheduledSequence | None] = []
        self._tokens: list[int | None] = []

    def spelled_out(self, step: SchedulerOutput) -> SchedulerOutput:
        """The same step with a part for every sequence, those that go on first."""
        parts = (*self._going_on(step), *step.sequences)
        self._step = step.step
        self._parts = [
            part if len(part.samples) == 1 and not row.num_candidates else None
            for part in parts
            for row in part.samples
        ]
        return replace(step, sequences=parts, continued=None)

    def drawn(self, tokens: Sequence[int | None]) -> None:
        """What the step drew, in the order of its rows."""
        self._tokens = list(tokens)

    def _going_on(self, step: SchedulerOutput) -> list[ScheduledSequence]:
        continued = step.continued
        if continued is None:
            return []
        assert continued.step == self._step, f"step {step.step} continues {continued.step}, not {self._step}"
        found = []
        for place, row in enumerate(continued.rows):
            part, token = self._parts[row], self._tokens[row]
            assert part is not None and token is not None, f"row {row} of step {continued.step} cannot go on"
            found.append(_next(part, token, continued.tables.get(place, part.block_ids)))
        return found


def _next(part: ScheduledSequence, token: int, tables: tuple[list[int], ...]) -> ScheduledSequence:
    """What a sequence computes after it drew a token from the last of a part."""
    (row,) = part.samples
    seed, index, position = row.key
    following = replace(row, key=(seed, index, position + 1), num_generated=row.num_generated + 1)
    return replace(
        part,
        token_ids=[token],
        num_computed_tokens=part.num_computed_tokens + len(part.token_ids),
        block_ids=tables,
        samples=(following,),
        scores=None,
    )
