"""What the sampling operations of `Kernels` take and give, and the checks of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.errors import KernelError, ShapeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How a token is drawn from each of R rows; every tensor is [R], on the CPU.

    Args:
        temperature: float64; 0 takes the largest logit, the lowest id of several.
        top_k: int64; only logits not below the k-th largest are drawn; 0 for all, as is more than there are.
        top_p: float64; then the fewest likeliest that reach this share, the lowest ids of equal ones.
        min_p: float64; then those at least this part as likely as the likeliest.
        uniform: float64 in [0, 1): where in the running sum of what is left, in the order of ids, the token
            lies.
        is_replaced: bool, or None for no row; such a row of logits becomes what was drawn from: divided by
            temperature, -inf for what could not be drawn.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    is_replaced: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """What was seen before each of S rows of logits, and what that costs; on the CPU.

    Args:
        rows: [S] int64, none twice.
        tokens: [H] int32, the histories one after the other; ids that the logits do not have are passed over.
        starts: [S + 1] int64; row s has tokens[starts[s]] up to tokens[starts[s + 1]].
        num_prompt: [S] int64, how many of these were not drawn.
        repetition: [S] float64; positive logits of what was seen are divided by it, others multiplied.
        frequency: [S] float64; then taken off for each time that it was drawn.
        presence: [S] float64; then taken off once if it was drawn.
    """

    rows: Tensor
    tokens: Tensor
    starts: Tensor
    num_prompt: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True)
class Scores:
    """What `Kernels.score_tokens` says of R rows, on the CPU.

    Args:
        log_total: [R] float64, the logarithm of the sum of e^logit; NaN if a logit is.
        values: [R, M] float32, the logits of the tokens asked for; NaN where none was.
        ranks: [R, M] int64, 1 + how many logits are larger; 0 where none was asked for.
        top_ids: [R, K] int64, the largest, the lowest id first among equals; K is the most that any row
            wants, and what is past a row's own number means nothing.
        top_values: [R, K] float32.
    """

    log_total: Tensor
    values: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor


def check_columns(op: str, dtype: torch.dtype, shape: tuple[int, ...], **tensors: Tensor) -> None:
    """Want contiguous tensors on the CPU of one shape and dtype."""
    for name, tensor in tensors.items():
        if (
            tensor.shape != shape
            or tensor.dtype is not dtype
            or not tensor.is_cpu
            or not tensor.is_contiguous()
        ):
            raise ShapeError(
                f"{op}: {name} must be {list(shape)} {dtype}, contiguous, on the CPU; got "
                f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )


def check_draws(logits: Tensor, draws: Draws) -> None:
    """Want one of everything for each row."""
    shape = (logits.shape[0],)
    check_columns(
        "sample", torch.float64, shape,
        temperature=draws.temperature, top_p=draws.top_p, min_p=draws.min_p, uniform=draws.uniform,
    )  # fmt: skip
    check_columns("sample", torch.int64, shape, top_k=draws.top_k)
    if draws.is_replaced is not None:
        check_columns("sample", torch.bool, shape, is_replaced=draws.is_replaced)


def check_asked(logits: Tensor, tokens: Tensor, num_top: Tensor) -> None:
    """Want tokens [R, M], -1 or ids of the logits; num_top [R], 0 to V."""
    rows, width = logits.shape
    check_columns("score_tokens", torch.int64, (rows, tokens.shape[-1]), tokens=tokens)
    check_columns("score_tokens", torch.int64, (rows,), num_top=num_top)
    if tokens.numel() and (int(tokens.max()) >= width or int(tokens.min()) < -1):
        raise KernelError(f"score_tokens: a token id is outside of the {width} logits")
    if rows and (int(num_top.max()) > width or int(num_top.min()) < 0):
        raise KernelError(f"score_tokens: num_top must be 0 to {width}")


def check_penalties(logits: Tensor, penalties: Penalties) -> None:
    """Want rows of the logits, and starts that lie within the tokens in order."""
    count, total = penalties.rows.shape[0], penalties.tokens.shape[0]
    check_columns("penalise", torch.int64, (count,), rows=penalties.rows, num_prompt=penalties.num_prompt)
    check_columns("penalise", torch.int64, (count + 1,), starts=penalties.starts)
    check_columns("penalise", torch.int32, (total,), tokens=penalties.tokens)
    check_columns(
        "penalise", torch.float64, (count,),
        repetition=penalties.repetition, frequency=penalties.frequency, presence=penalties.presence,
    )  # fmt: skip
    starts = penalties.starts
    if int(starts[0]) != 0 or int(starts[-1]) != total or bool((starts[1:] < starts[:-1]).any()):
        raise KernelError(f"penalise: starts must run from 0 to the {total} tokens; got {starts.tolist()}")
    if count and not 0 <= int(penalties.rows.min()) <= int(penalties.rows.max()) < logits.shape[0]:
        raise KernelError(f"penalise: a row is outside of the {logits.shape[0]}")
