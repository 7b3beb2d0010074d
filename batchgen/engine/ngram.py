"""propose: the tokens that followed the last time a sequence ended as it ends now. No torch."""

from array import array

from batchgen.token_search import last_place


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
        place = last_place(tokens[-length:].tobytes(), haystack, size - 1)
        if place is not None:
            start = place + length
            period = size - start
            return [tokens[start + ahead % period] for ahead in range(count)]
    return []
