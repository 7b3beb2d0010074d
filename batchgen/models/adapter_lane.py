"""AdapterLane: which rows of what a decoder computes belong to which adapter's slot, as a pass goes on."""

from dataclasses import dataclass, field

from batchgen.kernels.lora import LoraSegments


@dataclass(slots=True)
class StepAdapters:
    """The slots of one step's rows.

    Args:
        tokens: of all of its tokens.
        rows: of those whose hidden state is wanted.
        whole_slots: slots with rows in the step whose adapter has whole weights of its own; a pass with any
            cannot be recorded.
    """

    tokens: LoraSegments
    rows: LoraSegments
    whole_slots: tuple[int, ...] = ()


@dataclass(slots=True)
class AdapterLane:
    """What layers with adapters look at while a pass runs; a decoder sets it.

    Attributes:
        segments: of the rows that the pass is at; None: no row has an adapter.
        whole_slots: see `StepAdapters`.
    """

    segments: LoraSegments | None = None
    whole_slots: tuple[int, ...] = field(default=())

    def begin(self, adapters: StepAdapters | None) -> None:
        """A pass begins, with all tokens, or has ended: None."""
        self.segments = None if adapters is None else adapters.tokens
        self.whole_slots = () if adapters is None else adapters.whole_slots
