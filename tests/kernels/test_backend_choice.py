"""Which backend serves an operation, why, and what happens to one that cannot."""

import pytest
import torch

from batchgen.errors import KernelError, UnknownNameError
from batchgen.kernels.backend import BACKENDS, OPERATIONS, PREFERENCE, Choice, KernelBackend, OpShape, select
from batchgen.kernels.kv import KVCacheSpec, LayerKV
from batchgen.kernels.ops import Kernels, choose
from batchgen.kernels.reference import ReferenceBackend

SHAPE = OpShape(head_dim=64)


class Backwards(ReferenceBackend):
    """A second implementation with a layout of its own: the tokens of a block, flat and from its end."""

    name = "backwards"
    operations = frozenset({"attention", "store_kv"})

    def allocate_kv(self, spec, num_blocks, device):
        width = 2 * spec.num_kv_heads * spec.head_dim * spec.block_size
        return LayerKV(spec, torch.empty(num_blocks, width), self.name)

    def _tokens(self, kv):
        spec = kv.spec
        shape = (kv.num_blocks, spec.block_size, 2, spec.num_kv_heads, spec.head_dim)
        return kv.data.view(shape).flip(1).flatten(0, 1)

    def store_kv(self, key, value, kv, slot_mapping):
        size = kv.spec.block_size
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                flat = kv.data[slot // size].view(size, 2, *key.shape[1:])
                flat[size - 1 - slot % size] = torch.stack([key[token], value[token]])

    def read_kv(self, kv, slots):
        tokens = self._tokens(kv)[slots.long()]
        return tokens[:, 0], tokens[:, 1]

    def attention(self, query, kv, meta, scale, window, soft_cap, out):
        plain = super().allocate_kv(kv.spec, kv.num_blocks, kv.data.device)
        slots = torch.arange(kv.num_blocks * kv.spec.block_size, dtype=torch.int32)
        super().store_kv(*self.read_kv(kv, slots), plain, slots)
        return super().attention(query, plain, meta, scale, window, soft_cap, out)


@pytest.fixture
def backwards(monkeypatch):
    """Registers the second implementation for one test."""
    BACKENDS.names()
    monkeypatch.setattr(BACKENDS, "_entries", {**BACKENDS._entries, "backwards": Backwards()})


def test_auto_takes_the_first_that_can(monkeypatch):
    monkeypatch.setitem(PREFERENCE, "cpu", ("gpu", "reference"))
    choice = select("rms_norm", "cpu", "float32", SHAPE)
    assert choice.backend == "reference"
    assert choice.reason == "gpu has no rms_norm"
    assert str(choice) == "reference (gpu has no rms_norm)"


def test_auto_says_why_the_c_kernels_do_not_serve_bfloat16():
    choice = select("linear", "cpu", "bfloat16", SHAPE)
    assert choice.backend == "reference"
    assert "float32 only" in choice.reason


def test_unknown_backend_names_the_nearest():
    with pytest.raises(UnknownNameError, match="did you mean 'reference'"):
        select("linear", "cpu", "float32", SHAPE, backend="referense")


def test_forced_backend_that_cannot_is_an_error():
    with pytest.raises(KernelError, match=r"'cpu' cannot serve linear for bfloat16.*float32 only"):
        choose("cpu", "bfloat16", backend="cpu", head_dim=64)
    with pytest.raises(KernelError, match="multiple of 16"):
        choose("cpu", "float32", backend="cpu", head_dim=64, block_size=24)
    with pytest.raises(KernelError, match="not on cuda"):
        choose("cuda", "float32", backend="cpu", head_dim=64)
    with pytest.raises(KernelError, match="gpu"):
        choose("cpu", "float32", backend="gpu", head_dim=64)


def test_forced_backend_without_an_operation_leaves_it_to_the_reference(backwards):
    kernels = choose("cpu", "float32", backend="backwards", head_dim=64)
    assert kernels.choices["attention"] == Choice("backwards", "forced")
    assert kernels.choices["linear"] == Choice("reference", "backwards has no linear")


def test_reproducible_takes_only_kernels_that_promise_it():
    if BACKENDS.get("cpu").unavailable("cpu") is None:
        kernels = choose("cpu", "float32", reproducible=True, head_dim=64)
        assert kernels.is_reproducible
        assert {choice.backend for choice in kernels.choices.values()} == {"cpu"}
    with pytest.raises(KernelError, match="depends on the batch"):
        choose("cpu", "float32", backend="reference", reproducible=True, head_dim=64)
    assert not choose("cpu", "float32", backend="reference", head_dim=64).is_reproducible


def test_store_and_attention_share_a_backend():
    choices = {op: Choice("reference", "") for op in OPERATIONS}
    with pytest.raises(KernelError, match="one backend"):
        Kernels({**choices, "store_kv": Choice("cpu", "")}, dtype="float32", device="cpu")


def test_layer_kv_is_opaque(backwards):
    """Storing, copying, poisoning and attending work on a layout that nobody else knows."""
    from batchgen.kernels.cases import CASES, make_inputs, relative_rms, truth

    case = CASES[2]
    kernels = choose("cpu", "float32", backend="backwards", head_dim=64)
    assert relative_rms(make_inputs(case, kernels, "float32").attend(case), truth(case, "float32")) < 1e-6
    kv = kernels.allocate_kv(KVCacheSpec(2, 64, 16, "float32"), 3, "cpu")
    key = torch.randn(16, 2, 64)
    kernels.store_kv(key, key + 1, kv, torch.arange(16, dtype=torch.int32))
    kernels.copy_blocks(kv, torch.tensor([[0, 2]]))
    kv.data[0] = float("nan")
    assert torch.equal(kernels.read_kv(kv, torch.arange(32, 48))[0], key)


def test_a_backend_needs_no_more_than_its_operations():
    class Empty(KernelBackend):
        name, operations = "empty", frozenset()

    backend = Empty()
    assert backend.unavailable("cpu") is None
    assert backend.unsupported("linear", "float32", SHAPE) is None
    with pytest.raises(NotImplementedError):
        backend.silu_mul(torch.ones(1, 2), None)
