"""The engine child's memory: what sleep gives back, and that closing gives back all of it."""

import os
import sys
from pathlib import Path

import pytest

from batchgen import LLM, SamplingParams
from batchgen.tiny_models import SPECIAL_TOKENS, random_ids, tiny_model, write_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=40, min_tokens=40)
MIB = 1 << 20


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(
        vocab_size=VOCAB_SIZE, hidden_size=512, intermediate_size=2048, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=8, head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    return write_folder(model, tmp_path_factory.mktemp("memory"))


@pytest.mark.slow
def test_sleep_and_end_of_an_engine_give_memory_back(folder: Path) -> None:
    prompts = [random_ids(900, seed=seed, vocab_size=VOCAB_SIZE) for seed in range(4)]
    # 4 times 940 tokens in 3 layers of 2 x 8 x 64 floats are 46 MB; the weights are 50 MB.
    with LLM(str(folder), device="cpu", num_gpu_blocks_override=240) as llm:
        pid = llm.info.pid
        assert pid != os.getpid()

        def tokens() -> list[list[int]]:
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        before = tokens()
        awake = resident(pid)
        asleep = {}
        for level in (1, 2):
            llm.sleep(level)
            asleep[level] = resident(pid)
            llm.wake_up()
            assert tokens() == before
            assert resident(pid) < awake + 20 * MIB
    assert awake - asleep[1] > 40 * MIB
    assert awake - asleep[2] > 80 * MIB
    assert not Path(f"/proc/{pid}").exists()
