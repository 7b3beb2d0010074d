"""mean_inputs: what the linear layers of a model see on average, found by running it over made-up tokens.

Over half of what the norms of a language model give is the same vector for every token, whatever the text.
It hardly depends on the tokens, so that random ones do, and no data is needed.
"""

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from batchgen.kernels.ops import Activation, Quantized
from batchgen.models.decoder import Decoder
from batchgen.models.decoder_layer import Linear, input_bits
from batchgen.worker.input_batch import BatchBuilder

_NUM_TOKENS = 512
# The first tokens of a text, which all others attend to, are unlike the rest.
_SKIPPED = 16


@torch.inference_mode()
def mean_inputs(model: Decoder) -> dict[str, Tensor]:
    """Name of each linear layer, as its `LinearShape` has it -> the mean of its inputs, float64 [K].

    The model is of no use afterwards: its layers are wrapped, and its cache is gone.
    """
    found: dict[str, Tensor] = {}

    def watch(name: str, layer: Linear) -> Linear:
        return _Watched(name, layer, found)

    model.wrap_linears(watch)
    num_tokens = min(_NUM_TOKENS, model.max_len)
    layout, kernels = model.kv_layout, model.kernels
    num_groups, num_blocks = len(layout.windows), -(-num_tokens // layout.spec.block_size)
    model.bind_kv(
        [
            kernels.allocate_kv(layout.spec, num_groups * num_blocks, model.device)
            for _ in range(layout.num_places)
        ]
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (num_tokens,), generator=generator).tolist()
    tables = tuple(list(range(group * num_blocks, (group + 1) * num_blocks)) for group in range(num_groups))
    builder = BatchBuilder(block_size=layout.spec.block_size, num_groups=num_groups, device=model.device)
    batch = builder.build(SchedulerOutput(0, (ScheduledSequence(0, ids, 0, tables),)), {})
    normed = model.forward(batch.token_ids, batch.positions, batch.metas)
    found[model.head.name] = _mean(normed)
    model.release()
    return found


class _Watched:
    """A linear layer whose inputs' mean is noted."""

    def __init__(self, name: str, layer: Linear, found: dict[str, Tensor]):
        self.input_bits = input_bits(layer)
        self._name, self._layer, self._found = name, layer, found

    def __call__(self, x: Activation, out: Tensor | None = None) -> Tensor:
        self._found[self._name] = _mean(x.dense() if isinstance(x, Quantized) else x)
        return self._layer(x, out)


def _mean(x: Tensor) -> Tensor:
    """The mean over tokens, summed one after the other: its bits do not depend on the number of threads."""
    rows = x[min(_SKIPPED, len(x) - 1) :].to(torch.float64).cpu().numpy()
    return torch.from_numpy(np.add.reduce(np.ascontiguousarray(rows), axis=0) / len(rows))
