"""propose: the tokens that followed the last time a sequence ended as it ends now. No torch."""

from array import array

_TOKEN_BYTES = array("i").itemsize


def propose(tokens: "array[int]", count: int, *, longest: int, shortest: int) -> list[int]:
    """Up to `count` tokens that may come next; none if the end of `tokens` never stood there before.

    The longest end of `shortest` to `longest` tokens that occurred before is taken, and of several places the
    last. Where what followed reaches the end of `tokens`, it goes on as a repetition of itself.

    Source: prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding).
    """
    if count < 1:
        return []
    size = len(tokens)
    haystack = tokens.tobytes()
    for length in range(min(longest, size - 1), shortest - 1, -1):
        place = _last_before_end(haystack, size, length)
        if place is not None:
            start = place + length
            period = size - start
            return [tokens[start + ahead % period] for ahead in range(count)]
    return []


def _last_before_end(haystack: bytes, size: int, length: int) -> int | None:
    """Where the last `length` of `size` tokens stand for the last time before the end, in tokens."""
    needle = haystack[(size - length) * _TOKEN_BYTES :]
    end = (size - 1) * _TOKEN_BYTES
    while True:
        found = haystack.rfind(needle, 0, end)
        if found < 0:
            return None
        if found % _TOKEN_BYTES == 0:
            return found // _TOKEN_BYTES
        # Across the border of two tokens: what is looked for begins further left.
        end = found + len(needle) - 1
