"""Which KV blocks a layer with a sliding window reads and keeps. No torch."""


def first_in_window(position: int, window: int | None, block_size: int) -> int:
    """The first block that the query at `position` reads; it reads itself and the `window - 1` before it."""
    return 0 if window is None else max(position - window + 1, 0) // block_size


def blocks_in_window(num_tokens: int, window: int | None, block_size: int, chunk: int = 1) -> int:
    """Blocks that one group of layers keeps for a sequence of which a step computes `chunk` tokens."""
    whole = -(-num_tokens // block_size)
    if window is None:
        return whole
    # The first query of a chunk sees window - 1 positions before its own, anywhere among the blocks.
    return min(whole, (window - 1 + chunk - 2) // block_size + 2)
