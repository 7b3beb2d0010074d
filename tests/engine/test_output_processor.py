from collections.abc import Callable
from typing import Any

import pytest

from batchgen.engine.messages import EngineRequest, SampleOutput, pack_ids
from batchgen.engine.output_processor import OutputProcessor
from batchgen.errors import EngineError
from batchgen.outputs import CompletionOutput, FailureCode, RequestOutput, RowFailure
from batchgen.sampling_params import RequestOutputKind
from batchgen.testing import ByteTokenizer

MakeRequest = Callable[..., EngineRequest]
CUMULATIVE, DELTA, FINAL_ONLY = (
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.DELTA,
    RequestOutputKind.FINAL_ONLY,
)


class Core:
    """Plays the core's part for one request: says texts, byte by byte as tokens."""

    def __init__(self, request: EngineRequest):
        self.processor = OutputProcessor(ByteTokenizer())
        self.sent = self.processor.add(request)
        self.aborted: list[tuple[str, int]] = []
        self.outputs: list[RequestOutput] = []

    def say(self, *ids: int, index: int = 0, **values: Any) -> list[RequestOutput]:
        told = SampleOutput(self.sent.request_id, index, pack_ids(ids), serial=self.sent.serial, **values)
        outputs, aborted = self.processor.process([told])
        self.aborted += aborted
        self.outputs += outputs
        return outputs

    def say_text(self, text: str, **values: Any) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for byte in text.encode():
            outputs += self.say(byte, **values)
        return outputs

    @property
    def final(self) -> CompletionOutput:
        assert self.outputs[-1].finished
        return self.outputs[-1].outputs[0]


def test_final_outputs_come_once_and_whole(make_request: MakeRequest) -> None:
    core = Core(make_request("a", list(b"prompt"), output_kind=FINAL_ONLY))
    assert core.sent.streams is False
    assert core.sent.prompt is None
    outputs = core.say(*b"h\xc3\xa9", 257, finish_reason="stop", num_cached_tokens=3)
    assert outputs == [
        RequestOutput(
            request_id="a",
            prompt=None,
            prompt_token_ids=list(b"prompt"),
            outputs=[
                CompletionOutput(
                    index=0, text="hé", token_ids=[*b"h\xc3\xa9", 257], finish_reason="stop", stop_reason=None
                )
            ],
            finished=True,
            num_cached_tokens=3,
        )
    ]
    assert core.processor.in_flight() == []


def test_cumulative_outputs_grow_and_never_show_half_a_character(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1]))
    core.say_text("xé!")
    core.say(257, finish_reason="stop")
    assert [output.outputs[0].text for output in core.outputs] == ["x", "x", "xé", "xé!", "xé!"]
    assert [len(output.outputs[0].token_ids) for output in core.outputs] == [1, 2, 3, 4, 5]
    assert [output.finished for output in core.outputs] == [False] * 4 + [True]


def test_deltas_add_up_to_the_whole(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], output_kind=DELTA, stop=["END"]))
    core.say_text("héE ENx EN")
    core.say(257, finish_reason="stop")
    assert "".join(output.outputs[0].text for output in core.outputs if output.outputs) == "héE ENx EN"
    ids = [token for output in core.outputs for each in output.outputs for token in each.token_ids]
    assert ids == [*"héE ENx EN".encode(), 257]
    assert core.final.finish_reason == "stop"
    assert core.final.text == "EN"


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_sample_and_late_tokens_change_nothing(
    make_request: MakeRequest, kind: RequestOutputKind, include: bool
) -> None:
    core = Core(
        make_request(
            "a", [1], stop=["END"], output_kind=kind, include_stop_str_in_output=include, streams=False
        )
    )
    assert core.sent.streams is True
    core.say_text("one EN")
    core.say_text("two END")
    late = core.say_text(" and more")
    late += core.say(257, finish_reason="stop")
    assert late == []
    assert core.aborted == [("a", 0)]
    texts = [output.outputs[0].text for output in core.outputs if output.outputs]
    text = "".join(texts) if kind is DELTA else texts[-1]
    assert text == ("one ENtwo END" if include else "one ENtwo ")
    assert core.final.finish_reason == "stop"
    assert core.final.stop_reason == "END"
    if kind is not DELTA:
        assert core.final.token_ids == list(b"one ENtwo END")
    if kind is CUMULATIVE and not include:
        assert not any(each.endswith("E") for each in texts)


def test_several_tokens_in_one_message_are_looked_at_one_by_one(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], stop=["b"]))
    core.say(*b"aabaa", 257, finish_reason="stop")
    assert core.final.text == "aa"
    assert core.final.token_ids == list(b"aab")
    assert core.final.stop_reason == "b"
    assert core.aborted == [], "the core had ended it already"


def test_a_stop_string_in_the_first_min_tokens_ends_nothing(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], stop=["b"], min_tokens=3))
    core.say_text("abbab")
    assert core.final.text == "abba"
    assert core.final.token_ids == list(b"abbab")


def test_the_text_of_what_ended_a_sample_is_left_out(make_request: MakeRequest) -> None:
    shown = {"skip_special_tokens": False}
    core = Core(make_request("a", [1], **shown, include_stop_str_in_output=True))
    core.say(*b"x", 257, finish_reason="stop")
    assert core.final.text == "x", "end of sequence is never part of the text"
    for include, text in ((False, "x"), (True, "xy")):
        core = Core(make_request("a", [1], **shown, stop_token_ids=[121], include_stop_str_in_output=include))
        core.say(*b"xy", finish_reason="stop", stop_reason=121)
        assert core.final.text == text
        assert core.final.token_ids == list(b"xy")
        assert core.final.stop_reason == 121
    core = Core(make_request("a", [1], **shown, ignore_eos=True))
    core.say(*b"x", 257, finish_reason="length")
    assert core.final.text == "x</s>"


def test_a_control_token_given_as_stop_string_stops_although_the_text_leaves_it_out(
    make_request: MakeRequest,
) -> None:
    core = Core(make_request("a", [1], stop=["</s>", "never"], stop_token_ids=[5]))
    assert set(core.sent.params.stop_token_ids) == {5, 257}
    core.say(*b"x", 257, finish_reason="stop", stop_reason=257)
    assert core.final.text == "x"
    assert core.final.stop_reason == "</s>"
    shown = Core(make_request("b", [1], stop=["</s>"], skip_special_tokens=False))
    assert shown.sent.params.stop_token_ids == ()
    shown.say(*b"x", 257)
    assert (shown.final.text, shown.final.stop_reason) == ("x", "</s>")


def test_half_a_character_at_the_end_is_shown_as_such(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], max_tokens=2))
    core.say(*b"x\xc3", finish_reason="length")
    assert core.final.text == "x\ufffd"


def test_no_text_when_none_is_wanted(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], detokenize=False))
    core.say(*b"abc", finish_reason="length")
    assert (core.final.text, core.final.token_ids) == ("", list(b"abc"))


def test_samples_end_one_by_one_and_the_request_with_the_last(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], n=3, output_kind=FINAL_ONLY, stop=["z"]))
    core.say(*b"two", index=2, finish_reason="length")
    core.say(*b"xz", index=0)
    core.say(*b"late", index=0)
    assert core.outputs == []
    core.say(*b"one", 257, index=1, finish_reason="stop")
    (output,) = core.outputs
    assert [each.text for each in output.outputs] == ["x", "one", "two"]
    assert [each.finish_reason for each in output.outputs] == ["stop", "stop", "length"]
    assert core.aborted == [("a", 0)]


def test_deltas_of_several_samples_carry_only_what_is_new(make_request: MakeRequest) -> None:
    core = Core(make_request("a", [1], n=2, output_kind=DELTA))
    (first,) = core.say(*b"x", index=1)
    assert [(each.index, each.text) for each in first.outputs] == [(1, "x")]
    (second,) = core.say(257, index=1, finish_reason="stop")
    assert [(each.index, each.text, each.finish_reason) for each in second.outputs] == [(1, "", "stop")]
    (third,) = core.say(*b"y", index=0, finish_reason="length")
    assert [(each.index, each.text) for each in third.outputs] == [(0, "y")]
    assert third.finished


def test_a_failure_keeps_the_text_that_came(make_request: MakeRequest) -> None:
    failure = RowFailure(FailureCode.KV_CAPACITY, "too long")
    core = Core(make_request("a", [1]))
    core.say_text("abc")
    core.say(finish_reason="error", error=failure)
    assert core.outputs[-1].error == failure
    assert (core.final.text, core.final.finish_reason) == ("abc", "error")


def test_words_about_an_aborted_request_do_not_reach_a_new_one_of_the_same_id(
    make_request: MakeRequest,
) -> None:
    processor = OutputProcessor(ByteTokenizer())
    old = processor.add(make_request("a", [1]))
    assert processor.drop(["a", "b"]) == ["a"]
    new = processor.add(make_request("a", [1]))
    late = SampleOutput("a", 0, pack_ids(list(b"old")), "length", serial=old.serial)
    right = SampleOutput("a", 0, pack_ids(list(b"new")), "length", serial=new.serial)
    assert processor.process([late]) == ([], [])
    ((output,), _) = processor.process([right])
    assert output.outputs[0].text == "new"


def test_ids_in_flight_are_unique_and_kept_in_order(make_request: MakeRequest) -> None:
    processor = OutputProcessor(ByteTokenizer())
    for name in "cab":
        processor.add(make_request(name, [1]))
    with pytest.raises(EngineError, match="'a' is already in flight"):
        processor.add(make_request("a", [1]))
    processor.drop(["a"])
    assert processor.in_flight() == ["c", "b"]
