"""Decoder: the one stack of pre-norm attention and gated-MLP layers that all families here share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from batchgen.kernels.kv import AttentionMeta, KVCacheSpec, LayerKV
from batchgen.kernels.ops import Kernels
from batchgen.layers.embedding import Embedding
from batchgen.layers.linear import LMHead, MergedLinear, QKVLinear, RowLinear
from batchgen.layers.norm import RMSNorm
from batchgen.layers.parallel import ParallelContext
from batchgen.layers.rotary import RotaryEmbedding
from batchgen.models.kv_layout import KVLayout, kv_layout
from batchgen.models.model_config import ModelConfig
from batchgen.models.workspace import Activations, Workspace
from batchgen.quantization.base import Activation, LinearMethod


class Linear(Protocol):
    """What stands at the place of a linear layer: the layer itself, or an adapter around it."""

    def __call__(self, x: Activation, out: Tensor | None = None) -> Tensor:
        """Multiply: x [T, K] -> [T, N]."""


class WeightTarget(Protocol):
    """What takes tensors of a checkpoint."""

    def load(self, part: int, parameter: str, tensor: Tensor) -> None:
        """Take one tensor."""

    def missing(self) -> list[tuple[int, str]]:
        """(part, parameter) of the tensors that have not come."""

    def tensors(self) -> list[Tensor]:
        """The weights in memory."""


@dataclass(slots=True)
class DecoderLayer:
    """Weights and cache of one layer; `window` None sees all positions, `rotary` None rotates nothing.

    `group` is that of its cache: which block tables are its own.
    """

    input_norm: RMSNorm
    qkv: Linear
    output: Linear
    post_norm: RMSNorm
    gate_up: Linear
    down: Linear
    window: int | None
    rotary: RotaryEmbedding | None
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None
    kv: LayerKV | None = field(default=None, repr=False)
    group: int = 0


class Decoder:
    """A decoder-only language model over a paged cache.

    Weights come through `weight_targets`, the cache through `bind_kv`; then `forward` and `logits` run. One
    thread calls it; results live until the next call (they share a workspace).

    Args:
        config: the shape.
        kernels: the operations.
        method: how linear layers store and multiply weights.
        dtype: of activations.
        device: of weights and activations.
        max_len: positions that will be asked for.
        block_size: of the cache.
        parallel: this rank's place.
        rope_divisors: see `RotaryEmbedding`.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        method: LinearMethod,
        *,
        dtype: str,
        device: torch.device,
        max_len: int,
        block_size: int,
        parallel: ParallelContext | None = None,
        rope_divisors: Tensor | None = None,
    ):
        self.config, self.kernels, self.method, self.device = config, kernels, method, device
        self.dtype = method.dtype
        self._parallel = parallel or ParallelContext()
        self._targets: dict[str, tuple[WeightTarget, int]] = {}
        self._scale = config.head_dim**-0.5
        c = config
        self.head = LMHead("lm_head", method, self._parallel, c.hidden_size, (c.vocab_size,))
        self.embedding = Embedding(
            "model.embed_tokens", c.vocab_size, c.hidden_size, self._parallel, self.dtype, device,
            head=self.head if c.tie_embeddings else None,
        )  # fmt: skip
        self._targets["model.embed_tokens"] = (self.embedding, 0)
        if not c.tie_embeddings:
            self._targets["lm_head"] = (self.head, 0)
        self._rotary = (
            RotaryEmbedding(c.rope, max_len, kernels, device, rope_divisors) if any(c.uses_rope) else None
        )
        self.layers = [self._make_layer(index, self._rotary) for index in range(c.num_layers)]
        self.norm = self._make_norm("model.norm", c.hidden_size)
        qkv = self._targets["model.layers.0.self_attn.q_proj"][0]
        assert isinstance(qkv, QKVLinear)
        self._workspace = Workspace(
            self.dtype, device,
            hidden_size=c.hidden_size, wide_size=2 * c.intermediate_size // self._parallel.size,
            vocab_size=c.vocab_size, num_heads=qkv.num_heads, num_kv_heads=qkv.num_kv_heads,
            head_dim=c.head_dim,
        )  # fmt: skip
        specs = [
            KVCacheSpec(qkv.num_kv_heads, c.head_dim, block_size, dtype, window=window)
            for window in c.windows
        ]
        self.kv_layout: KVLayout = kv_layout(specs, max_len)
        for layer, group in zip(self.layers, self.kv_layout.groups, strict=True):
            layer.group = group

    def weight_targets(self) -> dict[str, tuple[WeightTarget, int]]:
        """Module name in a Hugging Face checkpoint -> what takes its tensors, and as which fused part."""
        return dict(self._targets)

    def wrap_linears(self, wrap: Callable[[str, Linear], Linear]) -> None:
        """Put something around every linear layer: `wrap` gets its name and the layer and returns either.

        The names are "model.layers.0.self_attn.qkv_proj", "...o_proj", "...mlp.gate_up_proj", "...down_proj".
        """
        for index, layer in enumerate(self.layers):
            place = f"model.layers.{index}"
            layer.qkv = wrap(f"{place}.self_attn.qkv_proj", layer.qkv)
            layer.output = wrap(f"{place}.self_attn.o_proj", layer.output)
            layer.gate_up = wrap(f"{place}.mlp.gate_up_proj", layer.gate_up)
            layer.down = wrap(f"{place}.mlp.down_proj", layer.down)

    def bind_kv(self, caches: Sequence[LayerKV]) -> None:
        """Give every layer its cache; there is one for each place of `kv_layout`."""
        for layer, place in zip(self.layers, self.kv_layout.places, strict=True):
            layer.kv = caches[place]

    def release(self) -> None:
        """Let go of the cache and of the activations' memory; `bind_kv` comes before the next step."""
        for layer in self.layers:
            layer.kv = None
        self._workspace.release()

    def tensors(self) -> list[Tensor]:
        """All that stays in memory between steps, but the cache."""
        # The parts of a fused layer have one target.
        targets = {id(target): target for target, _ in self._targets.values()}
        found = [tensor for target in targets.values() for tensor in target.tensors()]
        return found if self._rotary is None else [*found, self._rotary.cos_sin]

    def forward(
        self,
        token_ids: Tensor | None,
        positions: Tensor,
        metas: Sequence[AttentionMeta],
        *,
        inputs_embeds: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run the layers over the tokens of a step, writing their keys and values to the cache.

        Args:
            token_ids: [T] int64, or None with `inputs_embeds`.
            positions: [T] int64, or [rows, T] for models that have several.
            metas: how the batch reads and writes the cache, for each group of layers.
            inputs_embeds: [T, E], in place of the embedding's rows.
            rows: [R] int64, the tokens whose hidden state is wanted; None for all. What only the others need
                is not computed.

        Returns: final normed hidden states, [R, E] or [T, E].
        """
        hidden = self._embed(token_ids, inputs_embeds)
        work = self._workspace.activations(hidden.shape[0])
        # The residual stream is changed in place by every layer; the caller's embeddings are not ours.
        residual = work.residual.copy_(hidden)
        normed = self.layers[0].input_norm(residual, work.normed)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attended = self._attend(layer, normed, positions, metas[layer.group], work)
            if index == last and rows is not None:
                attended, residual = attended[rows], residual[rows]
                work = self._workspace.activations(rows.shape[0])
            hidden = layer.output(attended, work.hidden)
            normed = layer.post_norm.add(hidden, residual, work.normed)
            gated = self.kernels.silu_mul(layer.gate_up(normed, work.wide), work.gated)
            hidden = layer.down(gated, work.hidden)
            following = self.norm if index == last else self.layers[index + 1].input_norm
            normed = following.add(hidden, residual, work.normed)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of final hidden states: [R, E] -> [R, V] in the activations' dtype."""
        return self.head(hidden, self._workspace.logits(hidden.shape[0]))

    def _embed(self, token_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        if inputs_embeds is not None:
            return inputs_embeds.to(self.dtype)
        assert token_ids is not None
        return self.embedding(token_ids)

    def _attend(
        self, layer: DecoderLayer, normed: Tensor, positions: Tensor, meta: AttentionMeta, work: Activations
    ) -> Tensor:
        qkv = layer.qkv(normed, work.qkv)
        query, key, value = (
            (work.query, work.key, work.value) if qkv is work.qkv else self._workspace.split_heads(qkv)
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        if layer.rotary is not None:
            layer.rotary(query, key, positions)
        assert layer.kv is not None
        self.kernels.store_kv(key, value, layer.kv, meta.slot_mapping)
        self.kernels.attention(query, layer.kv, meta, self._scale, window=layer.window, out=work.heads)
        return work.attended

    def _make_layer(self, index: int, rotary: RotaryEmbedding | None) -> DecoderLayer:
        c, place, parallel = self.config, f"model.layers.{index}", self._parallel
        qkv = QKVLinear(
            f"{place}.self_attn.qkv_proj", self.method, parallel,
            c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.qkv_bias,
        )  # fmt: skip
        output = RowLinear(
            f"{place}.self_attn.o_proj", self.method, parallel,
            c.num_heads * c.head_dim, (c.hidden_size,), c.output_bias,
        )  # fmt: skip
        gate_up = MergedLinear(
            f"{place}.mlp.gate_up_proj", self.method, parallel,
            c.hidden_size, (c.intermediate_size, c.intermediate_size), c.mlp_bias,
        )  # fmt: skip
        down = RowLinear(
            f"{place}.mlp.down_proj", self.method, parallel, c.intermediate_size, (c.hidden_size,), c.mlp_bias
        )
        for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
            self._targets[f"{place}.self_attn.{name}"] = (qkv, part)
        for part, name in enumerate(("gate_proj", "up_proj")):
            self._targets[f"{place}.mlp.{name}"] = (gate_up, part)
        self._targets[f"{place}.self_attn.o_proj"] = (output, 0)
        self._targets[f"{place}.mlp.down_proj"] = (down, 0)
        has_norms = c.family.qk_norm
        return DecoderLayer(
            input_norm=self._make_norm(f"{place}.input_layernorm", c.hidden_size),
            qkv=qkv,
            output=output,
            post_norm=self._make_norm(f"{place}.post_attention_layernorm", c.hidden_size),
            gate_up=gate_up,
            down=down,
            window=c.windows[index],
            rotary=rotary if c.uses_rope[index] else None,
            query_norm=self._make_norm(f"{place}.self_attn.q_norm", c.head_dim) if has_norms else None,
            key_norm=self._make_norm(f"{place}.self_attn.k_norm", c.head_dim) if has_norms else None,
        )

    def _make_norm(self, name: str, size: int) -> RMSNorm:
        norm = RMSNorm(name, size, self.config.norm_eps, self.kernels, self.dtype, self.device)
        self._targets[name] = (norm, 0)
        return norm
