"""The only door to the kernels: `choose` picks a backend per operation, `Kernels` is what a model holds.

Letters of shapes: T tokens in the batch, S sequences, H query heads, G key/value heads, D head size, E hidden
size, I intermediate size, K and N input and output size of a linear layer, B tokens in a block, P positions,
R rows of logits, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from batchgen.errors import KernelError
from batchgen.kernels import blocks, checks, sampling
from batchgen.kernels.backend import (
    BACKENDS,
    OPERATIONS,
    Choice,
    KernelBackend,
    OpShape,
    PackedLinear,
    select,
)
from batchgen.kernels.kv import AttentionMeta, KVCacheSpec, LayerKV, torch_dtype
from batchgen.kernels.lora import LoraBank, LoraPart, LoraSegments, PackedLora
from batchgen.kernels.program import Program, StepSizes
from batchgen.kernels.quantized import Quantized
from batchgen.kernels.row_ops import Activation, RowOps
from batchgen.kernels.sampling import Draws, Penalties, Scores

__all__ = [
    "Activation", "Choice", "Kernels", "LoraBank", "LoraPart", "LoraSegments", "PackedLinear", "PackedLora",
    "Quantized", "choose",
]  # fmt: skip


def choose(
    device: str,
    dtype: str,
    *,
    backend: str | None = None,
    reproducible: bool = False,
    head_dim: int,
    block_size: int = 16,
    kv_dtype: str | None = None,
) -> "Kernels":
    """Choose the backend of every operation, once, at start.

    Args:
        device: "cpu" or "cuda".
        dtype: name of the activations' dtype: "float32", "float16", "bfloat16".
        backend: force "reference", "cpu" or "gpu"; None takes the best that can serve.
        reproducible: take only kernels whose result for a row does not depend on what is computed with it.
        head_dim: D of the model.
        block_size: B of the KV cache.
        kv_dtype: of the KV cache; None for that of the activations.

    Raises:
        UnknownNameError: no backend of that name.
        KernelError: the forced backend cannot serve, or none can; says why.
    """
    shape = OpShape(
        head_dim=head_dim, block_size=block_size, reproducible=reproducible, kv_dtype=kv_dtype or dtype
    )
    choices = {op: select(op, device, dtype, shape, backend=backend) for op in OPERATIONS}
    for op, owner in (("store_kv", "attention"), ("gather_rows", "linear")):
        if choices[op].backend != choices[owner].backend:
            choices[op] = Choice(choices[owner].backend, f"{owner} has its layout")
    return Kernels(choices, dtype=dtype, device=device)


class Kernels(RowOps):
    """Every numeric operation of a model, each bound to its backend.

    Args:
        choices: operation -> the backend that serves it.
        dtype: name of the activations' dtype.
        device: "cpu" or "cuda", where they are.

    All operations compute sums in float32 (float64 for float64 input) and return the dtype of their first
    argument. An `out` that is given must be contiguous and receives the result; it never overlaps an input.
    Any operation raises ShapeError if shapes, strides or dtypes disagree, and DeviceError if tensors are on
    different devices.
    """

    def __init__(self, choices: Mapping[str, Choice], *, dtype: str, device: str):
        self.choices = dict(choices)
        backends: dict[str, KernelBackend] = {
            op: BACKENDS.get(choice.backend) for op, choice in choices.items()
        }
        for op, owner in (("store_kv", "attention"), ("gather_rows", "linear")):
            if backends[op] is not backends[owner]:
                raise KernelError(f"{owner} and {op} need one backend; got {self.choices}")
        super().__init__(checks.Home(torch_dtype(dtype), device), backends)
        self._kv = backends["attention"]
        self._gather_rows = backends["gather_rows"].gather_rows
        self._rotary = backends["rotary"].rotary
        self._attention, self._store_kv = self._kv.attention, self._kv.store_kv
        self._sample, self._penalise = backends["sample"].sample, backends["penalise"].penalise
        self._score_tokens = backends["score_tokens"].score_tokens
        forward = {backends[op] for op in OPERATIONS if op not in ("sample", "score_tokens", "penalise")}
        self._recorder = forward.pop() if len(forward) == 1 else None
        self._is_reproducible = all(op in backend.invariant for op, backend in backends.items())

    @property
    def is_reproducible(self) -> bool:
        """Whether every operation gives a row the same bits in any batch, order and chunking."""
        return self._is_reproducible

    def record(self, build: Callable[[], None], sizes: StepSizes) -> Program | None:
        """Record the operations that `build` calls, without running them.

        Args:
            build: calls operations of this object only, on tensors that stay where they are; results that it
                does not give an `out` for are memory of the program.
            sizes: of the tensors that `build` works on, all different; a step of the program has at most so
                many of each.

        Returns: the program, or None if the backends cannot record; then nothing was called.
        Raises: KernelError if an operation's rows are none of a step's.
        """
        return None if self._recorder is None else self._recorder.record(build, sizes)

    def gather_rows(self, source: Tensor | PackedLinear, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Pick rows of a table, or of a packed weight: so that a tied embedding needs no second copy.

        Shapes: source [P, E], contiguous, or a weight of `pack_linear` or `pack_coded`; ids [T] int64.

        Returns: [T, E].
        Raises: KernelError if an id is outside of the rows.
        """
        checks.check_gather_rows(self.home, source, ids, out)
        if isinstance(source, PackedLinear) and source.is_coded:
            if out is None:
                out = torch.empty(
                    (ids.shape[0], source.in_features), dtype=self.home.dtype, device=ids.device
                )
            return self._backends["linear_coded"].gather_rows(source, ids, out)
        return self._gather_rows(source, ids, out)

    def rotary(
        self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, is_neox: bool = True
    ) -> None:
        """Rotate queries and keys by their positions.

        Shapes: query [T, H, D] and key [T, G, D], each dense within a token; positions [T] int64; cos_sin
            [P, rot_dim] float32 (or float64), rot_dim even and at most D: the first half of a row holds the
            cosines of rot_dim / 2 angles, the second half their sines. Dimensions past rot_dim stay as they
            are.
        is_neox: pair dimension i with i + rot_dim / 2; otherwise 2i with 2i + 1.
        In place: query and key.
        Raises: KernelError if a position is outside of cos_sin.
        Source: Su et al. 2021, arXiv:2104.09864.
        """
        checks.check_rotary(self.home, query, key, positions, cos_sin)
        self._rotary(query, key, positions, cos_sin, is_neox)

    def kv_block_bytes(self, spec: KVCacheSpec) -> int:
        """Bytes of one block of one layer as the backend lays it out, padding included."""
        return self._kv.kv_block_bytes(spec)

    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int, device: str | torch.device) -> LayerKV:
        """Allocate the blocks of one layer, uninitialised. What is never stored is never read."""
        return self._kv.allocate_kv(spec, num_blocks, torch.device(device))

    def store_kv(self, key: Tensor, value: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        """Write the keys and values of a step's tokens into the cache.

        Shapes: key, value [T, G, D], each dense within a token; slot_mapping [T] int32, block * B + offset,
            or -1 for a token that is stored nowhere. No slot twice.
        The cache may be of another dtype; int8 has a scale for each token and head, of keys and of values.
        In place: kv.
        Raises: KernelError if a slot is outside of the pool.
        """
        checks.check_store_kv(self.home, key, value, kv, slot_mapping)
        self._store_kv(key, value, kv, slot_mapping)

    def read_kv(self, kv: LayerKV, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Read tokens back as floats, for tests: slots [T] -> (key [T, G, D], value [T, G, D])."""
        return self._kv.read_kv(kv, slots)

    def attention(
        self,
        query: Tensor,
        kv: LayerKV,
        meta: AttentionMeta,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of a mixed batch of prefill chunks and decodes over the paged cache.

        The keys and values of this step's tokens are already stored (`store_kv`). Query i of a sequence with
        q queries and length n stands at position n - q + i and sees positions 0 up to its own.

        Shapes: query [T, H, D], dense within a token; H a multiple of G: query head h
            reads key/value head h // (H / G); meta as AttentionMeta says.
        scale: multiplies query · key; usually D ** -0.5.
        window: a query sees only its last `window` positions, its own included.
        soft_cap: scores become soft_cap * tanh(score / soft_cap).

        Returns: [T, H, D]. Scores and sums are float32 (float64 for float64). Slots past a sequence's length,
            and blocks wholly before a window, are never read into a result.
        Raises: KernelError if a block table or a length points outside of the pool.
        Source: Kwon et al. 2023, arXiv:2309.06180, section 4; running softmax: Milakov and Gimelshein 2018,
            arXiv:1805.02867.
        """
        checks.check_attention(self.home, query, kv, meta, window, soft_cap, out)
        return self._attention(query, kv, meta, scale, window, soft_cap, out)

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        """Draw a token from each row of logits.

        Shapes: logits [R, V] float32, dense rows; draws as Draws says.
        In place: rows of logits for which `draws.is_replaced`.

        Returns: [R] int64 on the CPU; -1 for a row that holds a NaN or whose largest logit is infinite.
        """
        checks.check_logits("sample", logits, self.home.device)
        sampling.check_draws(logits, draws)
        return self._sample(logits, draws)

    def score_tokens(self, logits: Tensor, tokens: Tensor, num_top: Tensor) -> Scores:
        """Say how likely tokens are, and which are the likeliest.

        Shapes: logits [R, V] float32, dense rows; on the CPU: tokens [R, M] int64, -1 for none; num_top [R]
            int64, how many of the likeliest a row wants, 0 to V.
        Raises: KernelError if an id or a number is out of range.
        """
        checks.check_logits("score_tokens", logits, self.home.device)
        sampling.check_asked(logits, tokens, num_top)
        return self._score_tokens(logits, tokens, num_top)

    def penalise(self, logits: Tensor, penalties: Penalties) -> None:
        """Take off from the logits of tokens that came before: logits [R, V] float32, in place.

        Source: Keskar et al. 2019, arXiv:1909.05858, section 4.1 for repetition; presence and frequency as
            OpenAI's interface defines them, over drawn tokens only.
        """
        checks.check_logits("penalise", logits, self.home.device)
        sampling.check_penalties(logits, penalties)
        self._penalise(logits, penalties)

    def copy_blocks(self, kv: LayerKV, pairs: Tensor) -> None:
        """Copy whole blocks: pairs [P, 2] int64, (source, target).

        All sources are read before a target is written. No layout is needed: the block is outermost.
        """
        blocks.copy(kv, pairs)

    def allocate_host_kv(self, caches: Sequence[LayerKV], num_blocks: int) -> list[LayerKV]:
        """Allocate blocks in host memory for each of some caches; pinned if those are on a GPU."""
        if self.home.device == "cpu":
            return [self.allocate_kv(kv.spec, num_blocks, "cpu") for kv in caches]
        return blocks.allocate_host(caches, num_blocks)

    def swap_blocks(self, source: LayerKV, target: LayerKV, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks to host memory or back: pairs of (block of source, block of target).

        On a GPU the copies take their turn in the current stream and the call does not wait for them, so the
        host's blocks may be read only by what comes after them in that stream.

        Raises: ShapeError if the blocks differ; KernelError if one is outside of its pool.
        """
        blocks.swap(source, target, pairs)
