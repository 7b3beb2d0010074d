"""Log probabilities as Arrow arrays: a text is a list of positions, a position a list of tokens."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa

from batchgen.logprobs import FlatLogprobs, Logprobs, PromptLogprobs

_ENTRY = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32()), ("rank", pa.int32())])
POSITIONS = pa.list_(pa.list_(_ENTRY))


def flat(given: "Logprobs | PromptLogprobs | None") -> FlatLogprobs | None:
    """In flat lists, as they take least memory and become arrays quickest."""
    if given is None or isinstance(given, FlatLogprobs):
        return given
    found = FlatLogprobs()
    for position in given:
        found.append(position)
    return found


def logprob_array(texts: Sequence[FlatLogprobs | None]) -> Any:
    """An array of `POSITIONS`, a position's first token the one that stands there; minus infinity stays.

    A position without any (the first of a prompt) is null, as is a text without log probabilities.
    """
    given = [FlatLogprobs() if text is None else text for text in texts]
    entries = pa.StructArray.from_arrays(
        [
            pa.array(chain.from_iterable(text.token_ids for text in given), pa.int32()),
            pa.array(chain.from_iterable(text.logprobs for text in given), pa.float32()),
            pa.array(chain.from_iterable(text.ranks for text in given), pa.int32()),
        ],
        fields=list(_ENTRY),
    )
    lengths = [
        end - start for text in given for start, end in zip(text.start_indices, text.end_indices, strict=True)
    ]
    positions = _lists(lengths, entries, [not length for length in lengths])
    return _lists([len(text) for text in given], positions, [text is None for text in texts])


def nested_logprob_array(rows: Sequence[Sequence[FlatLogprobs | None] | None]) -> Any:
    """An array of lists of `POSITIONS`: one for each sample of a row."""
    texts = logprob_array(list(chain.from_iterable(row or () for row in rows)))
    return _lists([len(row or ()) for row in rows], texts, [row is None for row in rows])


def _lists(lengths: Sequence[int], values: Any, is_null: Sequence[bool]) -> Any:
    offsets = pa.array(accumulate(lengths, initial=0), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, mask=pa.array(is_null, pa.bool_()))
