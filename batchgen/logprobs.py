"""Log probabilities as callers see them: Logprob, a position's mapping, and FlatLogprobs for long outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability at a position; rank 1 is the likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# A position: token id -> its log probability. The token that stands there is the first.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class FlatLogprobs(Sequence[PositionLogprobs | None]):
    """Positions kept in five flat lists instead of a mapping each; reads like a list of mappings.

    A tenth of the objects of a list of mappings, which the garbage collector feels when outputs are long.

    Attributes:
        start_indices, end_indices: per position, its stretch of the other lists. Empty for the first token of
            a prompt, which has no log probability: reading that position gives None.
        token_ids, logprobs, ranks, decoded_tokens: the entries.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: PositionLogprobs | None) -> None:
        """Add a position at the end."""
        self.start_indices.append(len(self.token_ids))
        for token, value in (position or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(value.logprob)
            self.ranks.append(value.rank)
            self.decoded_tokens.append(value.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs | None: ...

    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...

    def __getitem__(self, index: int | slice) -> "PositionLogprobs | FlatLogprobs | None":
        if isinstance(index, slice):
            part = FlatLogprobs()
            for position in range(*index.indices(len(self))):
                part.append(self[position])
            return part
        start, end = self.start_indices[index], self.end_indices[index]
        if start == end:
            return None
        return {
            self.token_ids[entry]: Logprob(
                self.logprobs[entry], self.ranks[entry], self.decoded_tokens[entry]
            )
            for entry in range(start, end)
        }

    def __iter__(self) -> Iterator[PositionLogprobs | None]:
        return (self[position] for position in range(len(self)))


# What an output holds for its tokens, or for its prompt.
Logprobs = list[PositionLogprobs] | FlatLogprobs
PromptLogprobs = list[PositionLogprobs | None] | FlatLogprobs
