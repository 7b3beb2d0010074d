"""edit_logits: all that changes rows of logits before a token is drawn from them, for a whole batch at once.

The order is vLLM's: allowed_token_ids, bad_words, min_tokens, logit_bias, then the penalties (repetition,
frequency, presence). A thinking budget that is used up leaves one token, whatever else was said. Grammars
follow (batchgen.structured), then the draw: temperature, top_k, top_p, min_p, in transformers' order. (vLLM
has min_p before top_k; that is another distribution only where both cut.)
"""

from array import array
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import SamplingRow
from batchgen.kernels.ops import Kernels
from batchgen.kernels.sampling import Penalties
from batchgen.worker.row_rules import Ids, RowRules
from batchgen.worker.thinking import ThinkingMarks

NEVER = float("-inf")


def edit_logits(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    known: Sequence[RowRules],
    newest: Mapping[int, int],
    kernels: Kernels,
    marks: ThinkingMarks | None,
) -> None:
    """Change logits [R, V] in place as the rules of each row say.

    Args:
        logits: float32, contiguous.
        rows: the draw of each row.
        known: the rules of each row.
        newest: slot -> the token drawn by the step before.
        kernels: for the penalties.
        marks: of thinking sections; None where no row may have a budget.
    """
    allowed: list[tuple[int, Ids]] = []
    held: list[tuple[int, Ids]] = []
    biased: list[tuple[int, Ids]] = []
    values: list[npt.NDArray[np.float32]] = []
    penalised: list[tuple[int, RowRules, SamplingRow, array[int]]] = []
    forced: list[tuple[int, Ids]] = []
    for index, (row, rules) in enumerate(zip(rows, known, strict=True)):
        if not rules.edits(row):
            continue
        history = row.tokens_before(newest) if row.rules.needs_history else None
        if rules.allowed is not None:
            allowed.append((index, rules.allowed))
        held_back = rules.held_back(row, history)
        if held_back.size:
            held.append((index, held_back))
        if rules.bias_ids.size:
            biased.append((index, rules.bias_ids))
            values.append(rules.bias_values)
        if rules.penalties is not None and history is not None:
            penalised.append((index, rules, row, history))
        if rules.thinking_budget is not None and history is not None and marks is not None:
            token = marks.forced_token(history, rules.thinking_budget)
            if token is not None:
                forced.append((index, np.array([token])))
    if allowed:
        _keep_only(logits, allowed)
    flat = logits.view(-1)
    if held:
        flat[_cells(logits, held)] = NEVER
    if biased:
        flat[_cells(logits, biased)] += torch.from_numpy(np.concatenate(values)).to(logits.device)
    if penalised:
        kernels.penalise(logits, _penalties(penalised))
    if forced:
        logits[[index for index, _ in forced]] = NEVER
        flat[_cells(logits, forced)] = 0.0


def _cells(logits: Tensor, ids: Sequence[tuple[int, Ids]]) -> Tensor:
    """Places in the flat logits of some ids of some rows."""
    width = logits.shape[1]
    places = np.concatenate([index * width + each for index, each in ids])
    return torch.from_numpy(places).to(logits.device)


def _keep_only(logits: Tensor, allowed: Sequence[tuple[int, Ids]]) -> None:
    flat, cells = logits.view(-1), _cells(logits, allowed)
    kept = flat[cells]
    logits[[index for index, _ in allowed]] = NEVER
    flat[cells] = kept


def _penalties(rows: "Sequence[tuple[int, RowRules, SamplingRow, array[int]]]") -> Penalties:
    lengths = [row.key[2] for _, _, row, _ in rows]
    costs = np.array([rules.penalties for _, rules, _, _ in rows], dtype=np.float64)
    # Copies: an array cannot grow while something looks at its memory.
    tokens = np.concatenate([np.frombuffer(history, dtype=np.int32) for _, _, _, history in rows])

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64)

    repetition, frequency, presence = (torch.from_numpy(costs[:, part].copy()) for part in range(3))
    return Penalties(
        rows=tensor([index for index, *_ in rows]),
        tokens=torch.from_numpy(tokens),
        starts=torch.from_numpy(np.cumsum([0, *lengths])),
        num_prompt=tensor([row.rules.num_prompt_tokens for _, _, row, _ in rows]),
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )
