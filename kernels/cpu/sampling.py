"""Draws, scores and penalties of the cpu backend: calls into sampling.c and scoring.c."""

import torch
from torch import Tensor

from batchgen.errors import KernelError
from batchgen.kernels.cpu.library import Library
from batchgen.kernels.sampling import Draws, Penalties, Scores

# Logits may be of any model: only these need not be of the backend's own dtype.
OPERATIONS = frozenset({"sample", "score_tokens", "penalise"})


def sample(library: Library, logits: Tensor, draws: Draws) -> Tensor:
    """See `Kernels.sample`."""
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    status = library.sample(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        width,
        draws.temperature.data_ptr(),
        draws.top_k.data_ptr(),
        draws.top_p.data_ptr(),
        draws.min_p.data_ptr(),
        draws.uniform.data_ptr(),
        None if draws.is_replaced is None else draws.is_replaced.data_ptr(),
        tokens.data_ptr(),
        torch.get_num_threads(),
    )
    _check("sample", status)
    return tokens


def score_tokens(library: Library, logits: Tensor, tokens: Tensor, num_top: Tensor) -> Scores:
    """See `Kernels.score_tokens`."""
    rows, width = logits.shape
    most = int(num_top.max()) if rows else 0
    log_total = torch.empty(rows, dtype=torch.float64)
    ranks = torch.empty(tokens.shape, dtype=torch.int64)
    top_ids = torch.zeros((rows, most), dtype=torch.int64)
    top_values = torch.full((rows, most), float("nan"))
    status = library.score_tokens(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        width,
        tokens.data_ptr(),
        tokens.shape[1],
        num_top.data_ptr(),
        most,
        log_total.data_ptr(),
        ranks.data_ptr(),
        top_ids.data_ptr(),
        top_values.data_ptr(),
        torch.get_num_threads(),
    )
    _check("score_tokens", status)
    values = logits.gather(1, tokens.clamp_min(0)).masked_fill_(tokens < 0, float("nan"))
    return Scores(log_total, values, ranks, top_ids, top_values)


def penalise(library: Library, logits: Tensor, penalties: Penalties) -> None:
    """See `Kernels.penalise`."""
    status = library.penalise(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        penalties.rows.data_ptr(),
        penalties.rows.shape[0],
        penalties.tokens.data_ptr(),
        penalties.starts.data_ptr(),
        penalties.num_prompt.data_ptr(),
        penalties.repetition.data_ptr(),
        penalties.frequency.data_ptr(),
        penalties.presence.data_ptr(),
        torch.get_num_threads(),
    )
    _check("penalise", status)


def _check(op: str, status: int) -> None:
    if status:
        raise KernelError(f"{op}: out of memory for scratch space")
