"""411 schemas of a public collection: what is refused is known, what is taken is enforced."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from batchgen.structured.grammars import Grammars
from batchgen.structured.masks import GrammarMasks
from batchgen.structured.vocabulary import Vocabulary
from batchgen.tokenizer import Tokenizer

END = 257
# Instances that conform to no schema, and yet to the grammar: calendars are not checked, and a mark that only
# ECMAScript takes for whitespace.
LET_THROUGH = {
    "optional/ecmascript-regex: ECMA 262 \\S matches everything but whitespace",
    "optional/format/date-time: validation of date-time strings",
    "optional/format/date: validation of date strings",
    "optional/format/time: validation of time strings",
}


@pytest.fixture(scope="module")
def grammars(smollm: Tokenizer) -> Grammars:
    return Grammars(Vocabulary(smollm, smollm.eos_token_ids))


def _taken(suite: list[Any], refused: dict[str, str]) -> list[Any]:
    return [each for each in suite if each.name not in refused]


def test_the_refused_schemas_are_those_on_the_list_with_their_reasons(
    suite: list[Any], refused: dict[str, str], grammars: Grammars
) -> None:
    now = {}
    for each in suite:
        reason = grammars.refusal(each.params)
        if reason is not None:
            now[each.name] = reason
    assert now == refused
    assert len(suite) - len(refused) >= 180


def test_no_instance_that_is_invalid_conforms_to_a_grammar(
    suite: list[Any], refused: dict[str, str], grammars: Grammars, smollm: Tokenizer
) -> None:
    wrong, num_valid, num_valid_taken = set(), 0, 0
    for each in _taken(suite, refused):
        for instance, is_valid in [(i, True) for i in each.valid] + [(i, False) for i in each.invalid]:
            ids = smollm.encode(json.dumps(instance, ensure_ascii=False))
            matcher = grammars.matcher(each.params)
            is_taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            if is_valid:
                num_valid, num_valid_taken = num_valid + 1, num_valid_taken + is_taken
            elif is_taken:
                wrong.add(each.name)
    assert wrong == LET_THROUGH
    # The others are spelled in a way that no model need write, such as properties in another order.
    assert num_valid_taken > 0.9 * num_valid


@pytest.fixture
def walk(byte_tokenizer: Tokenizer, rules_for: Callable, row_after: Callable) -> Callable:
    # Texts of random bytes never end; those that JSON is made of are likelier.
    likely = torch.zeros(260)
    likely[[*b'"]}:,0123456789tfnulrae', END]] = 4.0

    def walk(params: Any, seed: int, max_tokens: int = 150) -> tuple[str, bool, bool]:
        """A random text under a grammar: the text, whether it ended, and whether it may end there."""
        masks = GrammarMasks(byte_tokenizer, vocab_size=260, eos_token_ids=[END])
        rules, generator, tokens = rules_for(params), torch.Generator().manual_seed(seed), []
        for _ in range(max_tokens):
            row = row_after(rules, tokens)
            logits = torch.randn(1, 260, generator=generator) + likely
            assert masks.apply(logits, [row], {}) == {}
            token = int(torch.multinomial(logits[0].softmax(0), 1, generator=generator))
            state = masks.advance([row], [token])[0]
            if token != END:
                tokens.append(token)
            if token == END or state.is_complete:
                assert state.is_accepting
                return byte_tokenizer.decode(tokens), True, True
        return byte_tokenizer.decode(tokens), False, state.is_accepting

    return walk


def test_every_random_text_that_ends_is_valid(
    suite: list[Any], refused: dict[str, str], walk: Callable, check_schema: Callable
) -> None:
    num_ended = 0
    for number, each in enumerate(_taken(suite, refused)):
        text, has_ended, is_valid = walk(each.params, seed=number)
        num_ended += has_ended
        if is_valid:
            check_schema(text, each.schema)
    assert num_ended > 100
