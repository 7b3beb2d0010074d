"""WorkerAdapters: the adapters of one executor, from their files to the slots of its model."""

import logging
from collections.abc import Callable, Collection, Mapping

import torch

from batchgen.config import LoRAConfig
from batchgen.engine.messages import AdapterInfo
from batchgen.errors import ConfigError, EngineError, ModelError
from batchgen.kernels.ops import Kernels
from batchgen.lora.adapter_facts import check_adapter
from batchgen.lora.adapter_parts import BaseTensor, read_parts
from batchgen.lora.adapter_plan import AdapterPlan, plan_adapter
from batchgen.lora.base_modules import base_modules
from batchgen.lora.host_memory import HostMemory
from batchgen.lora.packed_adapter import LayerFacts, PackedAdapter, pack_adapter
from batchgen.lora.slots import AdapterSlots
from batchgen.models.decoder import Decoder
from batchgen.models.model_config import ModelConfig
from batchgen.outputs import FailureCode, RowFailure
from batchgen.quantization.rotation import Rotation

log = logging.getLogger("batchgen.worker")

# Of the free host memory, for adapters, unless `max_cpu_loras` says how many.
HOST_SHARE = 0.25


class WorkerAdapters:
    """See `AdapterMemory`. An adapter is known by its content hash; files that change are not it any more.

    Args:
        settings: `max_loras` and the like.
        shape: of the model.
        base: the model's own tensors, which some adapters need to be read.
        kernels: of the model.
    """

    def __init__(self, settings: LoRAConfig, shape: ModelConfig, base: BaseTensor, kernels: Kernels):
        self.slots = AdapterSlots(settings.max_loras)
        self._max_rank, self._modules = settings.max_lora_rank, base_modules(shape)
        self._plans: dict[str, tuple[str, AdapterPlan]] = {}
        self._packer = _Packer(self._plans, base, kernels)
        self._memory = HostMemory(
            self._packer.packed,
            self._packed_bytes,
            self.slots.empty,
            least=settings.max_loras,
            most=settings.max_cpu_loras,
        )

    def attach(self, model: Decoder) -> Decoder:
        """Put empty slots around the layers of a model that has just been built; gives it back."""
        self._packer.layers = self.slots.attach(model)
        self._packer.rotation = model.rotation
        return model

    def take_memory(self, num_bytes: int) -> None:
        """Keep as many adapters as this allows, where `max_cpu_loras` does not say how many."""
        self._memory.budget = num_bytes

    def load(self, name: str, path: str) -> AdapterInfo:
        """Check an adapter's files: see `AdapterMemory.load`."""
        try:
            plan = plan_adapter(check_adapter(path), self._modules, self._max_rank)
            changes_nothing = self._packer.changes_nothing(plan)
        except (ConfigError, ModelError) as error:
            kind = ConfigError if isinstance(error, ConfigError) else ModelError
            raise kind(f"adapter {name!r}: {error}") from error
        content = plan.facts.content_hash
        self._plans[content] = name, plan
        self._memory.forget_failure(content)
        warnings = plan.warnings
        if changes_nothing:
            warnings += ("it changes nothing: every pair of it multiplies to zero; was it trained?",)
        return AdapterInfo(
            name=name,
            path=path,
            content_hash=content,
            rank=plan.rank,
            num_modules=len(plan.modules),
            num_bytes=plan.num_bytes,
            warnings=warnings,
        )

    def drop(self, adapter: str) -> None:
        """Know an adapter no longer."""
        self._memory.drop(adapter)
        self._plans.pop(adapter, None)

    def pin(self, adapter: str) -> None:
        """Keep an adapter in memory: see `AdapterMemory.pin`."""
        if not self._memory.pin(adapter):
            raise ConfigError(
                f"adapter {self._name(adapter)} cannot be pinned: no memory would be left for another; raise "
                f"max_cpu_loras"
            )
        self._memory.want(adapter)

    def begin_step(self, running: Collection[str]) -> None:
        """A step is about to be planned."""
        self._memory.begin_step(running)

    def want(self, adapter: str) -> bool | RowFailure:
        """Whether an adapter is in memory; if not it is brought there."""
        found = self._memory.want(adapter)
        if isinstance(found, str):
            message = f"adapter {self._name(adapter)} cannot be read any more: {found}"
            return RowFailure(FailureCode.ENGINE_ERROR, message)
        return found

    def wait(self, timeout_s: float) -> bool:
        """Wait until one that is on its way has arrived; False if none is."""
        return self._memory.wait(timeout_s)

    def place(self, adapters: Collection[str], going_on: Callable[[], Collection[int]]) -> Mapping[str, int]:
        """Adapter -> slot, for those of a step: see `AdapterSlots.place`."""
        return self.slots.place(adapters, going_on, self._memory.__getitem__)

    def release(self) -> None:
        """Give memory back; adapters are read again when they are wanted."""
        self._memory.clear()

    def close(self) -> None:
        """Give everything back for good."""
        self._memory.clear()
        self._memory.close()

    def _packed_bytes(self, adapter: str) -> int:
        _, plan = self._plans[adapter]
        # A file in 16 bits is kept in 32 beside weights in 32.
        return 2 * plan.num_bytes

    def _name(self, adapter: str) -> str:
        return repr(self._plans[adapter][0]) if adapter in self._plans else adapter[:12]


class _Packer:
    """Reads and packs adapters, in any thread; it must not keep alive whoever waits for it.

    Attributes:
        layers, rotation: of the model, once it is built.
    """

    def __init__(self, plans: Mapping[str, tuple[str, AdapterPlan]], base: BaseTensor, kernels: Kernels):
        self._plans, self._base, self._kernels = plans, base, kernels
        self.layers: Mapping[str, LayerFacts] = {}
        self.rotation: Rotation | None = None

    @torch.inference_mode()
    def changes_nothing(self, plan: AdapterPlan) -> bool:
        """Read an adapter whole, for what its numbers say of it.

        Raises:
            ModelError: what `read_parts` raises.
        """
        return read_parts(plan, self._base).changes_nothing

    @torch.inference_mode()
    def packed(self, adapter: str) -> PackedAdapter:
        """Read an adapter whose files may have changed since they were checked.

        Raises:
            ModelError, ConfigError: they have, or are gone.
            EngineError: it was dropped in the meantime.
        """
        found = self._plans.get(adapter)
        if found is None:
            raise EngineError("it was removed")
        _, plan = found
        now = check_adapter(str(plan.facts.path))
        if now.content_hash != adapter:
            raise ModelError(f"{plan.facts.path}: its files are not those that were loaded; load it again")
        parts = read_parts(plan, self._base, self.rotation)
        dtype = str(self._kernels.home.dtype).removeprefix("torch.")
        return pack_adapter(parts, self.layers, self._kernels, dtype)
