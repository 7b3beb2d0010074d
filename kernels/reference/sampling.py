"""Draws, scores and penalties of the reference backend: whole distributions in float64, sorted."""

import torch
from torch import Tensor

from batchgen.kernels.sampling import Draws, Penalties, Scores

NEVER = float("-inf")


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """See `Kernels.sample`."""
    best = logits.argmax(dim=1)
    # A NaN counts as the largest.
    is_finite = logits.gather(1, best[:, None])[:, 0].isfinite()
    tokens = torch.where(is_finite, best, -1).cpu()
    drawn = torch.nonzero((draws.temperature > 0) & (tokens >= 0))[:, 0]
    if drawn.numel():
        rows = drawn.to(logits.device)
        scores = filtered(logits[rows], draws, drawn)
        tokens[drawn] = _at(scores, draws.uniform[drawn].to(logits.device)).cpu()
        if draws.is_replaced is not None:
            wanted = draws.is_replaced[drawn].to(logits.device)
            logits[rows[wanted]] = scores[wanted].to(logits.dtype)
    return tokens


def filtered(logits: Tensor, draws: Draws, rows: Tensor) -> Tensor:
    """What `rows` of `draws` are drawn from: logits [R, V] over temperature, -inf for what is left out."""

    def column(values: Tensor) -> Tensor:
        return values[rows].to(logits.device)[:, None]

    top_k, top_p, min_p = column(draws.top_k), column(draws.top_p), column(draws.min_p)
    scores = logits.double() / column(draws.temperature)
    if bool((draws.top_k[rows] > 0).any()):
        width = scores.shape[1]
        place = torch.where((top_k > 0) & (top_k < width), top_k, width) - 1
        kth = scores.sort(dim=1, descending=True).values.gather(1, place)
        scores = scores.masked_fill(scores < kth, NEVER)
    if bool((draws.top_p[rows] < 1).any()):
        sorted_scores, order = scores.sort(dim=1, descending=True, stable=True)
        shares = sorted_scores.softmax(dim=1)
        # A token stays when those before it have not reached the share.
        is_out = (shares.cumsum(dim=1) - shares >= top_p) & (top_p < 1)
        is_out[:, 0] = False
        scores = scores.masked_fill(torch.empty_like(is_out).scatter_(1, order, is_out), NEVER)
    if bool((draws.min_p[rows] > 0).any()):
        likeliest = scores.max(dim=1, keepdim=True).values
        scores = scores.masked_fill((scores - likeliest).exp() < min_p, NEVER)
    return scores


def _at(scores: Tensor, uniform: Tensor) -> Tensor:
    """The ids in which u of the running sum lies; their weight is above 0."""
    sums = (scores - scores.max(dim=1, keepdim=True).values).exp().cumsum(dim=1)
    total = sums[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True)[:, 0]


def score_tokens(logits: Tensor, tokens: Tensor, num_top: Tensor) -> Scores:
    """See `Kernels.score_tokens`."""
    wide = logits.double()
    asked = tokens.to(logits.device)
    values = logits.gather(1, asked.clamp_min(0))
    ranks = torch.stack(
        [(logits > values[:, place : place + 1]).sum(dim=1) + 1 for place in range(tokens.shape[1])], dim=1
    ) if tokens.shape[1] else torch.zeros_like(asked)  # fmt: skip
    most = int(num_top.max()) if num_top.numel() else 0
    top_values, top_ids = logits.sort(dim=1, descending=True, stable=True)
    is_asked = tokens >= 0
    return Scores(
        wide.logsumexp(dim=1).cpu(),
        values.cpu().masked_fill(~is_asked, float("nan")),
        ranks.cpu().masked_fill(~is_asked, 0),
        top_ids[:, :most].cpu().contiguous(),
        top_values[:, :most].cpu().contiguous(),
    )


def penalise(logits: Tensor, penalties: Penalties) -> None:
    """See `Kernels.penalise`."""
    device, width = logits.device, logits.shape[1]
    lengths = penalties.starts.diff()
    row_of = torch.repeat_interleave(torch.arange(lengths.shape[0]), lengths)
    places = torch.arange(row_of.shape[0]) - penalties.starts[:-1][row_of]
    tokens = penalties.tokens.long()
    is_drawn = places >= penalties.num_prompt[row_of]
    is_inside = (tokens >= 0) & (tokens < width)
    cells = (row_of * width + tokens)[is_inside].to(device)
    seen = torch.zeros(lengths.shape[0] * width, dtype=torch.float64, device=device)
    drawn = torch.zeros_like(seen)
    seen[cells] = 1.0
    drawn.index_add_(0, cells, is_drawn[is_inside].to(device, torch.float64))
    seen, drawn = seen.view(-1, width), drawn.view(-1, width)
    rows = penalties.rows.to(device)

    def column(values: Tensor) -> Tensor:
        return values.to(device)[:, None]

    repetition = column(penalties.repetition)
    old = logits[rows].double()
    new = torch.where(old > 0, old / repetition, old * repetition)
    new = torch.where(seen > 0, new, old)
    new = new - column(penalties.frequency) * drawn - column(penalties.presence) * (drawn > 0)
    logits[rows] = new.to(logits.dtype)
