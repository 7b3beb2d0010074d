"""A real (tiny, random) model behind the engine: tokens do not depend on who else runs, nor on the pool."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen.config import EngineConfig
from batchgen.engine.in_process import InProcessClient
from batchgen.engine.loading import load_core
from batchgen.engine.messages import EngineRequest
from batchgen.testing import ByteTokenizer
from batchgen.tiny_models import tiny_model, write_folder

Tokens = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tiny_model(max_position_embeddings=256), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def requests(make_request: Callable[..., EngineRequest]) -> list[EngineRequest]:
    return [
        make_request(
            str(number),
            [*([5 + number % 3] * (10 + 7 * number)), 9, number],
            temperature=float(number % 2),
            n=1 + number % 3,
            seed=number,
            ignore_eos=True,
            max_tokens=8 + 3 * number,
        )
        for number in range(9)
    ]


def run(model: Path, requests: list[EngineRequest], **engine_args: Any) -> tuple[Tokens, Any]:
    config = EngineConfig.from_engine_args(model=str(model), max_model_len=256, **engine_args)
    client = InProcessClient(load_core(config), ByteTokenizer())
    assert client.info.reproducible
    for request in requests:
        client.add(request)
    tokens: Tokens = {}
    while client.in_flight():
        for output in client.poll():
            assert output.error is None
            tokens[output.request_id] = [sample.token_ids for sample in output.outputs]
    stats = client.stats()
    client.shutdown()
    return tokens, stats


@pytest.fixture(scope="module")
def alone(model: Path, requests: list[EngineRequest]) -> Tokens:
    tokens, _ = run(model, requests, max_num_seqs=1, enable_prefix_caching=False, reproducible=True)
    assert len({tuple(sample) for samples in tokens.values() for sample in samples}) > 12
    return tokens


@pytest.mark.parametrize(
    "engine_args",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 3, "max_num_batched_tokens": 33},
        {"num_gpu_blocks_override": 12},
        {"num_gpu_blocks_override": 12, "enable_prefix_caching": False},
        {"block_size": 32, "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_batch_chunks_cache_or_preemption(
    model: Path, requests: list[EngineRequest], alone: Tokens, engine_args: dict[str, Any]
) -> None:
    tokens, stats = run(model, requests[::-1], reproducible=True, **engine_args)
    assert tokens == alone
    assert (stats.num_preemptions > 0) is ("num_gpu_blocks_override" in engine_args)
