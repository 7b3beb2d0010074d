"""load_while_running: weights come in while made-up tokens run through a model.

So a method of quantization knows the mean of a layer's inputs when it rounds the layer's weights. Over half
of what the norms of a language model give is the same vector for every token, whatever the text. It hardly
depends on the tokens, so that random ones do, and no data is needed.
"""

import logging
import time

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from batchgen.kernels.ops import Activation, Quantized
from batchgen.layers.linear import LinearLayer
from batchgen.models.decoder import Decoder
from batchgen.models.decoder_layer import Linear
from batchgen.models.weights import WeightLoader
from batchgen.worker.input_batch import BatchBuilder

loading = logging.getLogger("batchgen.loading")

_NUM_TOKENS = 512
# The first tokens of a text, which all others attend to, are unlike the rest.
_SKIPPED = 16
# Seconds between two words on how far it is.
_TELL_EVERY_S = 10.0


@torch.no_grad()
def load_while_running(model: Decoder, loader: WeightLoader) -> None:
    """Load a model in the order in which a step reads it; `mean_inputs` of its method is filled just ahead.

    Raises:
        WeightsError: what `WeightLoader.load` raises.
    """
    for target, _ in model.weight_targets().values():
        if not isinstance(target, LinearLayer):
            loader.load(target)
    arrivals = _Arrivals(loader)
    model.wrap_linears(lambda name, layer: _Arriving(layer, arrivals))
    num_tokens = min(_NUM_TOKENS, model.max_len)
    layout, kernels = model.kv_layout, model.kernels
    num_groups, num_blocks = len(layout.windows), -(-num_tokens // layout.spec.block_size)
    places = range(layout.num_places)
    model.bind_kv([kernels.allocate_kv(layout.spec, num_groups * num_blocks, model.device) for _ in places])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (num_tokens,), generator=generator).tolist()
    tables = tuple(list(range(group * num_blocks, (group + 1) * num_blocks)) for group in range(num_groups))
    builder = BatchBuilder(block_size=layout.spec.block_size, num_groups=num_groups, device=model.device)
    batch = builder.build(SchedulerOutput(0, (ScheduledSequence(0, ids, 0, tables),)), {})
    normed = model.forward(batch.token_ids, batch.positions, batch.metas)
    arrivals.take(model.head, normed)
    model.wrap_linears(lambda name, layer: layer.layer if isinstance(layer, _Arriving) else layer)
    model.release()


class _Arriving:
    """A linear layer that is loaded when it is first called."""

    def __init__(self, layer: Linear, arrivals: "_Arrivals"):
        assert isinstance(layer, LinearLayer)
        self.layer, self._arrivals, self.input_bits = layer, arrivals, layer.input_bits
        arrivals.num_layers += 1

    def __call__(self, x: Activation, out: Tensor | None = None) -> Tensor:
        self._arrivals.take(self.layer, x)
        return self.layer(x, out)


class _Arrivals:
    """Loads one linear layer after the other, and says now and then how many there are."""

    def __init__(self, loader: WeightLoader):
        self.num_layers = 1  # the head
        self._loader = loader
        self._num_loaded, self._told_at = 0, time.monotonic()

    def take(self, layer: LinearLayer, x: Activation) -> None:
        """Load a layer whose inputs are known."""
        layer.method.mean_inputs[layer.name] = _mean(x.dense() if isinstance(x, Quantized) else x)
        self._loader.load(layer)
        self._num_loaded += 1
        is_last = self._num_loaded == self.num_layers
        if not is_last and time.monotonic() - self._told_at >= _TELL_EVERY_S:
            self._told_at = time.monotonic()
            loading.info("%d of %d weights rounded", self._num_loaded, self.num_layers)


def _mean(x: Tensor) -> Tensor:
    """The mean over tokens, summed one after the other: its bits do not depend on the number of threads."""
    rows = np.ascontiguousarray(x[min(_SKIPPED, len(x) - 1) :].cpu().numpy())
    return torch.from_numpy(np.add.reduce(rows, axis=0, dtype=np.float64) / len(rows))
