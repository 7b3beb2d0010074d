"""A tokenizer built from the vocabulary and merges in a GGUF file, in a fraction of a second."""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from batchgen.errors import BatchgenError, ModelError, UnsupportedModelError
from batchgen.models.gguf_file import GGUFFile
from batchgen.tokenizer import pre_tokenizer_patterns as patterns

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "\u2581"  # how SentencePiece writes a space

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_from_gguf(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizers object of a GGUF file, and the other arguments of `batchgen.tokenizer.Tokenizer`.

    Raises:
        UnsupportedModelError: a kind of tokenizer, or a way of splitting words, that is not built.
        ModelError: the vocabulary or its merges are missing or damaged.
    """
    try:
        return _build(file)
    except BatchgenError:
        raise
    except Exception as error:  # the tokenizers library raises bare ones for merges that fit no token
        raise ModelError(
            f"{file.path.name}: the tokenizer in the GGUF file is damaged ({error}); give the original model "
            f"as `tokenizer`"
        ) from error


def _build(file: GGUFFile) -> tuple[Tokenizer, dict[str, Any]]:
    kind = file.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise UnsupportedModelError(
            f"{file.path.name}: tokenizer of kind {kind!r} is not built "
            f"(built: {', '.join(sorted(_BUILDERS))}); give the original model as `tokenizer`"
        )
    tokens: list[str] = file.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise ModelError(f"{file.path.name}: the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    types: list[int] = file.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    count = _without_padding(types)
    tokens, types = tokens[:count], types[:count]
    backend = _BUILDERS[kind](file, tokens, types)
    _add_special_tokens(backend, tokens, types)
    _add_template(backend, file, tokens, kind)

    def special(name: str) -> int | None:
        index = file.get(f"tokenizer.ggml.{name}")
        return int(index) if index is not None and index < len(tokens) else None

    ends = [special(key) for key in _END_KEYS]
    names = {name: special(f"{key}_token_id") for name, key in _NAMED.items()}
    return backend, {
        "vocab_size": len(tokens),
        "bos_token_id": special("bos_token_id"),
        "eos_token_ids": tuple(dict.fromkeys(index for index in ends if index is not None)),
        "special_names": {name: tokens[index] for name, index in names.items() if index is not None},
    }


def _without_padding(types: list[int]) -> int:
    """Number of ids without the unused ones that only pad the vocabulary's end."""
    count = len(types)
    while count and types[count - 1] == UNUSED:
        count -= 1
    return count


def _byte_level(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """Byte-level BPE, as GPT-2 has it; how words are split first depends on `tokenizer.ggml.pre`."""
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in patterns.PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{file.path.name}: the way {pre!r} of splitting words (tokenizer.ggml.pre) is not built "
            f"(built: {', '.join(sorted(patterns.PRE_TOKENIZERS))}); give the original model as `tokenizer`"
        )
    style = patterns.PRE_TOKENIZERS[pre]
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", [])]
    if not merges and any(
        len(token) > 1 for token, kind in zip(tokens, types, strict=True) if kind == NORMAL
    ):
        raise ModelError(f"{file.path.name}: the GGUF file has no merges (tokenizer.ggml.merges)")
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab, merges, ignore_merges=style.takes_whole_words))
    backend.pre_tokenizer = _splitter(style)
    backend.normalizer = style.normalizer() if style.normalizer else None
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitter(style: "patterns.Style") -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if style.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if style.pattern is None:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        steps.append(pre_tokenizers.Split(Regex(style.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _sentence_piece(file: GGUFFile, tokens: list[str], types: list[int]) -> Tokenizer:
    """SentencePiece BPE: the piece of the highest score is merged first; unknown characters become bytes."""
    vocab = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in file:
        merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges")]
    else:
        merges = merges_from_scores(vocab, file.get("tokenizer.ggml.scores"))
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(BPE(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefixes = file.get("tokenizer.ggml.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme="first" if prefixes else "never", split=False
    )
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixes:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece scores imply: every split of a piece into two, best score first."""
    merges = []
    for piece, index in vocab.items():
        splits = [
            (piece[:at], piece[at:])
            for at in range(1, len(piece))
            if piece[:at] in vocab and piece[at:] in vocab
        ]
        splits.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(scores[index], len(left), len(right), (left, right)) for left, right in splits]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [merge[3] for merge in merges]


_BUILDERS: dict[str, Callable[[GGUFFile, list[str], list[int]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
}


def _add_special_tokens(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, UNKNOWN)
        ]
    )
    # Found whole in any text, but not control tokens: "<think>".
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == USER_DEFINED
        ]
    )


def _add_template(backend: Tokenizer, file: GGUFFile, tokens: list[str], kind: str) -> None:
    """Put BOS and EOS around a text where the file, or its kind of tokenizer, says so."""
    pre = file.get("tokenizer.ggml.pre", "default")
    style = patterns.PRE_TOKENIZERS.get(pre) if kind == "gpt2" else None
    begins = file.get(
        "tokenizer.ggml.add_bos_token", kind == "llama" or (style is not None and style.adds_bos)
    )
    ends = file.get("tokenizer.ggml.add_eos_token", False)
    bos, eos = file.get("tokenizer.ggml.bos_token_id"), file.get("tokenizer.ggml.eos_token_id")
    around: list[tuple[str, int]] = []
    single = "$A:0"
    if begins and bos is not None:
        around.append((tokens[bos], bos))
        single = f"{tokens[bos]}:0 {single}"
    if ends and eos is not None:
        around.append((tokens[eos], eos))
        single = f"{single} {tokens[eos]}:0"
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} $B:1", special_tokens=list(dict(around).items())
        )
