"""StepHead: the logits of a step's rows, each by the head of its adapter."""

from torch import Tensor

from batchgen.models.decoder import Decoder
from batchgen.worker.row_slots import RowSlots


class StepHead:
    """What makes logits of hidden states.

    Args:
        model: whose head it is.
        slots: of the rows, if an adapter among them changes the head.
        whole_slots: of these, those whose adapter has a whole head.
    """

    def __init__(self, model: Decoder, slots: RowSlots | None = None, whole_slots: tuple[int, ...] = ()):
        self.model, self._slots, self._whole_slots = model, slots, whole_slots

    @property
    def is_plain(self) -> bool:
        """Whether it is the model's own for all rows, so that tokens may be drawn without any logits."""
        return self._slots is None

    def logits(self, hidden: Tensor, first: int) -> Tensor:
        """Logits [R, V] of hidden states [R, E]; it holds until the next call.

        Args:
            hidden: of some rows that follow each other.
            first: number of the first among all whose logits the step needs.
        """
        if self._slots is None:
            return self.model.logits(hidden)
        segments = self._slots.part(slice(first, first + hidden.shape[0]))
        return self.model.logits(hidden, segments, self._whole_slots)
