"""RecordedForward: a decoder's forward pass, recorded once and run again for every step's numbers."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from batchgen.kernels.kv import AttentionMeta
from batchgen.kernels.lora import LoraSegments
from batchgen.kernels.program import Program, StepSizes
from batchgen.models.adapter_lane import StepAdapters

if TYPE_CHECKING:
    from batchgen.models.decoder import Decoder

log = logging.getLogger("batchgen.models")

# Recordings are made for as many of everything as a power of two, from this one on.
_FEWEST = 64
# Of torch, what a recorded pass may call: it takes memory or looks at memory in another way.
_HARMLESS = {
    "empty", "view", "_unsafe_view", "slice", "select", "as_strided", "split", "split_with_sizes", "unbind",
    "unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "detach", "alias",
}  # fmt: skip


class RecordedForward:
    """The forward pass of one decoder, which owns this object and hands itself over at every call.

    Where it cannot be recorded (the kernels cannot; ranks exchange results; an adapter computes with torch)
    every step runs `Decoder.forward`. The results are the same to the bit.
    """

    def __init__(self) -> None:
        # Steps without any adapter run a program that knows of none.
        self._recordings: dict[bool, _Recording] = {}
        self._is_possible = True
        self._is_measured = False
        # Seconds by kind of operation, of recordings that are gone.
        self._spent: Counter[str] = Counter()

    @property
    def is_recorded(self) -> bool:
        """Whether a recording is there."""
        return bool(self._recordings)

    def forget(self) -> None:
        """Let go of the recording: what it was made of is about to change, or its memory is wanted."""
        self._drop()
        self._is_possible = True

    def begin_profile(self) -> None:
        """Keep time from now on."""
        self._is_measured = True
        self._spent.clear()
        for recording in self._recordings.values():
            recording.program.measure()

    def end_profile(self) -> dict[str, float]:
        """Seconds since `begin_profile` by kind of operation; those of passes that were recorded."""
        # The next recording keeps no time.
        self._drop()
        self._is_measured = False
        return dict(self._spent)

    def run(
        self,
        model: "Decoder",
        token_ids: Tensor,
        positions: Tensor,
        metas: Sequence[AttentionMeta],
        rows: Tensor,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Final hidden states of some tokens: see `Decoder.forward`."""
        sizes = StepSizes(token_ids.shape[0], rows.shape[0], *metas[0].block_tables.shape)
        # A chunk of a prompt that does not end in it wants no rows.
        is_whole = sizes.tokens > 0 and sizes.table_width > 0
        is_plain = adapters is None or not adapters.whole_slots
        if self._is_possible and positions.dim() == 1 and is_whole and is_plain:
            recording = self._recordings.get(adapters is not None)
            if recording is None or not recording.holds(sizes):
                recording = self._record(model, sizes, len(metas), adapters)
            if recording is not None:
                return recording.run(token_ids, positions, metas, rows, sizes, adapters)
        return model.forward(token_ids, positions, metas, rows=rows, adapters=adapters)

    def _record(
        self, model: "Decoder", wanted: StepSizes, num_groups: int, adapters: StepAdapters | None
    ) -> "_Recording | None":
        before = next(iter(self._recordings.values()), None)
        if before is not None and before.holds(wanted):
            # Of the other kind: the two share the memory of activations.
            most = before.most
        else:
            most = _capacity(wanted, before)
            # The old ones' memory is free for the new one.
            self._drop()
        num_slots = None if adapters is None else adapters.tokens.starts.shape[0] - 1
        try:
            found = _Recording.make(model, most, num_groups, num_slots)
        except NotRecordable as reason:
            log.info("the forward pass runs operation by operation: %s", reason)
            found = None
        self._is_possible = found is not None
        if found is None:
            self._drop()
            return None
        if self._is_measured:
            found.program.measure()
        self._recordings[adapters is not None] = found
        return found

    def _drop(self) -> None:
        if self._is_measured:
            for recording in self._recordings.values():
                self._spent.update(recording.program.profile())
        self._recordings.clear()


class NotRecordable(Exception):
    """The pass does something that is no kernel operation; the message says what."""


@dataclass(slots=True)
class _Part:
    """The beginnings of a recording's tensors for a step of some sizes; the next one is often as large."""

    sizes: StepSizes
    inputs: list[Tensor]
    hidden: Tensor


@dataclass(slots=True)
class _Recording:
    """A program, the tensors that it reads a step's numbers from, and that with its result."""

    program: Program
    most: StepSizes
    token_ids: Tensor
    positions: Tensor
    rows: Tensor
    metas: list[AttentionMeta]
    adapters: StepAdapters | None
    hidden: Tensor
    part: _Part

    @staticmethod
    def make(
        model: "Decoder", most: StepSizes, num_groups: int, num_slots: int | None = None
    ) -> "_Recording | None":
        """Record a pass over placeholders that are as large as any step may be.

        Args:
            model: whose pass it is.
            most: sizes of any step.
            num_groups: of KV blocks.
            num_slots: of adapters; None for a pass without.
        """
        if model.parallel.size > 1:
            raise NotRecordable(f"{model.parallel.size} ranks exchange results within it")

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=model.device)

        token_ids, positions, rows = (
            numbers(size, dtype=torch.int64) for size in (most.tokens, most.tokens, most.rows)
        )
        starts, lens = numbers(most.sequences + 1), numbers(most.sequences)
        metas = [
            AttentionMeta(
                query_start_loc=starts,
                seq_lens=lens,
                block_tables=numbers(most.sequences, most.table_width),
                slot_mapping=numbers(most.tokens),
                max_query_len=most.tokens,
                max_seq_len=most.table_width * model.kv_layout.spec.block_size,
            )
            for _ in range(num_groups)
        ]
        adapters = None
        if num_slots is not None:
            adapters = StepAdapters(
                LoraSegments(numbers(most.tokens), numbers(num_slots + 1)),
                LoraSegments(numbers(most.rows), numbers(num_slots + 1)),
            )
        found: list[Tensor] = []

        def build() -> None:
            with _KernelsOnly():  # type: ignore[no-untyped-call]
                found.append(model.forward(token_ids, positions, metas, rows=rows, adapters=adapters))

        program = model.kernels.record(build, most)
        if program is None:
            return None
        nothing = _Part(StepSizes(0, 0, 0, 0), [], found[0])
        return _Recording(program, most, token_ids, positions, rows, metas, adapters, found[0], nothing)

    def holds(self, sizes: StepSizes) -> bool:
        """Whether a step of these sizes can run."""
        return all(size <= most for size, most in zip(sizes.in_order(), self.most.in_order(), strict=True))

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metas: Sequence[AttentionMeta],
        rows: Tensor,
        sizes: StepSizes,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """Copy a step's numbers in and run."""
        if sizes != self.part.sizes:
            self.part = self._part_of(sizes)
        first, inputs = metas[0], self.part.inputs
        given = [token_ids, positions, rows, first.query_start_loc, first.seq_lens]
        for meta in metas:
            given += (meta.slot_mapping, meta.block_tables)
        if adapters is not None:
            given += _numbers_of(adapters)
        for own, values in zip(inputs, given, strict=True):
            own.copy_(values)
        self.program.run(sizes)
        return self.part.hidden

    def _part_of(self, sizes: StepSizes) -> "_Part":
        first = self.metas[0]
        inputs = [
            self.token_ids[: sizes.tokens],
            self.positions[: sizes.tokens],
            self.rows[: sizes.rows],
            first.query_start_loc[: sizes.sequences + 1],
            first.seq_lens[: sizes.sequences],
        ]
        for meta in self.metas:
            # Rows of the tables lie one after the other in a step, however wide they are.
            entries = meta.block_tables.view(-1)[: sizes.sequences * sizes.table_width]
            inputs += (meta.slot_mapping[: sizes.tokens], entries.view(sizes.sequences, sizes.table_width))
        if self.adapters is not None:
            of_tokens, token_starts, of_rows, row_starts = _numbers_of(self.adapters)
            inputs += (of_tokens[: sizes.tokens], token_starts, of_rows[: sizes.rows], row_starts)
        return _Part(sizes, inputs, self.hidden[: sizes.rows])


def _numbers_of(adapters: StepAdapters) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, rows = adapters.tokens, adapters.rows
    return tokens.rows, tokens.starts, rows.rows, rows.starts


def _capacity(wanted: StepSizes, before: _Recording | None) -> StepSizes:
    """Sizes to record with: powers of two, no smaller than before, and no two alike."""
    least = (0, 0, 0, 0) if before is None else before.most.in_order()
    most = (
        max(_FEWEST, 1 << (max(want, had - place) - 1).bit_length()) + place
        for place, (want, had) in enumerate(zip(wanted.in_order(), least, strict=True))
    )
    return StepSizes(*most)


class _KernelsOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations of torch that compute: a program would leave them out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To skip its compiler torch would import it, for two seconds or more; nobody compiles here.
        return False

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ not in _HARMLESS:
            raise NotRecordable(f"{func} is called within it")
        return func(*args, **(kwargs or {}))
