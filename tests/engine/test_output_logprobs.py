"""Log probabilities, best_of, beams and grammar on the caller's side, with the core's part played by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from batchgen.engine.messages import EngineInfo, EngineRequest, SampleOutput, pack_ids, unpack_ids
from batchgen.engine.output_processor import OutputProcessor
from batchgen.engine.scheduler_output import TokenLogprobs
from batchgen.errors import ConfigError
from batchgen.logprobs import FlatLogprobs, Logprob
from batchgen.outputs import FailureCode, RequestOutput, RowFailure
from batchgen.sampling_params import RequestOutputKind
from batchgen.testing import ByteTokenizer

MakeRequest = Callable[..., EngineRequest]
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def told(token: int, value: float = -1.0, *others: tuple[int, float, int], rank: int = 1) -> TokenLogprobs:
    """What the core says of a position: its token, then others as (id, value, rank)."""
    entries = [(token, value, rank), *others]
    return TokenLogprobs(*(tuple(column) for column in zip(*entries, strict=True)))


class Core:
    """Plays the core's part for one request."""

    def __init__(self, request: EngineRequest, max_model_len: int = 100):
        info = EngineInfo(
            model="", architecture="", max_model_len=max_model_len, vocab_size=300, eos_token_ids=(290,),
            num_blocks=1, block_size=16, reproducible=True, resolved={},
        )  # fmt: skip
        self.processor = OutputProcessor(ByteTokenizer(), info)
        self.sent = self.processor.add(request)

    def message(self, ids: bytes, index: int = 0, value: float | None = None, **values: Any) -> SampleOutput:
        if value is not None:
            values["logprobs"] = tuple(told(token, value) for token in ids)
        return SampleOutput(
            self.sent.request_id, index, pack_ids(list(ids)), serial=self.sent.serial, **values
        )

    def say(self, *messages: SampleOutput) -> list[RequestOutput]:
        return self.processor.process(messages)[0]


def test_each_token_has_its_own_and_the_likeliest_with_their_texts(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], logprobs=2, streams=False))
    logprobs = (
        told(ord("h"), -0.5, (ord("h"), -0.5, 1), (ord("j"), -1.5, 2)),
        told(257, -4.0, (ord("!"), -0.25, 1), (ord("?"), -2.5, 2), rank=9),
    )
    (output,) = core.say(SampleOutput("a", 0, pack_ids([ord("h"), 257]), "stop", serial=1, logprobs=logprobs))
    (sample,) = output.outputs
    assert sample.logprobs == [
        {ord("h"): Logprob(-0.5, 1, "h"), ord("j"): Logprob(-1.5, 2, "j")},
        {257: Logprob(-4.0, 9, "</s>"), ord("!"): Logprob(-0.25, 1, "!"), ord("?"): Logprob(-2.5, 2, "?")},
    ]
    assert next(iter(sample.logprobs[1])) == 257, "the token that stands there comes first"
    assert sample.cumulative_logprob == -4.5


def test_flat_logprobs_read_like_a_list_of_mappings(make_request: MakeRequest) -> None:
    outputs = []
    for is_flat in (False, True):
        core = Core(make_request("a", [1, 2, 3], logprobs=1, prompt_logprobs=1, flat_logprobs=is_flat))
        outputs += core.say(
            core.message(
                b"xy", value=-1.0, finish_reason="length", prompt_logprobs=(told(2, -3.0), told(3, -2.0))
            )
        )
    plain, flat = outputs
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == plain.outputs[0].logprobs
    assert list(flat.prompt_logprobs) == plain.prompt_logprobs
    assert flat.prompt_logprobs[0] is None
    assert list(flat.prompt_logprobs[1:]) == plain.prompt_logprobs[1:]
    assert flat.outputs[0].logprobs[-1] == plain.outputs[0].logprobs[-1]
    with pytest.raises(IndexError):
        flat.prompt_logprobs[3]


def test_prompt_logprobs_have_an_entry_for_each_token_of_the_prompt(make_request: MakeRequest) -> None:
    # BG-17: length = prompt length, entry 0 null
    for start, count in ((None, 3), (0, 3), (1, 3), (2, 2)):
        core = Core(make_request("a", [9, 10, 11, 12], prompt_logprobs=0, prompt_logprob_start=start))
        scores = tuple(told(token, -token / 10) for token in (9, 10, 11, 12)[4 - count :])
        (output,) = core.say(core.message(b"x", finish_reason="length", prompt_logprobs=scores))
        assert [position and dict(position) for position in output.prompt_logprobs] == [
            None if position < max(start or 0, 1) else {token: Logprob(-token / 10, 1, chr(token))}
            for position, token in enumerate((9, 10, 11, 12))
        ]


def test_deltas_carry_the_logprobs_of_their_own_tokens(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1, 2], logprobs=0, prompt_logprobs=0, output_kind=DELTA))
    (first,) = core.say(core.message(b"x", value=-1.0, prompt_logprobs=(told(2),)))
    (second,) = core.say(core.message(b"yz", value=-2.0, finish_reason="length"))
    assert first.prompt_logprobs is not None and second.prompt_logprobs is None
    assert [list(position) for position in second.outputs[0].logprobs] == [[ord("y")], [ord("z")]]
    assert second.outputs[0].cumulative_logprob == -5.0


def test_a_stop_string_cuts_tokens_and_logprobs_alike(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], logprobs=0, stop=["b"], output_kind=FINAL_ONLY))
    (output,) = core.say(core.message(b"aabaa", value=-1.0, valid=True))
    (sample,) = output.outputs
    assert (sample.text, sample.token_ids) == ("aa", list(b"aab"))
    assert [list(position) for position in sample.logprobs] == [[97], [97], [98]]
    assert sample.cumulative_logprob == -3.0
    assert sample.valid is False, "the grammar's word is about more tokens than are shown"


def test_no_logprobs_are_shown_that_were_not_asked_for(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1]))
    (output,) = core.say(core.message(b"x", finish_reason="length"))
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
    assert output.prompt_logprobs is None


def test_of_best_of_samples_the_likeliest_are_given_back_at_the_end(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], n=2, best_of=4, temperature=1.0))
    assert core.sent.streams is False
    values = {0: -3.0, 1: -0.5, 2: -2.0, 3: -0.5}
    for index in (2, 0, 3):
        assert core.say(core.message(b"xy", index, values[index] / 2, finish_reason="length")) == []
    (output,) = core.say(core.message(b"xy", 1, values[1] / 2, finish_reason="length"))
    assert output.finished
    assert [(each.index, each.cumulative_logprob) for each in output.outputs] == [(0, -0.5), (1, -0.5)]
    assert output.outputs[0].logprobs is None


def test_a_failed_sample_is_none_of_the_best(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], n=1, best_of=2, temperature=1.0))
    failure = RowFailure(FailureCode.KV_CAPACITY, "too long")
    core.say(core.message(b"x", 0, -0.1, finish_reason="error", error=failure))
    (output,) = core.say(core.message(b"long", 1, -9.0, finish_reason="length"))
    assert output.outputs[0].text == "long"
    assert output.error == failure


def test_beams_come_once_in_the_order_of_the_core(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], n=2, best_of=3, use_beam_search=True, temperature=0))
    assert (core.sent.streams, len(core.sent.params.stop)) == (False, 0)
    (output,) = core.say(
        core.message(b"best", 0, finish_reason="stop", cumulative_logprob=-1.25),
        core.message(b"next", 1, finish_reason="length", cumulative_logprob=-1.0),
        core.message(b"last", 2, finish_reason="length", cumulative_logprob=-9.0),
    )
    assert [(each.index, each.text) for each in output.outputs] == [(0, "best"), (1, "next")]
    assert [each.cumulative_logprob for each in output.outputs] == [-1.25, -1.0]
    assert core.processor.in_flight() == []


def test_fewer_beams_than_the_search_is_wide_are_all(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], n=4, use_beam_search=True, temperature=0))
    (output,) = core.say(core.message(b"only", 0, finish_reason="length", cumulative_logprob=-1.0))
    assert (output.finished, len(output.outputs)) == (True, 1)


def test_a_stop_string_cuts_each_beam(make_request: MakeRequest) -> None:  # BG-19
    core = Core(make_request("a", [1], n=2, use_beam_search=True, temperature=0, stop=["b"]))
    assert core.sent.streams is False
    (output,) = core.say(
        core.message(b"aaba", 0, finish_reason="length", cumulative_logprob=-1.0),
        core.message(b"cccc", 1, finish_reason="length", cumulative_logprob=-2.0),
    )
    assert [(each.text, each.finish_reason) for each in output.outputs] == [
        ("aa", "stop"),
        ("cccc", "length"),
    ]


@pytest.mark.parametrize(("include", "text"), [(False, "aa"), (True, "aaEN")])
def test_a_beam_that_the_core_ended_at_a_stop_string_is_cut_there(
    make_request: MakeRequest, include: bool, text: str
) -> None:
    values = {"include_stop_str_in_output": include, "temperature": 0, "stop": ["EN"]}
    core = Core(make_request("a", [1], n=1, use_beam_search=True, **values))
    (output,) = core.say(
        core.message(b"aaEN", finish_reason="stop", stop_reason="EN", cumulative_logprob=-1.0)
    )
    (sample,) = output.outputs
    assert (sample.text, sample.finish_reason, sample.stop_reason) == (text, "stop", "EN")


def test_validity_is_the_cores_last_word(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1]))
    (first,) = core.say(core.message(b"{", valid=False))
    (last,) = core.say(core.message(b"}", valid=True, finish_reason="stop"))
    assert (first.outputs[0].valid, last.outputs[0].valid) == (False, True)


def test_bad_words_reach_the_core_as_tokens(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], bad_words=["no", " yes"]))
    assert core.sent.bad_words == (tuple(b"no"), tuple(b" no"), tuple(b"yes"), tuple(b" yes"))

    class Deaf(ByteTokenizer):
        def encode(self, text: str, **options: Any) -> list[int]:
            return []

    processor = OutputProcessor(Deaf())
    with pytest.raises(ConfigError, match="'bad_words': 'no' has no tokens"):
        processor.add(make_request("a", [1], bad_words=["no"]))
    assert processor.in_flight() == []


def test_outputs_come_every_so_many_tokens(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], stream_interval=3))
    counts = [len(outputs[0].outputs[0].token_ids) for byte in b"abcdefg" if (outputs := core.say(
        core.message(bytes([byte]))))]  # fmt: skip
    assert counts == [1, 4, 7], "the first at once, then every third"
    (last,) = core.say(core.message(b"h", finish_reason="length"))
    assert last.outputs[0].text == "abcdefgh"


@pytest.mark.parametrize(
    ("wanted", "kept"), [(3, [7, 8, 9]), (-1, [2, 3, 4, 5, 6, 7, 8, 9]), (50, None), (None, None)]
)
def test_a_prompt_is_cut_to_its_last_tokens(
    make_request: MakeRequest, wanted: int | None, kept: list[int] | None
) -> None:
    prompt = list(range(10))
    core = Core(make_request("a", prompt, truncate_prompt_tokens=wanted), max_model_len=9)
    (output,) = core.say(core.message(b"x", finish_reason="length"))
    assert unpack_ids(core.sent.prompt_token_ids) == output.prompt_token_ids == (kept or prompt)


def test_only_an_end_of_sequence_is_left_out_of_the_text(make_request: MakeRequest) -> None:
    for last, text in ((257, "yes"), (290, "yes"), (ord("!"), "yes!")):  # of tokenizer, model, and a grammar
        core = Core(make_request("a", [1], skip_special_tokens=False))
        ids = pack_ids([*b"yes", last])
        (output,) = core.say(SampleOutput("a", 0, ids, "stop", serial=1))
        assert output.outputs[0].text == text


def test_a_prompt_of_one_token_has_nothing_to_score(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [9], prompt_logprobs=0))
    (output,) = core.say(core.message(b"x", finish_reason="length"))
    assert output.prompt_logprobs == [None]
