"""The setting `kv_cache_dtype`: what is decided and told, and tokens over each type of cache."""

from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import ConfigError
from batchgen.tiny_models import random_ids

PROMPTS = [random_ids(count, seed=count, vocab_size=256) for count in (5, 17, 40)]
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}


def test_auto_is_that_of_the_activations(folder: Path, load: Any) -> None:
    info = load(folder).info
    assert info.resolved["kv_cache_dtype"] == info.environment["kv_cache_dtype"] == "float32"
    assert "kv_cache_dtype=float32 (as the activations)" in info.decisions
    assert load(folder, dtype="bfloat16").info.resolved["kv_cache_dtype"] == "bfloat16"


@pytest.mark.parametrize("kv_dtype", BYTES)
def test_a_type_is_told_and_counted_where_memory_is_planned(kv_dtype: str, folder: Path, load: Any) -> None:
    plain, info = load(folder).info, load(folder, kv_cache_dtype=kv_dtype).info
    assert info.resolved["kv_cache_dtype"] == info.environment["kv_cache_dtype"] == kv_dtype
    assert not any(text.startswith("kv_cache_dtype=") for text in info.decisions), "nothing was left to us"
    smaller = plain.block_bytes * BYTES[kv_dtype] / 4
    # 8 bits come with two scales for each token and head.
    assert info.block_bytes == smaller if BYTES[kv_dtype] > 1 else smaller < info.block_bytes < 2 * smaller
    pools = [
        load(folder, kv_cache_dtype=each, kv_cache_memory_bytes=2**20).info for each in ("float32", kv_dtype)
    ]
    assert pools[1].num_blocks == 2**20 // info.block_bytes >= pools[0].num_blocks


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8", "fp8"])
def test_tokens_are_those_of_the_reference_over_that_cache(
    kv_dtype: str, folder: Path, load: Any, generate: Any
) -> None:
    expected = generate(load(folder, kv_cache_dtype=kv_dtype, kernel_backend="reference"), PROMPTS, 12)
    executor = load(folder, kv_cache_dtype=kv_dtype)
    assert executor.info.reproducible
    together = generate(executor, PROMPTS, 12)
    assert together == expected
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        assert generate(executor, [prompt], 12, first_block=30)[0] == tokens


def test_a_backend_that_lacks_a_type_says_so(
    folder: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="keep the KV cache in float32, as activations are, not in int8"):
        load(folder, kernel_backend="gpu", kv_cache_dtype="int8")
