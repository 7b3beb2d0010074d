"""history_of: the tokens that stand before a draw."""

from array import array
from collections.abc import Mapping

from batchgen.engine.scheduler_output import SamplingRow
from batchgen.errors import EngineError


def history_of(row: SamplingRow, newest: Mapping[int, int]) -> "array[int]":
    """Prompt, drawn tokens and drafts before a draw, `row.key[2]` of them. May be the sequence's own array.

    Args:
        row: one whose rules need it.
        newest: slot -> the token drawn by the step before, for a history that lacks it.

    Raises:
        EngineError: the scheduler gave too little.
    """
    history, count = row.history, row.key[2] - len(row.drafts)
    if history is None or len(history) < count - 1:
        known = None if history is None else len(history)
        raise EngineError(f"sequence {row.slot}: a draw at position {row.key[2]} comes with {known} tokens")
    if len(history) == count and not row.drafts:
        return history
    tokens = history[:count]
    if len(tokens) < count:
        tokens.append(newest[row.slot])
    tokens.extend(row.drafts)
    return tokens
