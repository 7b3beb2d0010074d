"""The size of the KV pool, and the reason that is given."""

from typing import Any

import pytest

from batchgen.config import CacheConfig
from batchgen.errors import CapacityError, ConfigError
from batchgen.kernels.kv import KVCacheSpec
from batchgen.models.kv_layout import KVLayout, kv_layout
from batchgen.worker import device
from batchgen.worker.decisions import Limits
from batchgen.worker.memory import PoolPlan, plan_blocks, plan_host_blocks

BLOCK = 1000


def layout(*windows: int | None, max_len: int = 1 << 20) -> KVLayout:
    return kv_layout([KVCacheSpec(2, 64, 16, "float32", window=window) for window in windows], max_len)


def plan(
    free: int = 10**9, on_cpu: bool = True, windows: tuple[int | None, ...] = (None,), **cache: Any
) -> PoolPlan:
    return plan_blocks(
        CacheConfig(**cache),
        layout(*windows, max_len=100),
        Limits(max_model_len=100, max_num_seqs=4, max_num_batched_tokens=8),
        block_bytes=BLOCK,
        free_bytes=free,
        on_cpu=on_cpu,
    )


def test_never_more_than_full_sequences_need() -> None:
    found = plan()
    assert found.num_blocks == 4 * 7  # 100 tokens are 7 blocks of 16
    assert "4 sequences of 100 tokens" in found.decision.reason


def test_a_share_of_what_is_free() -> None:
    assert plan(free=20 * BLOCK).num_blocks == 10
    assert "50% of" in plan(free=20 * BLOCK).decision.reason
    assert plan(free=20 * BLOCK, on_cpu=False, gpu_memory_utilization=0.9).num_blocks == 18


def test_a_cpu_pool_stops_growing_where_it_is_enough() -> None:
    def blocks(max_model_len: int, on_cpu: bool = True) -> int:
        return plan_blocks(
            CacheConfig(),
            layout(None),
            Limits(max_model_len=max_model_len, max_num_seqs=256, max_num_batched_tokens=512),
            block_bytes=1 << 20,
            free_bytes=64 << 30,
            on_cpu=on_cpu,
        ).num_blocks

    assert blocks(8192) == 4 << 10  # 4 GiB
    assert blocks(32768) == 4 * 2048  # four sequences of full length
    assert blocks(1 << 20) == 32 << 10  # never more than the share
    assert blocks(8192, on_cpu=False) == int((64 << 10) * 0.92)


def test_what_is_given_is_taken() -> None:
    assert plan(kv_cache_memory_bytes=100 * BLOCK + 999).num_blocks == 100
    assert plan(kv_cache_memory_bytes=100 * BLOCK, num_gpu_blocks_override=3).num_blocks == 3


def test_too_little_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes=999"):
        plan(kv_cache_memory_bytes=999)
    with pytest.raises(CapacityError, match="set kv_cache_memory_bytes"):
        plan(free=BLOCK)


def test_more_than_the_machine_has_is_refused_before_it_kills_a_job() -> None:
    for given in ({"num_gpu_blocks_override": 11}, {"kv_cache_memory_bytes": 11 * BLOCK}):
        with pytest.raises(CapacityError, match=f"{next(iter(given))} asks for .* are free; give less"):
            plan(free=10 * BLOCK, **given)
    assert plan(free=10 * BLOCK, num_gpu_blocks_override=10).num_blocks == 10


def test_what_windows_save_is_not_taken() -> None:
    # A group sees 20 positions, and a step adds 8: 27 tokens anywhere among blocks of 16 lie in 3 of them.
    assert plan(windows=(20,)).num_blocks == 4 * 3
    found = plan(windows=(None, 20))
    assert found.num_blocks == 4 * (7 + 3)
    assert "4 sequences of 100 tokens" in found.decision.reason
    assert plan(windows=(None, 200)).num_blocks == 4 * 7


def test_swap_space_is_host_memory_that_must_be_there() -> None:
    assert plan_host_blocks(0, block_bytes=BLOCK, free_bytes=0) == 0
    assert plan_host_blocks(1, block_bytes=1 << 20, free_bytes=2 << 30) == 1024
    assert plan_host_blocks(0.5, block_bytes=3 << 20, free_bytes=2 << 30) == 170
    with pytest.raises(CapacityError, match=r"swap_space=2 asks for 2048 MiB .* only 1000 MiB are free"):
        plan_host_blocks(2, block_bytes=1 << 20, free_bytes=1000 << 20)
    with pytest.raises(CapacityError, match=r"swap_space=0\.001 GiB does not hold one KV block"):
        plan_host_blocks(0.001, block_bytes=2 << 20, free_bytes=2 << 30)


def test_memory_and_cpus_of_a_container(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    whole = device.available_memory()
    assert whole > 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert device.available_memory() > 2**20
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    assert device.available_memory() == 500_000
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 700000\n")
    assert device.available_memory() == 1_200_000
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    threads, reason = device.cpu_threads()
    assert (threads, "0.5 CPUs" in reason) == (1, True)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert device.cpu_threads()[0] >= 1
