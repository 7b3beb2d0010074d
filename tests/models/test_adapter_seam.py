"""An adapter wraps linear layers of a loaded model: the seam that LoRA slots will fill."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.ops import Activation
from batchgen.models.decoder import Decoder, Linear
from batchgen.tiny_models import random_ids, tiny_model, write_folder

PROMPT = random_ids(17, seed=8)


class LowRank:
    """A dummy adapter: adds x @ down @ up to what the layer gives."""

    def __init__(self, layer: Linear, down: Tensor, up: Tensor):
        self.layer, self.down, self.up = layer, down, up

    def __call__(self, x: Activation, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        return self.layer(x, out).add_(x @ self.down @ self.up)


def test_an_adapter_equals_the_merged_weights(
    tmp_path: Path, decoder: Callable[..., Decoder], run: Any, truth: Any
) -> None:
    original = tiny_model()
    model = decoder(write_folder(original, tmp_path), backend="cpu")
    factors: dict[str, tuple[Tensor, Tensor]] = {}

    def wrap(name: str, layer: Linear) -> Linear:
        inputs, outputs = {"qkv_proj": (72, 160), "o_proj": (96, 72), "gate_up_proj": (72, 208),
                           "down_proj": (104, 72)}[name.rpartition(".")[2]]  # fmt: skip
        generator = torch.Generator().manual_seed(len(factors))
        factors[name] = (
            torch.randn(inputs, 3, generator=generator) * 0.1,
            torch.randn(3, outputs, generator=generator) * 0.1,
        )
        return LowRank(layer, *factors[name])

    plain = run(model, [PROMPT], [[17]])[0]
    model.wrap_linears(wrap)
    assert len(factors) == 8
    adapted = run(
        model,
        [PROMPT],
        [
            [
                10,
            ],
            [7],
        ],
    )[0]
    assert not torch.allclose(adapted, plain, atol=1e-2)

    with torch.no_grad():
        for index, layer in enumerate(original.model.layers):
            place = f"model.layers.{index}"
            deltas = {name: (down @ up).T for name, (down, up) in factors.items() if name.startswith(place)}
            query, key, value = deltas[f"{place}.self_attn.qkv_proj"].split((96, 32, 32))
            gate, up = deltas[f"{place}.mlp.gate_up_proj"].split(104)
            for module, delta in (
                (layer.self_attn.q_proj, query), (layer.self_attn.k_proj, key),
                (layer.self_attn.v_proj, value),
                (layer.self_attn.o_proj, deltas[f"{place}.self_attn.o_proj"]), (layer.mlp.gate_proj, gate),
                (layer.mlp.up_proj, up), (layer.mlp.down_proj, deltas[f"{place}.mlp.down_proj"]),
            ):  # fmt: skip
                module.weight += delta
    torch.testing.assert_close(adapted, truth(original, [PROMPT])[0], atol=1e-4, rtol=1e-4)
