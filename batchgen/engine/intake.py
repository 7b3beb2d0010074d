"""Intake: takes in what a step drew: tokens, drafts that proved right, log probabilities, ends."""

from typing import Protocol

from batchgen.engine.beam import Candidates
from batchgen.engine.going_on import Drafts, StepInFlight
from batchgen.engine.group import Group
from batchgen.engine.metrics import Counters
from batchgen.engine.pins import Pins
from batchgen.engine.refusals import overflowed, undrawable
from batchgen.engine.request_table import ERROR, RequestTable
from batchgen.engine.scheduler_output import StepResult
from batchgen.engine.sequence import Sequence
from batchgen.engine.stop import Stop
from batchgen.errors import EngineError
from batchgen.outputs import FinishReason, RowFailure


class BeamStepper(Protocol):
    """Continues beam searches."""

    def advance(self, group: Group, candidates: list[tuple[Sequence, Candidates]]) -> None:
        """Take in the candidates of all beams of a group that is not finished."""


class DraftJudge(Protocol):
    """Wants to know what became of drafts."""

    def judged(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Of so many drafted tokens of a sequence the first so many were drawn."""


class Intake:
    """Adds what steps drew to the sequences of a table."""

    def __init__(
        self,
        table: RequestTable,
        pins: Pins,
        counters: Counters,
        beams: BeamStepper,
        draft_judge: DraftJudge | None = None,
    ):
        self._table = table
        self._pins = pins
        self._counters = counters
        self._beams = beams
        self._draft_judge = draft_judge

    def take(self, step: StepInFlight, result: StepResult, now: float) -> None:
        """Take in one step's result, which came at `now`.

        Raises:
            EngineError: it has not as many tokens as were due.
        """
        if step.num_rows != len(result.token_ids):
            raise EngineError(
                f"step {result.step} drew {len(result.token_ids)} tokens; {step.num_rows} were due"
            )
        for seq_id, scores in result.prompt_logprobs.items():
            request = step.scored[seq_id]
            request.prompt_logprobs += scores
            request.num_scores += len(scores)
        self._take_continued(step.continued, result, now)
        beams: dict[int, dict[Sequence, int]] = {}
        row = len(step.continued)
        for sequence, drafts in step.draws:
            sequence.num_placeholders -= 1
            if not sequence.is_finished:
                request = sequence.request
                request.last_token_at = now
                if request.first_token_at is None:
                    request.first_token_at = now
                if drafts:
                    self._take_drafted(sequence, drafts, row, result)
                elif sequence.group.beam is not None:
                    beams.setdefault(id(sequence.group), {})[sequence] = row
                else:
                    self._take_row(sequence, row, result)
            row += 1 + len(drafts)
        for rows in beams.values():
            self._take_beams(rows, result)
        for sequence in step.pinned:
            if not sequence.is_finished:
                self._pins.pin(sequence)
                self._table.finish(sequence, Stop(FinishReason.STOP))

    def _take_continued(self, sequences: list[Sequence], result: StepResult, now: float) -> None:
        """One token for each; their rows are the first."""
        is_plain = not (result.logprobs or result.grammar)
        tokens, accept = result.token_ids, self._table.accept
        for row, sequence in enumerate(sequences):
            sequence.num_placeholders -= 1
            if sequence.is_finished:
                continue
            sequence.request.last_token_at = now
            token = tokens[row]
            if is_plain and token is not None:
                accept(sequence, token)
            else:
                self._take_row(sequence, row, result)

    def _take_drafted(self, sequence: Sequence, drafts: Drafts, row: int, result: StepResult) -> None:
        """Accept drawn tokens while they are those that were drafted, and the first that is not."""
        num_accepted = 0
        for ahead, draft in enumerate((*drafts, None)):
            if sequence.is_finished:
                break
            self._take_row(sequence, row + ahead, result)
            token = result.token_ids[row + ahead]
            if token is None or token != draft:
                break
            num_accepted += 1
        self._counters.num_draft_tokens += len(drafts)
        self._counters.num_accepted_tokens += num_accepted
        if self._draft_judge is not None:
            self._draft_judge.judged(sequence, len(drafts), num_accepted)
        if not sequence.is_finished:
            # What was written after the last accepted token is written again.
            sequence.num_computed_tokens = min(sequence.num_computed_tokens, len(sequence.token_ids) - 1)

    def _take_beams(self, rows: dict[Sequence, int], result: StepResult) -> None:
        """Continue a beam search; its beams and their rows are given in the order of their rank."""
        candidates: list[tuple[Sequence, Candidates]] = []
        for beam, row in rows.items():
            found: Candidates | None = result.candidates.get(row)
            if found is None and row in result.failures:
                found = [], []  # Nothing is allowed to follow this beam; others may go on.
            if found is None:
                break
            candidates.append((beam, found))
        if len(candidates) == len(rows) and any(ids for _, (ids, _) in candidates):
            self._beams.advance(beam.group, candidates)
        else:
            self._table.fail_group(beam.group, _no_token(beam, row, result))

    def _take_row(self, sequence: Sequence, row: int, result: StepResult) -> None:
        token = result.token_ids[row]
        if token is None:
            self._table.finish(sequence, ERROR, _no_token(sequence, row, result))
            return
        if row in result.logprobs:
            sequence.logprobs.append(result.logprobs[row])
        is_complete = False
        if row in result.grammar:
            state = result.grammar[row]
            sequence.is_valid, is_complete = state.is_accepting, state.is_complete
        self._table.accept(sequence, token, is_complete=is_complete)


def _no_token(sequence: Sequence, row: int, result: StepResult) -> RowFailure:
    """Why a row has no token."""
    why = result.failures.get(row)
    return overflowed(sequence) if why is None else undrawable(sequence, why)
