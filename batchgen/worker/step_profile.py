"""StepProfile: where the time of steps went inside the executor, and what bound the machine sets."""

import time

from batchgen.kernels.ceilings import Ceilings
from batchgen.kernels.cpu.ceilings import CeilingMeter
from batchgen.models.decoder import Decoder
from batchgen.worker.device import available_memory, is_host
from batchgen.worker.executor import ExecutorProfile
from batchgen.worker.input_batch import InputBatch
from batchgen.worker.model_work import ModelWork, StepWork

# The machine is measured so often while steps run, and so many times before and after them.
_SAMPLE_EVERY_S, _SAMPLES_AROUND = 0.5, 8


class StepProfile:
    """Keeps time between two moments.

    Other work on a machine takes from the kernels and from what the machine can do alike; so that is measured
    all along, between steps, and that time is counted apart.

    Args:
        model: whose steps they are.
    """

    def __init__(self, model: Decoder):
        self._model = model
        self._work = ModelWork.of(model)
        self._steps: list[StepWork] = []
        self._forward_s = self._head_s = self._draw_s = 0.0
        self._meter = CeilingMeter.of_machine(available_memory()) if is_host(model.device) else None
        self._samples: list[Ceilings] = []
        self._sample(_SAMPLES_AROUND)
        # Time that measuring the machine took in the midst of steps.
        self._measuring_s = 0.0
        model.recorded.begin_profile()

    def forward(self, batch: InputBatch, since: float) -> None:
        """The layers have computed a batch, begun at `since`."""
        now = time.perf_counter()
        self._forward_s += now - since
        self._steps.append(self._work.step(batch))
        if now - self._sampled_at > _SAMPLE_EVERY_S:
            self._sample(1)
            self._measuring_s += time.perf_counter() - now

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
        self._sample(_SAMPLES_AROUND)
        ceilings = Ceilings.mean(self._samples) if self._samples else None
        return ExecutorProfile(
            seconds=seconds,
            num_tokens=sum(step.num_tokens for step in self._steps),
            num_rows=sum(step.num_rows for step in self._steps),
            ceilings=ceilings,
            bound_s={} if ceilings is None else self._work.bound_s(self._steps, ceilings),
            measuring_s=self._measuring_s,
        )

    def _sample(self, times: int) -> None:
        if self._meter is not None:
            self._samples += [self._meter.sample() for _ in range(times)]
        self._sampled_at = time.perf_counter()


def _part(kind: str) -> str:
    """To which part of a forward pass an operation belongs."""
    if "attention" in kind or kind == "store_kv":
        return "attention"
    return "matrix_products" if kind.startswith(("linear", "lora")) else "elementwise"
