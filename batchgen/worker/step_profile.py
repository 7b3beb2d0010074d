"""StepProfile: where the time of steps went inside the executor, and what bound the machine sets."""

import time

from batchgen.kernels.ceilings import Ceilings
from batchgen.kernels.cpu.ceilings import measure
from batchgen.models.decoder import Decoder
from batchgen.worker.device import available_memory, is_host
from batchgen.worker.executor import ExecutorProfile
from batchgen.worker.input_batch import InputBatch
from batchgen.worker.model_work import ModelWork, StepWork


class StepProfile:
    """Keeps time between two moments.

    Args:
        model: whose steps they are.
    """

    def __init__(self, model: Decoder):
        self._model = model
        self._work = ModelWork.of(model)
        self._steps: list[StepWork] = []
        self._forward_s = self._head_s = self._draw_s = 0.0
        self._ceilings = _ceilings(model)
        model.recorded.begin_profile()

    def forward(self, batch: InputBatch, since: float) -> None:
        """The layers have computed a batch, begun at `since`."""
        self._forward_s += time.perf_counter() - since
        self._steps.append(self._work.step(batch))

    def head(self, since: float) -> float:
        """The logits are there; returns the time now."""
        now = time.perf_counter()
        self._head_s += now - since
        return now

    def drawn(self, since: float) -> None:
        """The tokens are drawn."""
        self._draw_s += time.perf_counter() - since

    def end(self) -> ExecutorProfile:
        """What was kept; nothing is kept any more."""
        kinds = self._model.recorded.end_profile()
        seconds = dict.fromkeys(("attention", "matrix_products", "elementwise"), 0.0)
        for kind, spent in kinds.items():
            seconds[_part(kind)] += spent
        if not kinds:
            seconds["forward_pass"] = self._forward_s
        seconds["matrix_products"] += self._head_s
        seconds["sampling"] = self._draw_s
        before, after = self._ceilings, _ceilings(self._model)
        ceilings = None if before is None or after is None else before.best_of(after)
        return ExecutorProfile(
            seconds=seconds,
            num_tokens=sum(step.num_tokens for step in self._steps),
            num_rows=sum(step.num_rows for step in self._steps),
            ceilings=ceilings,
            bound_s={} if ceilings is None else self._work.bound_s(self._steps, ceilings),
        )


def _ceilings(model: Decoder) -> Ceilings | None:
    return measure(available_memory()) if is_host(model.device) else None


def _part(kind: str) -> str:
    """To which part of a forward pass an operation belongs."""
    if "attention" in kind or kind == "store_kv":
        return "attention"
    return "matrix_products" if kind.startswith("linear") else "elementwise"
