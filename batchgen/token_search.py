"""last_place: where one run of token ids stands in another. No torch."""

from array import array

_TOKEN_BYTES = array("i").itemsize


def last_place(wanted: bytes, tokens: bytes, end: int) -> int | None:
    """Where a run of tokens stands for the last time before the token `end`; None if it does not.

    Both are the bytes of an int32 array: so a search of thousands of tokens takes microseconds.
    """
    stop = end * _TOKEN_BYTES
    while (found := tokens.rfind(wanted, 0, stop)) >= 0:
        if found % _TOKEN_BYTES == 0:
            return found // _TOKEN_BYTES
        # Across the border of two tokens: what is looked for begins further left.
        stop = found + len(wanted) - 1
    return None
