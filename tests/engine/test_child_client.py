"""The engine in real child processes."""

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.config import EngineConfig
from batchgen.engine import wire
from batchgen.engine.child_client import ChildClient
from batchgen.engine.messages import EngineRequest, Limits
from batchgen.engine.start import start_engine
from batchgen.errors import ConfigError, EngineError, WeightsError
from batchgen.outputs import RequestOutput
from batchgen.testing import ByteTokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MakeRequest = Callable[..., EngineRequest]


@pytest.fixture
def start(make_config: Any) -> Iterator[Callable[..., ChildClient]]:
    clients: list[ChildClient] = []

    def make(loader: str = "load_counting", **engine_args: Any) -> ChildClient:
        client = ChildClient(
            make_config(**engine_args), ByteTokenizer(), executor=f"batchgen.counting:{loader}"
        )
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.shutdown()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # gone, before the read or in it
        return False


def wait_until(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def finish(client: ChildClient) -> dict[str, RequestOutput]:
    ends: dict[str, RequestOutput] = {}
    while client.in_flight():
        ends.update({output.request_id: output for output in client.poll() if output.finished})
    return ends


def test_it_serves_as_the_engine_in_this_process_does(
    start: Callable[..., ChildClient], make_request: MakeRequest, expected_tokens: Any
) -> None:
    client = start("load_slow", num_gpu_blocks_override=6, max_num_seqs=4)
    assert client.info.architecture == "counting"
    assert client.info.pid != os.getpid()
    assert client.stats().max_num_seqs == 4
    requests = [
        make_request(str(number), [number] * 20, n=1 + number % 2, temperature=1.0, seed=number, max_tokens=9)
        for number in range(6)
    ]
    for request in requests:
        client.add(request)
    client.add(make_request("bad", []))
    client.add(make_request("dropped", [1], max_tokens=200))
    assert client.poll(timeout_s=30)
    client.abort(["dropped", "unknown"])
    ends = finish(client)
    assert "dropped" not in ends
    for request in requests:
        if request.request_id in ends:
            for sample in ends[request.request_id].outputs:
                assert sample.token_ids == expected_tokens(request, sample.index)
    stats = client.stats(with_block_map=True)
    assert stats.num_requests_finished == 7
    assert stats.block_map is not None
    assert len(stats.block_map) == 6
    assert client.poll() == []


def test_limits_pause_and_resume_reach_the_child(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start()
    client.set_limits(Limits(max_num_seqs=3))
    assert wait_until(lambda: client.stats().max_num_seqs == 3)
    client.pause()
    client.add(make_request("a", [1], max_tokens=3, streams=False))
    assert wait_until(lambda: client.stats().is_paused and client.stats().num_waiting == 1)
    assert client.poll(timeout_s=0.1) == []
    assert client.stats(with_block_map=True).num_running == 0
    client.resume()
    assert list(finish(client)) == ["a"]
    assert wait_until(lambda: client.stats().num_requests_finished == 1)


def test_what_cannot_be_sent_ends_the_engine_and_nobody_waits_for_ever(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start()
    client.add(make_request("a", [1], cache_salt=lambda: None))
    with pytest.raises(EngineError, match=r"could not be sent what it was asked: .*lambda"):
        while True:
            client.poll(timeout_s=30)
    assert client.in_flight() == ["a"]


def test_calls_are_answered_and_disturb_nobody(
    start: Callable[..., ChildClient], make_request: MakeRequest, expected_tokens: Any
) -> None:
    client = start("load_slow")
    request = make_request("a", [1], max_tokens=20)
    client.add(request)
    while not client.poll(timeout_s=30):
        pass
    assert client.reset_prefix_cache() is True
    assert client.unpin_prefix("unknown") is False
    with pytest.raises(ConfigError, match=r"adapter 'x' \(there\)"):
        client.load_adapter("x", "there")
    client.sleep(1)
    client.poll(timeout_s=0.2)  # what was drawn before
    assert client.poll(timeout_s=0.2) == []
    client.wake_up()
    ends = finish(client)
    assert ends["a"].outputs[0].token_ids == expected_tokens(request)
    client.sleep(1)
    client.wake_up()
    client.add(make_request("b", [1], max_tokens=1))
    assert list(finish(client)) == ["b"]


def test_a_pinned_request_is_answered_without_tokens(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start()
    client.add(replace(make_request("pin", range(40), max_tokens=1), is_pinned=True))
    (output,) = finish(client).values()
    assert [sample.token_ids for sample in output.outputs] == [[]]
    assert client.stats(with_block_map=True).num_pinned_blocks == 2
    assert client.unpin_prefix("pin") is True
    assert client.stats(with_block_map=True).num_pinned_blocks == 0


def test_a_poll_can_be_woken_from_another_thread(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start("load_stuck")
    client.add(make_request("a", [1]))
    threading.Timer(0.1, client.wake).start()
    began = time.monotonic()
    assert client.poll(timeout_s=20) == []
    assert time.monotonic() - began < 10


def test_stop_strings_end_a_sample_in_the_child(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start("load_slow")
    client.add(make_request("a", [1], logit_bias={97: 100}, stop=["aaa"], max_tokens=200))
    ends = finish(client)
    assert ends["a"].outputs[0].token_ids == [97] * 3
    assert ends["a"].outputs[0].text == ""
    assert wait_until(lambda: client.stats(with_block_map=True).num_running == 0)
    assert client.stats().generation_tokens < 100


def test_a_caller_that_does_not_read_stops_the_engine_and_loses_nothing(
    start: Callable[..., ChildClient], make_request: MakeRequest, expected_tokens: Any
) -> None:
    client = start(max_model_len=2000, num_gpu_blocks_override=150)
    request = make_request("a", [1], max_tokens=1300)
    client.add(request)
    assert wait_until(lambda: client._process.packets.full())
    client.add(make_request("b", [1], max_tokens=1))
    ends = finish(client)
    assert len(ends["a"].outputs[0].token_ids) == 1300
    assert ends["a"].outputs[0].token_ids[:50] == expected_tokens(request, max_model_len=51)


def test_a_killed_child_is_an_error_with_its_last_words_and_what_was_in_flight(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start("load_mortal")
    client.add(make_request("good", [1], max_tokens=1))
    assert list(finish(client)) == ["good"]
    client.add(make_request("next", [2], logit_bias={3: 100}, max_tokens=250))
    client.add(make_request("killer", [1, 100, 2]))
    with pytest.raises(EngineError, match="was killed by SIGKILL") as error:
        while True:
            client.poll()
    assert "token 100 came" in str(error.value)
    assert client.in_flight() == ["next", "killer"]
    for call in (
        client.poll,
        client.stats,
        client.pause,
        client.resume,
        lambda: client.add(make_request("c", [1])),
        lambda: client.abort(["next"]),
        lambda: client.set_limits(Limits(max_num_seqs=1)),
        lambda: client.sleep(1),
        client.reset_prefix_cache,
        lambda: client.stats(with_block_map=True),
    ):
        with pytest.raises(EngineError, match="SIGKILL"):
            call()
    assert client.in_flight() == ["next", "killer"]
    client.shutdown()
    client.shutdown()


def test_what_came_before_the_death_is_handed_out_first(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start()
    client.add(make_request("a", [1], max_tokens=1))
    assert wait_until(lambda: client.stats().num_requests_finished == 1)
    os.kill(client.info.pid, signal.SIGKILL)
    assert wait_until(lambda: client._process.has_ended)
    assert [output.request_id for output in client.poll()] == ["a"]
    with pytest.raises(EngineError):
        client.poll()


def test_asking_for_a_block_map_ends_though_the_child_died_with_outputs_unread(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start()
    client.add(make_request("a", [1], max_tokens=1))
    assert wait_until(lambda: bool(client.stats() and client._outputs))
    os.kill(client.info.pid, signal.SIGKILL)
    assert wait_until(lambda: client._process.has_ended)
    client.stats(with_block_map=True)
    assert [output.request_id for output in client.poll()] == ["a"]


def test_an_exception_in_a_step_is_shown_by_its_traceback(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start("load_failing")
    client.add(make_request("a", [1], max_tokens=9))
    with pytest.raises(EngineError, match="RuntimeError: the third step is one too many") as error:
        finish(client)
    assert "exit code 1" in str(error.value)


def test_an_error_while_loading_keeps_its_class(make_config: Any) -> None:
    with pytest.raises(WeightsError) as error:
        ChildClient(make_config(), ByteTokenizer(), executor="batchgen.counting:load_broken")
    assert str(error.value) == "model.layers.0 is missing\nlook at the file"
    with pytest.raises(EngineError, match="could not start: ModuleNotFoundError: No module named 'nowhere'"):
        ChildClient(make_config(), ByteTokenizer(), executor="nowhere:at_all")


def test_what_the_child_does_while_loading_is_told(make_config: Any) -> None:
    told: list[str] = []
    ChildClient(
        make_config(), ByteTokenizer(), executor="batchgen.counting:load_counting", on_loading=told.append
    ).shutdown()
    assert told == ["loading counting:"]


def test_what_nobody_listens_to_goes_to_the_log(make_config: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "batchgen"):
        ChildClient(make_config(), ByteTokenizer(), executor="batchgen.counting:load_counting").shutdown()
    assert ("batchgen.loading", logging.INFO, "loading counting:") in caplog.record_tuples


def test_warnings_of_the_child_go_through_our_own_log(
    start: Callable[..., ChildClient], caplog: pytest.LogCaptureFixture
) -> None:
    start(num_gpu_blocks_override=2)
    assert wait_until(lambda: "fewer than max_model_len" in caplog.text)
    (record,) = [each for each in caplog.records if "fewer than max_model_len" in each.getMessage()]
    assert (record.name, record.levelno) == ("batchgen.engine.pool_warning", logging.WARNING)


def test_shutdown_ends_even_a_child_that_is_busy_for_ever(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start("load_stuck")
    client.add(make_request("a", [1]))
    assert client.poll(timeout_s=0.3) == []  # it is in its endless step now
    client.shutdown()
    assert not is_running(client.info.pid)
    with pytest.raises(EngineError, match="was shut down"):
        client.poll()


def test_a_client_that_nobody_holds_takes_its_child_along(make_config: Any) -> None:
    client = ChildClient(make_config(), ByteTokenizer(), executor="batchgen.counting:load_counting")
    pid = client.info.pid
    assert is_running(pid)
    del client
    gc.collect()
    assert wait_until(lambda: not is_running(pid))


def test_the_child_outlives_the_thread_that_started_it(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    clients: list[ChildClient] = []
    thread = threading.Thread(target=lambda: clients.append(start()))
    thread.start()
    thread.join()
    time.sleep(0.2)
    clients[0].add(make_request("a", [1], max_tokens=1))
    assert list(finish(clients[0])) == ["a"]


def test_it_inherits_no_descriptor(start: Callable[..., ChildClient], tmp_path: Path) -> None:
    with open(tmp_path / "lock", "w") as lock, socket.socket() as listener:
        os.set_inheritable(lock.fileno(), True)
        listener.set_inheritable(True)
        client = start()
        folder = Path(f"/proc/{client.info.pid}/fd")
        targets = [os.readlink(entry) for entry in folder.iterdir()]
    assert targets
    assert {target.split(":")[0] for target in targets} <= {"pipe", "/dev/null"}


PARENT = """
import signal, sys, time
from batchgen.config import EngineConfig
from batchgen.engine.child_client import ChildClient
from batchgen.engine.messages import EngineRequest, pack_ids
from batchgen.sampling_params import SamplingParams
from batchgen.testing import ByteTokenizer

signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: None)
print("started", flush=True)
config = EngineConfig.from_engine_args(model="counting:")
client = ChildClient(config, ByteTokenizer(), executor="batchgen.counting:" + sys.argv[1])
params = SamplingParams(max_tokens=40)
client.add(EngineRequest(request_id="a", prompt_token_ids=pack_ids([1]), params=params))
print(client.info.pid, flush=True)
while client.in_flight():
    client.poll(0.1)
print("finished", flush=True)
"""


def start_parent(loader: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, loader], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_block_map_is_not_waited_for_while_a_step_lasts(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start("load_stuck")
    client.add(make_request("a", [1], max_tokens=3))
    time.sleep(0.2)  # it is in its endless step now
    begin = time.monotonic()
    for _ in range(3):
        client.stats(with_block_map=True)
    assert time.monotonic() - begin < 2


def test_an_orphan_ends_whatever_it_is_doing() -> None:
    with start_parent("load_stuck") as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        pid = int(parent.stdout.readline())
        time.sleep(0.2)  # it is in its endless step now
        assert is_running(pid)
        parent.kill()
        killed_at = time.monotonic()
        assert wait_until(lambda: not is_running(pid))
        # Promised are two seconds; the kernel does it at once.
        assert time.monotonic() - killed_at < 10


def test_a_child_whose_input_ends_ends_too(
    start: Callable[..., ChildClient], make_request: MakeRequest
) -> None:
    client = start("load_stuck")
    client.add(make_request("a", [1]))
    assert client.poll(timeout_s=0.3) == []
    process = client._process._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    with pytest.raises(EngineError, match="exit code 0"):
        client.poll()


def test_a_child_whose_parent_is_another_process_ends(make_config: Any) -> None:
    hello = wire.Hello(
        config=make_config(),
        executor="batchgen.counting:load_counting",
        tokenizer_eos_ids=(),
        parent_pid=os.getppid(),
        log_level=logging.WARNING,
    )
    command = [sys.executable, "-m", "batchgen.engine.child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        assert child.stdin is not None
        child.stdin.write(wire.encode(hello))
        child.stdin.flush()
        assert child.wait(30) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_the_whole_group_are_the_parents_business(number: signal.Signals) -> None:
    with start_parent("load_slow") as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        ended = threading.Event()

        def harass() -> None:
            while not ended.wait(0.005):
                os.killpg(parent.pid, number)

        thread = threading.Thread(target=harass)
        thread.start()
        try:
            pid = int(parent.stdout.readline())
            assert is_running(pid)
            assert parent.stdout.readline() == "finished\n"
        finally:
            ended.set()
            thread.join()


def test_start_engine_chooses_by_name_and_place(make_config: Any) -> None:
    echo = start_engine(EngineConfig.from_engine_args(model="echo:"), ByteTokenizer())
    assert type(echo).__name__ == "EchoEngine"
    echo.shutdown()
