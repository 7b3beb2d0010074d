"""What cannot be enforced is refused with the key and the reason; tokens are the bytes they decode to."""

import json
import re
from typing import Any

import numpy as np
import pytest
import tokenizers

from batchgen.byte_tokenizer import ByteTokenizer
from batchgen.sampling_parts import StructuredOutputsParams
from batchgen.structured.grammars import Grammars
from batchgen.structured.vocabulary import Vocabulary
from batchgen.tokenizer import Tokenizer

REFUSED = [
    ({"json": {"properties": {"a": {"uniqueItems": True}}}}, r"'uniqueItems' \(at properties.a\); leave"),
    ({"json": {"anyOf": [{"minProperties": 2}]}}, r"json: .*minProperties 2 .*\(at anyOf.0\)"),
    (
        {"json": {"items": {"allOf": [{"pattern": f"^a{{{n}}}$"} for n in range(30)]}}},
        r"json: .*more than 12 patterns.*\(at items\)",
    ),
    ({"json": {"allOf": [{"multipleOf": n} for n in (7, 11, 13, 17, 19, 23)]}}, "json: .*4 multipleOf"),
    ({"json": {"const": "a\x01b"}}, "json: .*control character"),
    ({"json": {"pattern": r"a\x1fb"}}, "json: .*control character"),
    ({"json": {"patternProperties": {r"^\u0007": {}}}}, "json: .*control character"),
    ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "json: .*oneOf whose .* overlap"),
    ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "json: .*'not'; leave it out"),
    ({"json": {"if": {}, "contains": {}}}, "json: .*'contains', 'if'; leave them out"),
    ({"json": {"type": "strin"}}, "json: .*type 'strin' is none of array, "),
    ({"json": {"items": {"type": ["null", "nul"]}}}, r"json: .*type 'nul' is none of .* \(at items\)"),
    ({"json": {"items": {"format": "x"}}}, r"json: .*format 'x' \(at items\) is not known; leave it out"),
    ({"json": {"$ref": "#/$defs/a"}}, r"json: .*\$ref '#/\$defs/a' leads nowhere"),
    ({"json": {"type": "string", "format": "date", "maxLength": 3}}, "json: .*no text has its pattern"),
    ({"json": {"multipleOf": 0}}, "json: .*multipleOf must be above 0"),
    ({"json": {"$ref": "https://example.com/other"}}, "json: .*leads out of the schema; copy"),
    ({"json": "false"}, "json: must be a schema that some text conforms to"),
    ({"json": {"enum": []}}, "json: .*no text conforms to it"),
    ({"json": {"minimum": float("nan")}}, "json: .*no JSON"),
    ({"json": {"type": "string", "pattern": "(?=a)b"}}, r"json: .*'\(\?=a\)b': look-around"),
    ({"regex": "(?<!a)b"}, "regex: .*look-around"),
    ({"regex": "(a"}, "regex: .*unclosed group"),
    ({"regex": r"\bfoo"}, r"regex: .*look-around such as '\\b' is not supported; the whole text"),
    ({"regex": "a^b"}, r"regex: .*'a\^b': '\^' that is not its beginning"),
    ({"grammar": "start: foo"}, 'grammar: .*line 1, column 8: unknown name: "foo"'),
    ({"grammar": 'start: a\na: "b'}, "grammar: .*line 2, column 6: neither a name, a text in double quotes"),
    ({"grammar": 'a: "b"'}, "grammar: .*it has no rule 'start'"),
    ({"grammar": 'a ::= "b"'}, r"grammar: as GBNF \(it has '::='\): No 'root' rule"),
    ({"json_object": True, "whitespace_pattern": "("}, "whitespace_pattern: .*unclosed group"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_cannot_be_enforced_is_refused_with_key_and_reason(
    smollm: Tokenizer, given: dict[str, Any], reason: str
) -> None:
    params = StructuredOutputsParams(**given)
    # A job without a model's tokenizer (`echo:`) is told the same.
    for tokenizer in (smollm, ByteTokenizer()):
        text = Grammars(Vocabulary(tokenizer, tokenizer.eos_token_ids)).refusal(params)
        assert text is not None
        assert text.startswith("structured_outputs.")
        assert "\n" not in text
        assert re.search(reason, text), text


@pytest.mark.parametrize(
    "given",
    [
        {"json": {"minProperties": 1}},
        {"json": {"required": ["a", "b"], "minProperties": 2}},
        {"json": {"pattern": r"^[\x00-\x7f]+\t\x0a$"}},
        {"json": {"const": "\t\\u0001"}},
        {"json": "true"},
        {"regex": r"^\d+$"},
        {"grammar": 'root ::= "a" [0-9]+'},
        {"grammar": '?start: sum\n?sum: "::=" | sum "+" "1"'},
        {"choice": ["", "a"]},
    ],
    ids=str,
)
def test_what_can_be_enforced_is_taken(smollm: Tokenizer, given: dict[str, Any]) -> None:
    assert Grammars(Vocabulary(smollm, [2])).refusal(StructuredOutputsParams(**given)) is None


@pytest.mark.parametrize(
    ("pattern", "taken", "not_taken"),
    [
        (r"\d", "7", "\u0667"),
        (r"[\d-x]", "-", "\u0667"),
        (r"[^\d]", "\u0667", "7"),
        (r"\D", "\u0667", "7"),
        (r"\w\\d", "a\\d", "\u00e9\\d"),
        (r"[\w.-]", "-", "\u00e9"),
        (r"\W", "\u00e9", "a"),
    ],
)
def test_digits_and_words_are_those_of_ascii_in_every_pattern(
    smollm: Tokenizer, pattern: str, taken: str, not_taken: str
) -> None:
    grammars = Grammars(Vocabulary(smollm, [2]))
    for params, written in [
        (StructuredOutputsParams(regex=pattern), str),
        (StructuredOutputsParams(grammar=f"start: /{pattern}/"), str),
        (StructuredOutputsParams(json={"type": "string", "pattern": f"^(?:{pattern})$"}), _as_json),
    ]:
        if params.json is not None and pattern == r"[\d-x]":
            continue  # the library takes this one for a wrong range
        for text, is_taken in ((taken, True), (not_taken, False)):
            ids = smollm.encode(written(text))
            matcher = grammars.matcher(params)
            assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == is_taken, (
                params
            )


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def test_a_grammar_without_any_text_is_refused_where_the_tokens_are_known(smollm: Tokenizer) -> None:
    impossible = StructuredOutputsParams(regex=r"a[^\s\S]")
    assert "no token may stand" in str(Grammars(Vocabulary(smollm, [2])).refusal(impossible))


def test_control_tokens_in_a_grammar_are_those_of_the_model(smollm: Tokenizer) -> None:
    grammars = Grammars(Vocabulary(smollm, [2]))
    assert grammars.refusal(StructuredOutputsParams(grammar='start: <file_sep> "a"')) is None
    assert "<nothing>" in str(grammars.refusal(StructuredOutputsParams(grammar='start: <nothing> "a"')))


def test_of_twenty_thousand_choices_each_can_be_taken(smollm: Tokenizer) -> None:
    choices = tuple(f"choice number {index * 7919 % 100_003}" for index in range(20_000))
    grammars, grammar = Grammars(Vocabulary(smollm, [2])), StructuredOutputsParams(choice=choices)
    for text in choices[::4000]:
        matcher = grammars.matcher(grammar)
        for token in smollm.encode(text):
            matcher.compute_bitmask()
            assert matcher.consume_token(token)
        assert matcher.is_accepting()


def test_each_grammar_is_compiled_once_and_the_oldest_give_way(smollm: Tokenizer) -> None:
    grammars = Grammars(Vocabulary(smollm, [2]))
    for number in range(300):
        assert grammars.refusal(StructuredOutputsParams(regex=f"a{number}")) is None
        assert grammars.refusal(StructuredOutputsParams(regex="kept")) is None
    assert len(grammars._compiled) <= 256
    assert any("kept" in text for text in grammars._compiled)


def test_tokens_are_the_bytes_that_they_decode_to(smollm: Tokenizer) -> None:
    table = Vocabulary(smollm, [2]).table
    assert table is not None
    wrong = [
        index
        for index in range(smollm.vocab_size)
        if index not in smollm.special_tokens.values()
        and table.decode_bytes([index]).decode("utf-8", "replace") != smollm.decode([index])
    ]
    assert wrong == []


def test_a_tokenizer_whose_tokens_have_no_bytes_cannot_serve() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words = Tokenizer(
        backend,
        vocab_size=2,
        bos_token_id=None,
        eos_token_ids=(1,),
        special_names={},
        chat_template=None,
        identity={},
    )
    text = Grammars(Vocabulary(words, [1])).refusal(StructuredOutputsParams(regex="a"))
    assert text is not None
    assert "the model's tokenizer cannot serve" in text


def test_pieces_with_marked_spaces_and_single_bytes_are_the_bytes_they_stand_for() -> None:
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    special, pieces = ["<unk>", "<s>", "</s>"], ["\u2581", "a", "b", "\u2581a", "ab", "\u00e4"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [("\u2581", "a"), ("a", "b")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1)]
    )
    tokenizer = Tokenizer(
        backend, vocab_size=len(tokens), bos_token_id=1, eos_token_ids=(2,), special_names={},
        chat_template=None, identity={},
    )  # fmt: skip
    grammars, grammar = Grammars(Vocabulary(tokenizer, [2])), StructuredOutputsParams(regex=" ?ab\u00e4")
    flags = np.unpackbits(
        np.frombuffer(grammars.matcher(grammar).compute_bitmask(), np.uint8), bitorder="little"
    )
    found = {tokens[index] for index in np.flatnonzero(flags)}
    assert found == {"<0x20>", "<0x61>", "\u2581", "a", "\u2581a", "ab"}
    for spelled in (["\u2581a", "b", "\u00e4"], ["<0x20>", "ab", "<0xC3>", "<0xA4>"]):
        matcher = grammars.matcher(grammar)
        assert matcher.try_consume_tokens([vocab[token] for token in spelled]) == len(spelled)
        assert matcher.is_stopped()
