import os
import threading
from typing import Any

import pytest

from batchgen.engine import wire
from batchgen.engine.messages import RequestTimes, SampleOutput, pack_ids
from batchgen.engine.scheduler_output import TokenLogprobs
from batchgen.errors import BatchgenError, CapacityError, EngineError, UnknownNameError
from batchgen.outputs import FailureCode, FinishReason, RowFailure


def test_packets_of_any_size_arrive_whole_and_in_order() -> None:
    reading, writing = os.pipe()
    messages: list[Any] = [None, "x", b"y" * 3_000_000, [("add", 1)], ""]

    def send() -> None:
        for message in messages:
            wire.write(writing, wire.encode(message))
        os.close(writing)

    thread = threading.Thread(target=send)
    thread.start()
    packets = []
    while (packet := wire.read(reading)) is not None:
        packets.append(packet)
    thread.join()
    os.close(reading)
    assert [wire.encode(message)[8:] for message in messages] == packets


def test_a_packet_cut_short_is_an_end() -> None:
    reading, writing = os.pipe()
    os.write(writing, wire.encode("whole")[:-2])
    os.close(writing)
    assert wire.read(reading) is None
    os.close(reading)


def test_outputs_come_back_equal() -> None:
    outputs = [
        SampleOutput("a", 0, pack_ids([1, 2])),
        SampleOutput("a", 0, pack_ids([1, 2]), times=RequestTimes(1.5, 2.5, None, None)),
        SampleOutput("b", 3, b"", FinishReason.STOP, 5, 7, None, 9),
        SampleOutput(
            "d",
            0,
            pack_ids([1, 2]),
            logprobs=(TokenLogprobs((1, 5), (-0.5, -1.5), (1, 2)), TokenLogprobs((2,), (-9.0,), (30,))),
            prompt_logprobs=(TokenLogprobs((7,), (float("-inf"),), (258,)),),
            valid=False,
            cumulative_logprob=-9.5,
        ),
        SampleOutput("c", 0, b"", "error", None, 0, RowFailure(FailureCode.KV_CAPACITY, "x"), 1),
    ]
    assert wire.decode_outputs(wire.encode_outputs(outputs)) == outputs


@pytest.mark.parametrize(
    "error", [CapacityError("no room"), UnknownNameError("setting", "blok_size", ["block_size"], "engine")]
)
def test_our_errors_keep_class_and_message(error: BatchgenError) -> None:
    again = wire.decode_error(wire.encode_error(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


@pytest.mark.parametrize("error", [MemoryError(), KeyError("x"), ValueError("annotations")])
def test_foreign_errors_become_engine_errors_that_name_them(error: Exception) -> None:
    again = wire.decode_error(wire.encode_error(error))
    assert type(again) is EngineError
    assert type(error).__name__ in str(again)
