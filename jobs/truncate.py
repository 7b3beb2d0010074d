"""Cutting a text so that a whole prompt has at most so many tokens, and as many as that allows."""

from collections.abc import Callable


def cut_text(text: str, kept: int, side: str) -> str:
    """The text cut down to `kept` characters on that side: "left", "right" or "middle"."""
    if side == "left":
        return text[len(text) - kept :]
    if side == "right":
        return text[:kept]
    tail = kept // 2
    return text[: kept - tail] + text[len(text) - tail :]


def longest_fitting(length: int, guess: int, fits: Callable[[int], bool]) -> int | None:
    """The largest number of characters, below `length`, that fits; None when not even 0 does.

    Searches outwards from the guess, so that a good one costs few calls, and none with much longer texts.

    Args:
        length: a number that does not fit.
        guess: where to begin.
        fits: whether so many characters fit; taken to be true up to some number and false from there on.
    """
    low, high = -1, length
    probe, step = min(max(guess, 0), length - 1), max(1, guess // 16)
    while high - low > 1:
        if fits(probe):
            low = probe
        else:
            high = probe
        if low < 0:
            probe, step = max(0, high - step), step * 2
        elif high == length:
            probe, step = min(length - 1, low + step), step * 2
        else:
            probe = (low + high) // 2
    return low if low >= 0 else None
