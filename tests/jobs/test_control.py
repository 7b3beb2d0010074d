"""The control socket: only this user, checked messages, one answer each."""

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from batchgen.errors import BatchgenError
from batchgen.jobs.control import Command, ControlServer, send_command, socket_path


def test_commands_arrive_in_order(tmp_path: Path) -> None:
    server = ControlServer(tmp_path / "out")
    try:
        assert send_command(tmp_path / "out", "pause")["pid"] == os.getpid()
        send_command(tmp_path / "out", "set", max_num_seqs=8)
        send_command(tmp_path / "." / "out", "resume")
        assert list(server.take()) == [
            Command("pause"),
            Command("set", (("max_num_seqs", 8),)),
            Command("resume"),
        ]
        assert list(server.take()) == []
    finally:
        server.close()


def test_only_this_user_may_open_it_and_it_goes_with_the_run(tmp_path: Path) -> None:
    server = ControlServer(tmp_path / "out")
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.path.parent.stat().st_mode) == 0o700
    server.close()
    assert not server.path.exists()
    with pytest.raises(BatchgenError, match=r"no run of .*out answers"):
        send_command(tmp_path / "out", "ping")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"command": "pose"}, "did you mean 'pause'"),
        ({"command": "set", "max_num_seq": 4}, "did you mean 'max_num_seqs'"),
        ({"command": "set", "max_num_seqs": 0}, "1 or more"),
        ({"command": "set", "max_num_seqs": True}, "1 or more"),
        ({"command": "set"}, "needs a setting"),
        ({"command": "pause", "max_num_seqs": 4}, "unknown setting"),
        (["pause"], "a message is"),
    ],
)
def test_a_wrong_message_is_refused_with_the_reason(tmp_path: Path, message: object, reason: str) -> None:
    server = ControlServer(tmp_path / "out")
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(server.path))
            connection.sendall(json.dumps(message).encode() + b"\n")
            answer = json.loads(connection.recv(4096))
        assert not answer["ok"] and reason in answer["error"]
        assert list(server.take()) == []
        assert send_command(tmp_path / "out", "ping")["ok"]
    finally:
        server.close()


def test_a_dead_runs_socket_is_replaced(tmp_path: Path) -> None:
    first = ControlServer(tmp_path / "out")
    with socket.socket(socket.AF_UNIX) as left:
        first.path.unlink()
        left.bind(str(first.path))
    first.close()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(first.path))
    second = ControlServer(tmp_path / "out")
    assert send_command(tmp_path / "out", "ping")["ok"]
    second.close()


def test_the_path_is_short_enough_whatever_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("x" * 120)))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert len(str(socket_path(tmp_path / "out"))) <= 100
