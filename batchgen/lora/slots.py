"""AdapterSlots: the slots of a decoder's layers, and which adapter is in which."""

from collections.abc import Callable, Collection, Mapping

from batchgen.errors import EngineError
from batchgen.layers.linear import LinearLayer
from batchgen.lora.base_modules import TABLE
from batchgen.lora.layers import AdaptedEmbedding, AdaptedLinear
from batchgen.lora.packed_adapter import LayerFacts, PackedAdapter
from batchgen.models.decoder import Decoder
from batchgen.models.decoder_layer import Linear


class AdapterSlots:
    """As many slots in every layer. An adapter has the same one in all of them.

    Args:
        num_slots: S.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._linears: dict[str, AdaptedLinear] = {}
        self._embedding: AdaptedEmbedding | None = None
        # In the order in which they were last used; the slot of each.
        self._slots: dict[str, int] = {}
        self._packed: dict[int, PackedAdapter] = {}

    def attach(self, model: Decoder) -> Mapping[str, LayerFacts]:
        """Put empty slots around the layers of a model with its weights; says what they are."""
        self._linears.clear()
        self._slots.clear()
        self._packed.clear()

        def wrap(name: str, layer: Linear) -> Linear:
            assert isinstance(layer, LinearLayer)
            self._linears[name] = AdaptedLinear(layer, self.num_slots, model.kernels, model.lane)
            return self._linears[name]

        model.wrap_linears(wrap)
        wrap(model.head.name, model.head)
        self._embedding = AdaptedEmbedding(model.embedding, self.num_slots, model.kernels, model.lane)
        model.adapt_ends(self._embedding, self._linears[model.head.name])
        dtype = str(model.dtype).removeprefix("torch.")
        vocab_size, hidden_size = model.embedding.size
        return {
            TABLE: LayerFacts(vocab_size, (hidden_size,), dtype),
            **{
                name: LayerFacts.of(each.layer.shape, each.input_bits, dtype)
                for name, each in self._linears.items()
            },
        }

    def place(
        self,
        adapters: Collection[str],
        going_on: Callable[[], Collection[int]],
        packed: Callable[[str], PackedAdapter],
    ) -> Mapping[str, int]:
        """Give the adapters of a step their slots.

        Args:
            adapters: of the sequences that do not merely go on.
            going_on: slots of those that do.
            packed: an adapter in memory.

        Raises:
            EngineError: more adapters than slots.
        """
        missing = [adapter for adapter in adapters if adapter not in self._slots]
        for adapter in adapters:
            if adapter in self._slots:
                self._slots[adapter] = self._slots.pop(adapter)
        if missing:
            held = {*going_on(), *(self._slots[each] for each in adapters if each in self._slots)}
            for adapter in missing:
                slot = self._free_slot(held)
                held.add(slot)
                self._put(slot, packed(adapter))
                self._slots[adapter] = slot
        return self._slots

    def empty(self, adapter: str) -> None:
        """Take an adapter out of its slot, if it is in one."""
        slot = self._slots.pop(adapter, None)
        if slot is not None:
            self._put(slot, None)

    def whole_slots(self, slots: Collection[int]) -> tuple[int, ...]:
        """Those of some slots whose adapter has whole weights."""
        return tuple(sorted(slot for slot in slots if self._packed[slot].has_whole))

    def change_head(self, slots: Collection[int]) -> bool:
        """Whether the adapter in any of some slots changes the head."""
        return any(self._packed[slot].changes_head for slot in slots)

    def _free_slot(self, held: Collection[int]) -> int:
        taken = set(self._slots.values())
        for slot in range(self.num_slots):
            if slot not in taken:
                return slot
        for adapter, slot in self._slots.items():
            if slot not in held:
                del self._slots[adapter]
                return slot
        raise EngineError(f"a step has more adapters than the {self.num_slots} slots there are")

    def _put(self, slot: int, packed: PackedAdapter | None) -> None:
        found = PackedAdapter() if packed is None else packed
        for name, linear in self._linears.items():
            linear.bank.put(slot, found.added.get(name))
            linear.whole.pop(slot, None)
            if name in found.whole:
                linear.whole[slot] = found.whole[name]
        assert self._embedding is not None
        self._embedding.bank.put(slot, found.table_added)
        self._embedding.tables.pop(slot, None)
        if found.table is not None:
            self._embedding.tables[slot] = found.table
        self._packed[slot] = found
