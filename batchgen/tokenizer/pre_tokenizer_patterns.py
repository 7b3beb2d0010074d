"""How the byte-level tokenizers of a GGUF file cut text into words, by the file's `tokenizer.ggml.pre`.

The patterns are those that each family's published tokenizer.json states; its vocabulary was learned on
words cut so.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import normalizers


@dataclass(frozen=True, slots=True)
class Style:
    """One way of cutting.

    Args:
        pattern: a regular expression whose matches are the words; None is GPT-2's own.
        splits_digits: each digit is first cut off on its own.
        takes_whole_words: a word that is in the vocabulary is taken whole, whatever the merges say.
        adds_bos: a text begins with BOS where the file does not say whether it does.
        normalizer: makes what rewrites the text before.
    """

    pattern: str | None = None
    splits_digits: bool = False
    takes_whole_words: bool = False
    adds_bos: bool = False
    normalizer: Callable[[], normalizers.Normalizer] | None = None


def _words(digits: str) -> str:
    """Contractions; a word with at most one leading mark; numbers; runs of marks; line ends; spaces."""
    contraction = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    return (
        contraction
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = Style()
_DIGITS_THEN_GPT2 = Style(splits_digits=True)
_LLAMA3 = Style(_words(r"\p{N}{1,3}"), takes_whole_words=True, adds_bos=True)
_QWEN2 = Style(_words(r"\p{N}"), normalizer=normalizers.NFC)
_TEKKEN = Style(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    takes_whole_words=True,
    adds_bos=True,
)

PRE_TOKENIZERS: dict[str, Style] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "olmo": _GPT2,
    "mpt": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "exaone": _DIGITS_THEN_GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "tekken": _TEKKEN,
}
