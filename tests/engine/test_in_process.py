import threading
import time
from typing import Any

import pytest

from batchgen.engine.messages import Limits
from batchgen.engine.scheduler_output import SchedulerOutput
from batchgen.errors import ConfigError
from batchgen.outputs import RequestOutput
from batchgen.sampling_params import RequestOutputKind


def finish(client: Any) -> dict[str, RequestOutput]:
    ends: dict[str, RequestOutput] = {}
    while client.in_flight():
        ends.update({output.request_id: output for output in client.poll() if output.finished})
    return ends


def test_poll_computes_until_there_is_an_output(
    make_client: Any, make_request: Any, expected_tokens: Any
) -> None:
    made = make_client()
    request = make_request("a", [1], max_tokens=5, output_kind=RequestOutputKind.FINAL_ONLY)
    made.client.add(request)
    (output,) = made.client.poll()
    assert len(made.executor.steps) == 5
    assert output.outputs[0].token_ids == expected_tokens(request)
    assert made.client.poll() == []
    assert made.client.in_flight() == []


def test_a_refused_request_is_answered_though_nothing_else_is_there(
    make_client: Any, make_request: Any
) -> None:
    made = make_client()
    made.client.add(make_request("a", [], max_tokens=5))
    (output,) = made.client.poll()
    assert output.error is not None and output.error.code == "empty_prompt"
    assert not made.core.has_work


def test_poll_gives_up_after_its_time(make_client: Any, make_request: Any) -> None:
    made = make_client(before_step=lambda step: time.sleep(0.01))
    made.client.add(make_request("a", [1], max_tokens=5, streams=False))
    assert made.client.poll(timeout_s=0) == []
    assert len(made.executor.steps) == 1
    made.client.pause()
    assert made.client.poll(timeout_s=0.01) == []
    assert made.client.poll() == []
    assert made.client.stats().is_paused
    made.client.resume()
    assert list(finish(made.client)) == ["a"]


def test_a_stop_string_ends_the_sample_in_the_core(make_client: Any, make_request: Any) -> None:
    made = make_client()
    made.client.add(make_request("a", [1], n=2, logit_bias={97: 100}, stop=["aaa"], max_tokens=200))
    ends = finish(made.client)
    assert [sample.token_ids for sample in ends["a"].outputs] == [[97] * 3] * 2
    assert len(made.executor.steps) == 3
    assert made.client.stats().num_used_blocks == 0


def test_an_interrupt_leaves_the_engine_usable(
    make_client: Any, make_request: Any, expected_tokens: Any
) -> None:
    fuse = [KeyboardInterrupt]

    def interrupt(step: SchedulerOutput) -> None:
        if step.step == 2 and fuse:
            raise fuse.pop()

    made = make_client(before_step=interrupt)
    requests = [make_request(name, [1, 2, 3], max_tokens=6) for name in "ab"]
    for request in requests:
        made.client.add(request)
    with pytest.raises(KeyboardInterrupt):
        finish(made.client)
    made.client.abort(["b"])
    made.client.set_limits(Limits(max_num_seqs=1))
    assert made.client.in_flight() == ["a"]
    assert finish(made.client)["a"].outputs[0].token_ids == expected_tokens(requests[0])
    made.client.shutdown()


def test_calls_are_answered_and_disturb_nobody(
    make_client: Any, make_request: Any, expected_tokens: Any
) -> None:
    made = make_client()
    request = make_request("a", [1], max_tokens=9)
    made.client.add(request)
    made.client.poll()
    assert made.client.reset_prefix_cache() is True
    assert made.client.unpin_prefix("unknown") is False
    with pytest.raises(ConfigError, match="adapter 'x'"):
        made.client.load_adapter("x", "there")
    made.client.sleep(1)
    assert made.client.poll(timeout_s=0.2) == []
    made.client.wake_up()
    assert finish(made.client)["a"].outputs[0].token_ids == expected_tokens(request)
    made.client.sleep(2)
    made.client.wake_up()


def test_a_poll_can_be_woken_from_another_thread(make_client: Any, make_request: Any) -> None:
    made = make_client()
    made.client.add(make_request("a", [1], max_tokens=5, output_kind=RequestOutputKind.FINAL_ONLY))
    made.client.wake()
    assert made.client.poll() == []
    assert len(made.executor.steps) == 1
    made.client.pause()
    threading.Timer(0.05, made.client.wake).start()
    began = time.monotonic()
    assert made.client.poll(timeout_s=20) == []
    assert time.monotonic() - began < 10
