"""DrawRows: the draws of a step as arrays, of which a step that goes on changes next to nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import SamplingRow
from batchgen.kernels.sampling import Draws
from batchgen.worker.random_stream import stream_states, uniforms_at
from batchgen.worker.row_rules import RowRules

Places = npt.NDArray[np.int64]
Ways = npt.NDArray[np.float64]

_FOR_EVER = 2**62


class DrawRows:
    """R draws.

    Args:
        rows: what each asks for; positions may be older ones.
        known: the rules of each.
        positions: [R], of the tokens that are drawn.
        states: [R], of their random streams.
        special_until: [R], the positions at which they begin to ask for nothing but a draw.
        ways: [4, R], the `way` of each.

    Attributes:
        known: the rules of each.
        positions: [R] int64, of the tokens that are drawn.
        is_plain: whether every row asks for a token and nothing else, from its logits as they are.
        is_greedy: whether every row takes the largest logit.
        is_by_temperature: whether no row leaves out any token but for its temperature.
    """

    def __init__(
        self,
        rows: list[SamplingRow],
        known: list[RowRules],
        positions: Places,
        states: npt.NDArray[np.uint64],
        special_until: Places,
        ways: Ways,
    ):
        self.known = known
        self.positions = positions
        self.is_greedy = not ways[0].any()
        self.is_by_temperature = self.is_greedy or not _cuts(ways)
        self._rows = rows
        self._everybody = list(range(len(rows)))
        self._states = states
        self._special_until = special_until
        self.is_plain = self._are_plain()
        self._ways = ways
        # Made when a kernel wants them; `uniform` is that of no draw.
        self._draws: Draws | None = None

    @classmethod
    def of(cls, rows: Sequence[SamplingRow], known: Sequence[RowRules]) -> "DrawRows":
        """The draws that some rows ask for.

        Args:
            rows: one each.
            known: the rules of each.
        """
        ways = np.array([rules.way for rules in known], dtype=np.float64).reshape(-1, 4).T.copy()
        for index, row in enumerate(rows):
            if row.num_candidates:
                ways[0, index] = 0.0
        keys = [row.key for row in rows]
        return cls(
            list(rows),
            list(known),
            np.array([position for _, _, position in keys], dtype=np.int64),
            stream_states(keys),
            np.array([_special_until(*each) for each in zip(rows, known, strict=True)], dtype=np.int64),
            ways,
        )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[SamplingRow]:
        """The draws one by one, brought up to date."""
        for row, position in zip(self._rows, self.positions.tolist(), strict=True):
            ahead = position - row.key[2]
            if ahead:
                # The scheduler made the row for this side alone.
                row.key = (*row.key[:2], position)
                row.num_generated += ahead
        return self._rows

    def slots(self) -> list[int]:
        """The sequence that each token will belong to."""
        return [row.slot for row in self._rows]

    def moved(self, chosen: list[int]) -> "DrawRows":
        """Some of the rows, each a position further; this object itself if they are all in their order."""
        if chosen == self._everybody:
            np.add(self.positions, 1, out=self.positions)
            self.is_plain = self.is_plain or self._are_plain()
            return self
        places = np.array(chosen, dtype=np.int64)
        return DrawRows(
            [self._rows[place] for place in chosen],
            [self.known[place] for place in chosen],
            self.positions[places] + 1,
            self._states[places],
            self._special_until[places],
            np.take(self._ways, places, axis=1),
        )

    def followed_by(self, others: "DrawRows") -> "DrawRows":
        """These, then others."""
        return DrawRows(
            [*self._rows, *others._rows],
            [*self.known, *others.known],
            np.concatenate((self.positions, others.positions)),
            np.concatenate((self._states, others._states)),
            np.concatenate((self._special_until, others._special_until)),
            np.concatenate((self._ways, others._ways), axis=1),
        )

    def draws(self, is_replaced: Tensor | None = None) -> Draws:
        """How the kernels draw them; see `Draws.is_replaced`."""
        if self._draws is None:
            temperature, top_k, top_p, min_p = self._ways
            self._draws = Draws(
                temperature=torch.from_numpy(temperature),
                top_k=torch.from_numpy(top_k.astype(np.int64)),
                top_p=torch.from_numpy(top_p),
                min_p=torch.from_numpy(min_p),
                uniform=torch.zeros(len(self), dtype=torch.float64),
            )
        # A greedy row looks at no random number.
        if self.is_greedy and is_replaced is None:
            return self._draws
        uniform = torch.from_numpy(uniforms_at(self._states, self.positions))
        return replace(self._draws, uniform=uniform, is_replaced=is_replaced)

    def _are_plain(self) -> bool:
        return bool((self.positions >= self._special_until).all())


class NewestTokens(Mapping[int, int]):
    """Sequence -> the token that the last step drew for it; made only when somebody looks."""

    def __init__(self, draws: DrawRows | None = None, tokens: Sequence[int | None] = ()):
        self._draws, self._tokens = draws, tokens
        self._made: dict[int, int] | None = None

    def __getitem__(self, slot: int) -> int:
        return self._tokens_by_slot()[slot]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens_by_slot())

    def __len__(self) -> int:
        return len(self._tokens_by_slot())

    def _tokens_by_slot(self) -> dict[int, int]:
        if self._made is None:
            slots = [] if self._draws is None else self._draws.slots()
            self._made = {slot: token or 0 for slot, token in zip(slots, self._tokens, strict=True)}
        return self._made


def _cuts(ways: Ways) -> bool:
    """Whether a row that is drawn by chance leaves out tokens."""
    temperature, top_k, top_p, min_p = ways
    return bool((((top_k > 0) | (top_p < 1) | (min_p > 0)) & (temperature > 0)).any())


def _special_until(row: SamplingRow, rules: RowRules) -> int:
    """The first position at which a row asks for nothing but a draw from its logits as they are."""
    if rules.is_edited or rules.num_logprobs is not None or row.num_candidates:
        return _FOR_EVER
    return row.key[2] - row.num_generated + rules.min_tokens if rules.holds_back_ends else 0
