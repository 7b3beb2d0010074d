"""load_while_running: weights come in while tokens run through a model, made-up ones if none are given.

So a method of quantization knows a layer's inputs when it rounds the layer's weights. Over half of what the
norms of a language model give is the same vector for every token, whatever the text. It hardly depends on the
tokens, so that random ones do, and no data is needed.
"""

import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchgen.kernels.ops import Activation, Quantized
from batchgen.layers.linear import LinearLayer
from batchgen.models.decoder import Decoder
from batchgen.models.decoder_layer import Linear
from batchgen.models.weights import WeightLoader
from batchgen.worker.whole_texts import whole_texts_batch

loading = logging.getLogger("batchgen.loading")

# The first tokens of a text, which all others attend to, are unlike the rest.
_SKIPPED = 16
# Seconds between two words on how far it is.
_TELL_EVERY_S = 10.0


@torch.no_grad()
def load_while_running(
    model: Decoder,
    loader: WeightLoader,
    texts: Sequence[Sequence[int]] = (),
    on_layer: Callable[[int, int], None] | None = None,
) -> None:
    """Load a model in the order in which a step reads it; its method sees a layer's inputs just ahead.

    Args:
        model: without weights.
        loader: of its weights.
        texts: token ids; without any, those that the method makes up.
        on_layer: called with the number of linear layers that are loaded, and of all.

    Raises:
        WeightsError: what `WeightLoader.load` raises.
    """
    for target, _ in model.weight_targets().values():
        if not isinstance(target, LinearLayer):
            loader.load(target)
    num_skipped = 0 if texts else _SKIPPED
    texts = texts or model.method.made_up_texts(model.config.vocab_size, model.max_len)
    layout, kernels = model.kv_layout, model.kernels
    batch, num_blocks = whole_texts_batch(model, texts)
    # A layer's keys and values are read before the next one's are written: they take turns in one cache.
    model.bind_kv([kernels.allocate_kv(layout.spec, num_blocks, model.device)] * layout.num_places)
    # Of a text that is too short for that, the last token is seen.
    is_seen = batch.positions >= min(num_skipped, int(batch.positions.max()))
    arrivals = _Arrivals(loader, is_seen, on_layer)
    model.wrap_linears(lambda name, layer: _Arriving(layer, arrivals))
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

    def __init__(self, loader: WeightLoader, is_seen: Tensor, on_layer: Callable[[int, int], None] | None):
        self.num_layers = 1  # the head
        self._loader, self._is_seen, self._on_layer = loader, is_seen, on_layer
        self._num_loaded, self._told_at = 0, time.monotonic()

    def take(self, layer: LinearLayer, x: Activation) -> None:
        """Load a layer whose inputs are known."""
        floats = x.dense() if isinstance(x, Quantized) else x
        layer.method.see_inputs(layer.shape, floats[self._is_seen])
        self._loader.load(layer)
        self._num_loaded += 1
        if self._on_layer is not None:
            self._on_layer(self._num_loaded, self.num_layers)
        is_last = self._num_loaded == self.num_layers
        if not is_last and time.monotonic() - self._told_at >= _TELL_EVERY_S:
            self._told_at = time.monotonic()
            loading.info("%d of %d weights rounded", self._num_loaded, self.num_layers)
