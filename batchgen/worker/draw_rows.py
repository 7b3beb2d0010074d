"""DrawRows: the draws of a step as arrays, of which a step that goes on changes next to nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import SamplingRow
from batchgen.kernels.sampling import Draws
from batchgen.worker.random_stream import stream_states, uniforms_at
from batchgen.worker.row_rules import RowRules

Places = npt.NDArray[np.int64]

_FOR_EVER = 2**62


class DrawRows:
    """R draws.

    Attributes:
        known: the rules of each.
        positions: [R] int64, of the tokens that are drawn.
        is_plain: whether every row asks for a token and nothing else, from its logits as they are.
    """

    def __init__(
        self,
        rows: list[SamplingRow],
        known: list[RowRules],
        positions: Places,
        states: npt.NDArray[np.uint64],
        special_until: Places,
        draws: Draws,
        ways: "_Ways | None" = None,
    ):
        self.known = known
        self.positions = positions
        self.is_plain = bool((positions >= special_until).all())
        self._rows = rows
        self._states = states
        self._special_until = special_until
        # `uniform` is that of another step, or of no draw.
        self._draws = draws
        self._ways = ways or _Ways.of(draws)

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
        draws = Draws(
            temperature=torch.from_numpy(ways[0]),
            top_k=torch.from_numpy(ways[1].astype(np.int64)),
            top_p=torch.from_numpy(ways[2]),
            min_p=torch.from_numpy(ways[3]),
            uniform=torch.zeros(len(keys), dtype=torch.float64),
        )
        return cls(
            list(rows),
            list(known),
            np.array([position for _, _, position in keys], dtype=np.int64),
            stream_states(keys),
            np.array([_special_until(*each) for each in zip(rows, known, strict=True)], dtype=np.int64),
            draws,
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

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the largest logit."""
        return self._ways.is_greedy

    @property
    def is_by_temperature(self) -> bool:
        """Whether no row leaves out any token but for its temperature."""
        return self._ways.is_by_temperature

    def slots(self) -> list[int]:
        """The sequence that each token will belong to."""
        return [row.slot for row in self._rows]

    def moved(self, places: Places) -> "DrawRows":
        """Some of the rows, each a position further."""
        if len(places) == len(self) and bool((places == np.arange(len(self))).all()):
            return DrawRows(
                self._rows, self.known, self.positions + 1, self._states, self._special_until, self._draws,
                self._ways,
            )  # fmt: skip
        chosen, index = places.tolist(), torch.from_numpy(places)
        draws = self._draws
        return DrawRows(
            [self._rows[place] for place in chosen],
            [self.known[place] for place in chosen],
            self.positions[places] + 1,
            self._states[places],
            self._special_until[places],
            Draws(
                temperature=draws.temperature[index],
                top_k=draws.top_k[index],
                top_p=draws.top_p[index],
                min_p=draws.min_p[index],
                uniform=draws.uniform[index],
            ),
        )

    def followed_by(self, others: "DrawRows") -> "DrawRows":
        """These, then others."""
        mine, theirs = self._draws, others._draws
        return DrawRows(
            [*self._rows, *others._rows],
            [*self.known, *others.known],
            np.concatenate((self.positions, others.positions)),
            np.concatenate((self._states, others._states)),
            np.concatenate((self._special_until, others._special_until)),
            Draws(
                temperature=torch.cat((mine.temperature, theirs.temperature)),
                top_k=torch.cat((mine.top_k, theirs.top_k)),
                top_p=torch.cat((mine.top_p, theirs.top_p)),
                min_p=torch.cat((mine.min_p, theirs.min_p)),
                uniform=torch.cat((mine.uniform, theirs.uniform)),
            ),
        )

    def draws(self, is_replaced: Tensor | None = None) -> Draws:
        """How the kernels draw them; see `Draws.is_replaced`."""
        # A greedy row looks at no random number.
        if self.is_greedy and is_replaced is None:
            return self._draws
        uniform = torch.from_numpy(uniforms_at(self._states, self.positions))
        return replace(self._draws, uniform=uniform, is_replaced=is_replaced)


@dataclass(frozen=True, slots=True)
class _Ways:
    """What holds of the ways in which all rows are drawn."""

    is_greedy: bool
    is_by_temperature: bool

    @classmethod
    def of(cls, draws: Draws) -> "_Ways":
        is_drawn = draws.temperature > 0
        cuts = (draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0)
        return cls(not bool(is_drawn.any()), not bool((cuts & is_drawn).any()))


class NewestTokens(Mapping[int, int]):
    """Sequence -> the token that the last step drew for it; made only when somebody looks."""

    def __init__(self, slots: Sequence[int] = (), tokens: Sequence[int | None] = ()):
        self._slots, self._tokens = slots, tokens
        self._made: dict[int, int] | None = None

    def __getitem__(self, slot: int) -> int:
        return self._tokens_by_slot()[slot]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens_by_slot())

    def __len__(self) -> int:
        return len(self._tokens_by_slot())

    def _tokens_by_slot(self) -> dict[int, int]:
        if self._made is None:
            self._made = {slot: token or 0 for slot, token in zip(self._slots, self._tokens, strict=True)}
        return self._made


def _special_until(row: SamplingRow, rules: RowRules) -> int:
    """The first position at which a row asks for nothing but a draw from its logits as they are."""
    if rules.is_edited or rules.num_logprobs is not None or row.num_candidates:
        return _FOR_EVER
    return row.key[2] - row.num_generated + rules.min_tokens if rules.holds_back_ends else 0
