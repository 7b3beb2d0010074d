"""Decoder: the one stack of pre-norm attention and gated-MLP layers that all families here share."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from batchgen.kernels.kv import AttentionMeta, KVCacheSpec, LayerKV
from batchgen.kernels.lora import LoraSegments
from batchgen.kernels.ops import Activation, Kernels
from batchgen.layers.embedding import Embedding
from batchgen.layers.linear import LMHead, QKVLinear
from batchgen.layers.parallel import ParallelContext
from batchgen.layers.rotary import RotaryEmbedding
from batchgen.models.adapter_lane import AdapterLane, StepAdapters
from batchgen.models.decoder_layer import DecoderLayer, Linear, WeightTarget, input_bits
from batchgen.models.kv_layout import KVLayout, kv_layout
from batchgen.models.layer_maker import LayerMaker
from batchgen.models.model_config import ModelConfig
from batchgen.models.recorded import RecordedForward
from batchgen.models.workspace import Activations, InputRoom, Workspace
from batchgen.quantization.base import LinearMethod
from batchgen.quantization.rotation import Rotation


class AdaptedHead(Protocol):
    """What adapters do to what the head gives."""

    def add(self, x: Activation, segments: LoraSegments, whole_slots: tuple[int, ...], out: Tensor) -> None:
        """Change logits [R, V] of inputs [R, E] in place."""


class Decoder:
    """A decoder-only language model over a paged cache.

    Weights come through `weight_targets`, the cache through `bind_kv`; then `forward` and `logits` run. One
    thread calls it; results live until the next call (they share a workspace).

    Args:
        config: the shape.
        kernels: the operations.
        method: how linear layers store and multiply weights.
        kv_dtype: of the cache.
        device: of weights and activations.
        max_len: positions that will be asked for.
        block_size: of the cache.
        parallel: this rank's place.
        rope_divisors: see `RotaryEmbedding`.
        rotation: of the residual stream, as the weights will be loaded.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        method: LinearMethod,
        *,
        kv_dtype: str,
        device: torch.device,
        max_len: int,
        block_size: int,
        parallel: ParallelContext | None = None,
        rope_divisors: Tensor | None = None,
        rotation: Rotation | None = None,
    ):
        self.config, self.kernels, self.method, self.device = config, kernels, method, device
        self.rotation, self.max_len = rotation, max_len
        self.dtype = method.dtype
        self.parallel = parallel or ParallelContext()
        self._targets: dict[str, tuple[WeightTarget, int]] = {}
        self._scale = config.head_dim**-0.5
        c = config
        # Folding the last norm into the head alone makes the two different.
        shares_table = c.tie_embeddings and method.of("lm_head").has_rows and rotation is None
        self.head = LMHead("lm_head", method, self.parallel, c.hidden_size, (c.vocab_size,))
        self.embedding = Embedding(
            "model.embed_tokens", c.vocab_size, c.hidden_size, self.parallel, kernels, self.dtype, device,
            head=self.head if shares_table else None,
        )  # fmt: skip
        self.lane = AdapterLane()
        self._embed: Callable[[Tensor, Tensor], Tensor] = self.embedding
        self._adapted_head: AdaptedHead | None = None
        self._targets["model.embed_tokens"] = (self.embedding, 0)
        if not shares_table:
            self._targets["lm_head"] = (self.head, 0)
        self._rotary = (
            RotaryEmbedding(c.rope, max_len, kernels, device, rope_divisors) if any(c.uses_rope) else None
        )
        maker = LayerMaker(c, kernels, method, self.parallel, device, self._targets)
        self.layers = [maker.layer(index, self._rotary) for index in range(c.num_layers)]
        self.norm = maker.norm("model.norm", c.hidden_size)
        qkv = self._targets["model.layers.0.self_attn.q_proj"][0]
        assert isinstance(qkv, QKVLinear)
        self._workspace = Workspace(
            self.dtype, device,
            hidden_size=c.hidden_size, wide_size=2 * c.intermediate_size // self.parallel.size,
            vocab_size=c.vocab_size, num_heads=qkv.num_heads, num_kv_heads=qkv.num_kv_heads,
            head_dim=c.head_dim,
        )  # fmt: skip
        specs = [
            KVCacheSpec(qkv.num_kv_heads, c.head_dim, block_size, kv_dtype, window=window)
            for window in c.windows
        ]
        self.kv_layout: KVLayout = kv_layout(specs, max_len)
        for layer, group in zip(self.layers, self.kv_layout.groups, strict=True):
            layer.group = group
        self.recorded = RecordedForward()

    def weight_targets(self) -> dict[str, tuple[WeightTarget, int]]:
        """Module name in a Hugging Face checkpoint -> what takes its tensors, and as which fused part."""
        return dict(self._targets)

    def wrap_linears(self, wrap: Callable[[str, Linear], Linear]) -> None:
        """Put something around every linear layer: `wrap` gets its name and the layer and returns either.

        The names are "model.layers.0.self_attn.qkv_proj", "...o_proj", "...mlp.gate_up_proj", "...down_proj".
        """
        self.recorded.forget()
        for index, layer in enumerate(self.layers):
            place = f"model.layers.{index}"
            layer.qkv = wrap(f"{place}.self_attn.qkv_proj", layer.qkv)
            layer.output = wrap(f"{place}.self_attn.o_proj", layer.output)
            layer.gate_up = wrap(f"{place}.mlp.gate_up_proj", layer.gate_up)
            layer.down = wrap(f"{place}.mlp.down_proj", layer.down)

    def adapt_ends(self, embed: Callable[[Tensor, Tensor], Tensor], head: "AdaptedHead") -> None:
        """Put something around the embedding, and say what adapters add to what the head gives."""
        self.recorded.forget()
        self._embed, self._adapted_head = embed, head

    def bind_kv(self, caches: Sequence[LayerKV]) -> None:
        """Give every layer its cache; there is one for each place of `kv_layout`."""
        self.recorded.forget()
        for layer, place in zip(self.layers, self.kv_layout.places, strict=True):
            layer.kv = caches[place]

    def release(self) -> None:
        """Let go of the cache and of the activations' memory; `bind_kv` comes before the next step."""
        self.recorded.forget()
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
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Run the layers over the tokens of a step, writing their keys and values to the cache.

        Args:
            token_ids: [T] int64, or None with `inputs_embeds`.
            positions: [T] int64, or [rows, T] for models that have several.
            metas: how the batch reads and writes the cache, for each group of layers.
            inputs_embeds: [T, E], in place of the embedding's rows.
            rows: [R] int64, the tokens whose hidden state is wanted; None for all. What only the others need
                is not computed.
            adapters: which slots the tokens belong to, where layers have slots; None: none to any.

        Returns: final normed hidden states, [R, E] or [T, E].
        """
        work = self._workspace.activations(positions.shape[-1])
        residual = work.residual
        self.lane.begin(adapters)
        if inputs_embeds is not None:
            turned = inputs_embeds if self.rotation is None else self.rotation.inputs(inputs_embeds)
            residual.copy_(turned)
        else:
            assert token_ids is not None
            self._embed(token_ids, residual)
        following = [*self.layers[1:], None]
        first = self.layers[0]
        normed = first.input_norm(residual, work.normed.of(input_bits(first.qkv)))
        for layer, after in zip(self.layers, following, strict=True):
            attended = self._attend(layer, normed, positions, metas[layer.group], work)
            if after is None and rows is not None:
                work, attended, residual = self._pick(attended, residual, rows)
                self.lane.segments = None if adapters is None else adapters.rows
            hidden = layer.output(self._as_input(attended, layer.output, work.attended), work.hidden)
            normed = layer.post_norm.add(hidden, residual, work.normed.of(input_bits(layer.gate_up)))
            wide = layer.gate_up(normed, work.wide)
            gated = self.kernels.silu_mul(wide, work.gated.of(input_bits(layer.down)))
            hidden = layer.down(gated, work.hidden)
            if after is not None:
                normed = after.input_norm.add(hidden, residual, work.normed.of(input_bits(after.qkv)))
        normed = self.norm.add(hidden, residual, work.normed.floats)
        self.lane.begin(None)
        assert isinstance(normed, Tensor)
        return normed

    def run(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metas: Sequence[AttentionMeta],
        rows: Tensor,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """The same as `forward`, from a recording of it where the kernels can make one."""
        return self.recorded.run(self, token_ids, positions, metas, rows, adapters)

    def logits(
        self,
        hidden: Tensor,
        segments: LoraSegments | None = None,
        whole_slots: tuple[int, ...] = (),
    ) -> Tensor:
        """Logits of final hidden states: [R, E] -> [R, V] in the activations' dtype.

        Args:
            hidden: of some rows.
            segments: which slots they belong to, if an adapter in any of these changes the head.
            whole_slots: see `StepAdapters`.
        """
        room = self._workspace.activations(hidden.shape[0]).normed
        x = self._as_input(hidden, self.head, room)
        logits = self.head(x, self._workspace.logits(hidden.shape[0]))
        if segments is not None and self._adapted_head is not None:
            self._adapted_head.add(x, segments, whole_slots, logits)
        return logits

    def drawn(
        self,
        hidden: Tensor,
        vocab_size: int,
        temperature: Tensor | None = None,
        uniform: Tensor | None = None,
    ) -> Tensor | None:
        """A token below `vocab_size` for each final hidden state: [R, E] -> [R] int64, -1 for none.

        By temperature alone, see `Kernels.linear_draw`; without one the likeliest. None where that is no
        faster than to ask for the logits.
        """
        room = self._workspace.activations(hidden.shape[0]).normed
        head_input = self._as_input(hidden, self.head, room)
        if temperature is None or uniform is None:
            return self.head.argmax(head_input, vocab_size)
        return self.head.draw(head_input, vocab_size, temperature, uniform)

    def _as_input(self, x: Tensor, layer: Linear, room: InputRoom) -> Activation:
        """Floats in the form that the layer wants."""
        bits = input_bits(layer)
        return x if bits is None else self.kernels.quantize(x, room.quantized(bits))

    def _pick(self, attended: Tensor, residual: Tensor, rows: Tensor) -> tuple[Activations, Tensor, Tensor]:
        """Go on with some of the tokens only."""
        picked_attended, picked_residual = self._workspace.picked(rows.shape[0])
        self.kernels.gather_rows(attended, rows, picked_attended)
        self.kernels.gather_rows(residual, rows, picked_residual)
        return self._workspace.activations(rows.shape[0]), picked_attended, picked_residual

    def _attend(
        self,
        layer: DecoderLayer,
        normed: Activation,
        positions: Tensor,
        meta: AttentionMeta,
        work: Activations,
    ) -> Tensor:
        qkv = layer.qkv(normed, work.qkv)
        query, key, value = (
            (work.query, work.key, work.value) if qkv is work.qkv else self._workspace.split_heads(qkv)
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            normed_query, normed_key = self._workspace.normed_heads(query.shape[0])
            layer.query_norm(query, normed_query)
            layer.key_norm(key, normed_key)
            query, key = normed_query, normed_key
        if layer.rotary is not None:
            layer.rotary(query, key, positions)
        assert layer.kv is not None
        self.kernels.store_kv(key, value, layer.kv, meta.slot_mapping)
        self.kernels.attention(query, layer.kv, meta, self._scale, window=layer.window, out=work.heads)
        return work.attended.floats
