"""StepPart: some sequences of a step as numpy arrays, and which of their tokens need logits."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from batchgen.engine.scheduler_output import PromptScores, SamplingRow, ScheduledSequence
from batchgen.errors import EngineError

UNKNOWN = -1


@dataclass(slots=True)
class StepPart:
    """Some sequences of a step, one after the other (T tokens, S sequences).

    Args:
        token_ids, positions: [T].
        lens: [S], tokens of each.
        seq_lens: [S], those computed before included.
        tables: per KV group, all blocks of each: [S, M], -1 where there is none.
        slots: [S], those of their adapters, `UNKNOWN` for the base model; None if all are of that.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    lens: np.ndarray
    seq_lens: np.ndarray
    tables: list[np.ndarray]
    slots: np.ndarray | None = None


class WantedLogits:
    """Which tokens of a step need logits, and for what; places are those in the flat step.

    `num_continued` sequences with a token and a draw each come before all others.
    """

    def __init__(self, num_continued: int) -> None:
        self.num_continued = num_continued
        self.samples: list[SamplingRow] = []
        self.sequence_of_sample: list[int] = []
        self.sample_rows = list(range(num_continued))
        self.drawn: list[int] = []
        self.scores: list[tuple[int, PromptScores]] = []
        self.scored: list[int] = []

    def logit_rows(self) -> np.ndarray:
        """All that need logits: those that go on, the other draws, the scores."""
        others = np.array(self.drawn + self.scored, dtype=np.int64)
        return np.concatenate((np.arange(self.num_continued), others)) if self.num_continued else others

    def add(self, sequence: ScheduledSequence, place: int, begin: int) -> None:
        """A sequence at its place in the step, whose tokens begin at `begin`."""
        count = len(sequence.token_ids)
        rows: dict[int, int] = {}
        for sample in sequence.samples:
            at = sample.token_index + count if sample.token_index < 0 else sample.token_index
            if not 0 <= at < count:
                raise EngineError(
                    f"sequence {sequence.seq_id}: a draw from token {sample.token_index} of {count}"
                )
            row = rows.get(at)
            if row is None:
                row = rows[at] = self.num_continued + len(self.drawn)
                self.drawn.append(begin + at)
            self.samples.append(sample)
            self.sequence_of_sample.append(place)
            self.sample_rows.append(row)
        scores = sequence.scores
        if scores is not None:
            first = scores.start - 1 - sequence.num_computed_tokens
            if first < 0 or first + len(scores.targets) > count:
                raise EngineError(
                    f"sequence {sequence.seq_id}: {len(scores.targets)} scores from position {scores.start} "
                    f"on, of {count} tokens from {sequence.num_computed_tokens} on"
                )
            self.scores.append((sequence.seq_id, scores))
            self.scored += range(begin + first, begin + first + len(scores.targets))


def flat_tokens(
    sequences: tuple[ScheduledSequence, ...], wanted: WantedLogits
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids one after the other [T], and per sequence how many there are and were computed before."""
    flat = array("q")
    lens = np.empty(len(sequences), dtype=np.int32)
    computed = np.empty(len(sequences), dtype=np.int32)
    first = wanted.num_continued
    for index, sequence in enumerate(sequences):
        begin = first + len(flat)
        flat.extend(sequence.token_ids)
        lens[index] = len(sequence.token_ids)
        computed[index] = sequence.num_computed_tokens
        if sequence.samples or sequence.scores is not None:
            wanted.add(sequence, first + index, begin)
    if sequences and not lens.all():
        raise EngineError(f"sequence {sequences[int(lens.argmin())].seq_id} was scheduled without tokens")
    token_ids = np.frombuffer(flat, dtype=np.int64).copy() if flat else np.empty(0, dtype=np.int64)
    return token_ids, lens, computed


def block_tables(sequences: tuple[ScheduledSequence, ...], group: int) -> np.ndarray:
    """All blocks of each sequence in a KV group: [S, M]."""
    rows = [sequence.block_ids[group] for sequence in sequences]
    tables = np.full((len(rows), max(map(len, rows), default=0)), UNKNOWN, dtype=np.int32)
    for index, blocks in enumerate(rows):
        tables[index, : len(blocks)] = blocks
    return tables


def cut_tables(tables: np.ndarray, width: int) -> np.ndarray:
    """As many columns as there are to be read."""
    if tables.shape[1] < width:
        return widened_tables(tables, width)
    return tables if tables.shape[1] == width else np.ascontiguousarray(tables[:, :width])


def blocks_beyond(tables: np.ndarray, width: int) -> bool:
    """Whether there is a block behind so many columns."""
    return tables.shape[1] > width and int(tables[:, width:].max(initial=UNKNOWN)) > UNKNOWN


def widened_tables(tables: np.ndarray, width: int) -> np.ndarray:
    """The same with more columns, in which there is no block."""
    wide = np.full((len(tables), width), UNKNOWN, dtype=np.int32)
    wide[:, : tables.shape[1]] = tables
    return wide


def joined_parts(first: StepPart, second: StepPart) -> StepPart:
    """Some sequences, then others."""
    tables = []
    for pair in zip(first.tables, second.tables, strict=True):
        width = max(table.shape[1] for table in pair)
        tables.append(np.concatenate([cut_tables(table, width) for table in pair]))
    return StepPart(
        np.concatenate((first.token_ids, second.token_ids)),
        np.concatenate((first.positions, second.positions)),
        np.concatenate((first.lens, second.lens)),
        np.concatenate((first.seq_lens, second.seq_lens)),
        tables,
        _joined_slots(first, second),
    )


def _joined_slots(first: StepPart, second: StepPart) -> np.ndarray | None:
    if first.slots is None and second.slots is None:
        return None
    return np.concatenate(
        [
            np.full(len(part.lens), UNKNOWN, dtype=np.int32) if part.slots is None else part.slots
            for part in (first, second)
        ]
    )


def fill_unknown(
    token_ids: np.ndarray,
    starts: np.ndarray,
    sequences: tuple[ScheduledSequence, ...],
    newest: Mapping[int, int],
) -> None:
    """Put in the tokens that the scheduler did not know; `newest` has what each sequence drew last."""
    for at in np.flatnonzero(token_ids < 0):
        sequence = sequences[int(np.searchsorted(starts, at, side="right")) - 1]
        if token_ids[at] != UNKNOWN or sequence.seq_id not in newest:
            raise EngineError(
                f"sequence {sequence.seq_id}: token id {token_ids[at]} stands for no known token"
            )
        token_ids[at] = newest[sequence.seq_id]
