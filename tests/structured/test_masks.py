"""Masks are a function of the tokens drawn, whatever the slots went through; ends, drafts, dead ends."""

import json
import random
import re
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.scheduler_output import GrammarState, SamplingRow
from batchgen.sampling_parts import StructuredOutputsParams
from batchgen.structured.blocking import Blocker, spread
from batchgen.structured.masks import GrammarMasks
from batchgen.tokenizer import Tokenizer

V = 260
END, USER = 257, 258
OPEN, MAY_END, MUST_END = GrammarState(False, False), GrammarState(True, False), GrammarState(True, True)


@pytest.fixture
def make_masks(byte_tokenizer: Tokenizer) -> Callable[..., GrammarMasks]:
    def make(ends: tuple[int, ...] = (END,)) -> GrammarMasks:
        return GrammarMasks(byte_tokenizer, vocab_size=V, eos_token_ids=ends)

    return make


def allowed(masks: GrammarMasks, rows: list[SamplingRow], newest: Any = None) -> list[set[int]]:
    """The ids that may be drawn, per row; no row may fail."""
    logits = torch.zeros(len(rows), V)
    assert masks.apply(logits, rows, newest or {}) == {}
    return [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in logits]


def test_only_what_the_grammar_allows_can_be_drawn_and_other_rows_are_left_alone(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    rules = rules_for(StructuredOutputsParams(regex="ab?c"))
    plain = replace(rules, params=replace(rules.params, structured_outputs=None))
    rows = [row_after(plain, [], slot=5), row_after(rules, b"", slot=0), row_after(rules, b"a", slot=1)]
    assert allowed(make_masks(), rows) == [set(range(V)), {*b"a"}, {*b"bc"}]


def test_logits_that_are_views_of_wider_rows_are_masked_in_place(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    wide = torch.zeros(3, 300)
    row = row_after(rules_for(StructuredOutputsParams(regex="ab")), b"a")
    make_masks().apply(wide[:, :V], [row] * 3, {})
    assert torch.isfinite(wide[:, :V]).sum() == 3
    assert torch.isfinite(wide[:, V:]).all()


def test_bits_spread_on_a_device_are_those_that_numpy_unpacks() -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (3, 5), dtype=np.int32)
    expected = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").astype(bool)
    assert np.array_equal(spread(torch.from_numpy(words)).numpy(), expected)


@pytest.mark.gpu
def test_masks_on_a_gpu_are_those_on_a_cpu() -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (4, 9), dtype=np.int32)
    blocker, found = Blocker(), []
    for device in ("cpu", "cuda"):
        logits = torch.zeros(6, V, device=device)
        blocker.begin(logits)
        for at, row in enumerate((0, 2, 3, 5)):
            blocker.block(row, words[at])
        blocker.finish(logits)
        found.append(logits.cpu())
    assert torch.equal(*found)


def test_the_way_of_a_device_gives_what_the_way_of_a_cpu_gives() -> None:
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (3, 9), dtype=np.int32)
    blocker, found = Blocker(), []
    for is_device in (False, True):
        logits = torch.zeros(5, V)
        blocker.begin(logits)
        if is_device:
            blocker._values = None
        memory = np.empty(9, dtype=np.int32)
        for at, row in enumerate((4, 0, 2)):
            memory[:] = words[at]
            blocker.block(row, memory)
        blocker.finish(logits)
        found.append(logits)
    assert torch.equal(*found)
    assert 0 < torch.isneginf(found[0]).sum() < 3 * V


def test_a_nan_stays_where_it_may_be_drawn_and_widths_may_change() -> None:
    blocker = Blocker()
    for width in (40, 33, 64):
        logits = torch.zeros(2, width)
        logits[1, 3] = logits[1, 7] = float("nan")
        blocker.begin(logits)
        blocker.block(1, np.array([0b1000, 1], dtype=np.int32))
        blocker.finish(logits)
        assert torch.isfinite(logits[0]).all()
        assert logits[1].isnan().nonzero().flatten().tolist() == [3, 7]
        assert logits[1].isneginf().sum() == width - 3


def test_masks_do_not_depend_on_what_the_slots_went_through(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    # Forks, preemption, beams that go on from others, refused drafts: all are texts that differ further back.
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "xy"]}}}
    rules = [
        rules_for(StructuredOutputsParams(json=schema, disable_any_whitespace=True)),
        rules_for(StructuredOutputsParams(regex="(ab|cd)*[0-9]{2,}")),
    ]
    texts = [b'{"a":-12,"b":"xy"}', b'{"a":10,"z":[true,null]}', b'{"b":"x","q":{"r":"s"}}', b"{}"], [
        b"ababcd0123", b"cdab99", b"00", b"abcdabcdab1"]  # fmt: skip
    chosen, one = random.Random(0), make_masks()
    for _ in range(300):
        slot = chosen.randrange(4)
        kind = slot % 2
        text = chosen.choice(texts[kind])
        cut = chosen.randint(0, len(text))
        drafts = text[cut : cut + chosen.randint(0, 4)] if chosen.random() < 0.5 else b"!?"
        row = row_after(rules[kind], text[:cut], slot=slot, drafts=drafts if chosen.random() < 0.3 else b"")
        assert allowed(one, [row]) == allowed(make_masks(), [row])
        if chosen.random() < 0.1:
            one.drop([slot])


def test_the_token_of_the_step_before_is_taken_where_the_history_lacks_it(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    rules = rules_for(StructuredOutputsParams(regex="abc"))
    row = row_after(rules, b"ab")
    short = replace(row, history=array("i", row.history[:-1]))
    grown = replace(row, history=array("i", [*row.history, *b"zzz"]))
    assert allowed(make_masks(), [short], {0: ord("b")}) == [{ord("c")}]
    assert allowed(make_masks(), [grown]) == [{ord("c")}]


def test_states_say_where_a_text_may_and_must_end(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    masks, rules = make_masks(), rules_for(StructuredOutputsParams(choice=("no", "none")))
    seen = []
    for text in (b"n", b"no", b"non", b"none"):
        row = row_after(rules, text[:-1])
        allowed(masks, [row])
        seen.append(masks.advance([row], [text[-1]])[0])
    assert seen == [OPEN, MAY_END, OPEN, MUST_END]
    row = row_after(rules, b"no")
    assert allowed(masks, [row]) == [{ord("n"), END}]
    assert masks.advance([row], [END]) == {0: MUST_END}
    # Nothing but the end after the end, as when end-of-sequence is ignored.
    assert allowed(masks, [row_after(rules, [*b"no", END])]) == [{END}]
    assert allowed(masks, [row_after(rules, [*b"none", END, END])]) == [{END}]


def test_every_end_of_the_model_may_stand_where_the_grammar_may_end(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    rules = rules_for(StructuredOutputsParams(regex="ab?"))
    assert allowed(make_masks((256, END)), [row_after(rules, b"a")]) == [{ord("b"), 256, END}]
    # A control token that the user wants to stop at, but not a letter.
    stops = replace(rules, stop_ids=frozenset({END, USER, ord("z")}))
    masks = make_masks()
    row = row_after(stops, b"a")
    assert allowed(masks, [row]) == [{ord("b"), END, USER}]
    assert masks.advance([row], [USER]) == {0: MUST_END}


def test_a_model_without_an_end_goes_on_until_the_grammar_is_complete(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    masks, rules = make_masks(()), rules_for(StructuredOutputsParams(regex="ab?"))
    rules = replace(rules, stop_ids=frozenset())
    row = row_after(rules, b"a")
    assert allowed(masks, [row]) == [{ord("b")}]
    assert masks.advance([row], [ord("b")]) == {0: MUST_END}


def test_drafted_rows_are_masked_after_their_drafts_and_a_refused_draft_harms_nothing(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    masks, rules = make_masks(), rules_for(StructuredOutputsParams(regex="abc?"))
    rows = [row_after(rules, b"a", drafts=b"bxz"[:count]) for count in range(4)]
    seen = allowed(masks, rows)
    assert seen[:2] == [{ord("b")}, {ord("c"), END}]
    assert seen[2:] == [set(range(V))] * 2
    # The draft b is drawn, x is not: what follows it does not count.
    assert masks.advance(rows, [*b"bc", 7, None]) == {0: MAY_END, 1: MUST_END}
    assert allowed(masks, [row_after(rules, b"ab")]) == [{ord("c"), END}]


def test_a_beam_is_told_where_it_stands_before_its_candidates(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    masks, rules = make_masks(), rules_for(StructuredOutputsParams(regex="ab?"))
    rows = [row_after(rules, text, slot=slot, num_candidates=4) for slot, text in enumerate((b"", b"a"))]
    assert allowed(masks, rows) == [{ord("a")}, {ord("b"), END}]
    assert masks.advance(rows, [ord("a"), END]) == {0: OPEN, 1: MAY_END}


def test_a_grammar_without_a_way_on_fails_its_row_only(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    good = rules_for(StructuredOutputsParams(regex="ab"))
    bad = rules_for(StructuredOutputsParams(regex=r"a[^\s\S]"))
    broken = rules_for(StructuredOutputsParams(regex="(a"))
    masks, logits = make_masks(), torch.zeros(3, V)
    rows = [row_after(rules, b"a", slot=slot) for slot, rules in enumerate((good, bad, broken))]
    failures = masks.apply(logits, rows, {})
    assert sorted(failures) == [1, 2]
    assert all("structured_outputs.regex" in text for text in failures.values())
    assert masks.advance(rows, [ord("b"), None, None]) == {0: MUST_END}


def test_what_is_done_with_a_sample_is_forgotten(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    masks, rules = make_masks(), rules_for(StructuredOutputsParams(regex="a*"))
    allowed(masks, [row_after(rules, b"aa", slot=slot) for slot in range(3)])
    masks.drop([0, 2, 9])
    assert set(masks._slots) == {1}


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 1), ({"disable_any_whitespace": True}, 0), ({"whitespace_pattern": "\n{1,3}"}, 3)],
)
def test_whitespace_is_bounded(
    make_masks: Callable, rules_for: Callable, row_after: Callable, options: dict[str, Any], most: int
) -> None:
    # BS-15: a model that wants line ends only gets that many between two tokens of JSON.
    masks = make_masks()
    rules = rules_for(StructuredOutputsParams(json={"type": "object"}, **options))
    text = b"{"
    while ord("\n") in allowed(masks, [row_after(rules, text)])[0] and len(text) < 9:
        text += b"\n"
    assert len(text) - 1 == most


def test_no_property_but_the_named_ones_where_so_asked(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    inner = {"type": "object", "properties": {"b": {}}, "required": ["b"]}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    for closed in (False, True):
        rules = rules_for(StructuredOutputsParams(json=schema, disable_additional_properties=closed))
        for text in (b'{"a":{"b":[]', b'{"a":{"b":[]}'):
            assert (ord(",") in allowed(make_masks(), [row_after(rules, text)])[0]) == (not closed)


def test_a_name_in_another_spelling_does_not_get_around_its_schema(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    rules = rules_for(StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "null"}}}))
    # \u0061 is an a.
    assert ord("u") not in allowed(make_masks(), [row_after(rules, b'{"\\')])[0]


def test_random_texts_conform_to_regex_choice_and_grammar(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    pattern = r"[A-Z][a-z]{0,6}(-[0-9]+|ä€)?\.(txt|md)"
    choices = ("yes", "no", "nö", 'a "quoted"\n\\one', "no more")
    calculator = 'start: sum\nsum: term ("+" term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[1-9][0-9]{0,2}/'
    checks: list[tuple[StructuredOutputsParams, Callable[[str], Any]]] = [
        (StructuredOutputsParams(regex=pattern), re.compile(pattern).fullmatch),
        (StructuredOutputsParams(choice=choices), choices.__contains__),
        (StructuredOutputsParams(grammar=calculator), _is_sum),
        (StructuredOutputsParams(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    ]
    likely = torch.zeros(V)
    likely[[*b'")}.-', END]] = 3.0
    generator = torch.Generator().manual_seed(0)
    for grammar, conforms in checks:
        masks, rules, num_ended = make_masks(), rules_for(grammar), 0
        for slot in range(25):
            text: list[int] = []
            while len(text) < 60:
                row = row_after(rules, text, slot=slot)
                logits = torch.randn(1, V, generator=generator) * 2 + likely
                assert masks.apply(logits, [row], {}) == {}
                token = int(torch.multinomial(logits[0].softmax(0), 1, generator=generator))
                state = masks.advance([row], [token])[0]
                if token != END:
                    text.append(token)
                if token == END or state.is_complete:
                    num_ended += 1
                    assert conforms(bytes(text).decode()), bytes(text)
                    break
        assert num_ended >= 15


def _is_sum(text: str) -> bool:
    """A small parser, independent of the grammar: numbers of up to three digits, plus, brackets."""

    def total(at: int) -> int:
        at = term(at)
        while text[at : at + 1] == "+":
            at = term(at + 1)
        return at

    def term(at: int) -> int:
        if text[at : at + 1] == "(":
            at = total(at + 1)
            assert text[at] == ")"
            return at + 1
        number = re.compile("[1-9][0-9]{0,2}").match(text, at)
        assert number
        return number.end()

    return total(0) == len(text)


def test_nothing_of_the_library_is_imported_before_the_first_grammar() -> None:
    script = "import sys, batchgen.structured.masks; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    "grammar",
    [
        {"choice": ["a<|user|>b"]},
        {"regex": "a<\\|user\\|>b"},
        {"grammar": 'start: "a<|user|>b"'},
        {"grammar": 'root ::= "a" [<] "|user|>b"'},
    ],
)
def test_text_that_is_spelled_like_a_control_token_is_text(
    make_masks: Callable, rules_for: Callable, row_after: Callable, grammar: dict[str, Any]
) -> None:
    masks, rules, text = make_masks(), rules_for(StructuredOutputsParams(**grammar)), b"a<|user|>b"
    for place, letter in enumerate(text):
        assert allowed(masks, [row_after(rules, text[:place])]) == [{letter}]
    assert allowed(masks, [row_after(rules, text)]) == [{END}]


def test_a_grammar_may_name_a_control_token(
    make_masks: Callable, rules_for: Callable, row_after: Callable
) -> None:
    masks = make_masks()
    rules = rules_for(StructuredOutputsParams(grammar='start: "<|user|>" <|user|> /b/ // <|user|>'))
    assert allowed(masks, [row_after(rules, b"<|user|>")]) == [{USER}]
    assert allowed(masks, [row_after(rules, [*b"<|user|>", USER])]) == [{*b"b"}]
    refused = masks.refusal(rules_for(StructuredOutputsParams(grammar="start: <|nobody|>")).params)
    assert refused is not None
    assert '"<|nobody|>"' in refused
