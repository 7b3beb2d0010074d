"""The control socket of a running job: pause, resume, stop, set; and the client that talks to it."""

import hashlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from batchgen.errors import BatchgenError, ConfigError, UnknownNameError

_COMMANDS = ("pause", "resume", "stop", "set", "ping")
_SETTINGS = ("max_num_seqs",)
_MAX_MESSAGE = 64 << 10
_ANSWER_WITHIN_S = 5.0
# The system's limit on the path of a socket is 108 bytes with the final zero.
_MAX_PATH_BYTES = 100


@dataclass(frozen=True, slots=True)
class Command:
    """What a client asks: "pause", "resume", "stop", "set" (with settings) or "ping"."""

    name: str
    settings: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, data: Any) -> "Command":
        """Check a message.

        Raises:
            ConfigError: it is no command; says why.
        """
        if not isinstance(data, dict) or not isinstance(data.get("command"), str):
            raise ConfigError('a message is {"command": NAME}')
        name = data["command"]
        if name not in _COMMANDS:
            raise UnknownNameError("command", name, _COMMANDS)
        settings = {key: value for key, value in data.items() if key != "command"}
        for key, value in settings.items():
            if name != "set" or key not in _SETTINGS:
                raise UnknownNameError("setting", key, _SETTINGS if name == "set" else ())
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{key} must be a whole number, 1 or more; got {value!r}")
        if name == "set" and not settings:
            raise ConfigError(f"set needs a setting: {', '.join(_SETTINGS)}")
        return cls(name, tuple(settings.items()))


class ControlServer:
    """Listens for commands on a job's socket, which only this user may open.

    Commands are checked and answered here, and obeyed where `take` is called.

    Args:
        output: the output folder; its lock is held, so that a socket left there is a dead run's.

    Raises:
        OSError: there is no place for the socket.
    """

    def __init__(self, output: Path):
        self.path = socket_path(output)
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.path.parent.stat().st_uid != os.getuid():
            raise OSError(f"{self.path.parent} belongs to another user")
        self.path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(str(self.path))
            self.path.chmod(0o600)
            self._socket.listen(4)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="batchgen-control", daemon=True)
        self._thread.start()

    def take(self) -> Iterable[Command]:
        """The commands that have come since the last call."""
        while True:
            try:
                yield self._commands.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        """Stop listening and remove the socket."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            # Wakes the thread out of accept().
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=_ANSWER_WITHIN_S)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(_ANSWER_WITHIN_S)
                connection.sendall(json.dumps(self._answer(_receive_line(connection))).encode() + b"\n")

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            command = Command.parse(json.loads(line))
        except (ValueError, RecursionError) as error:
            return {"ok": False, "error": str(error)}
        self._commands.put(command)
        return {"ok": True, "pid": os.getpid()}


def send_command(output: Path, command: str, **settings: int) -> dict[str, Any]:
    """Tell the run of an output folder, in whatever process, to do something.

    Args:
        output: the output folder.
        command: "pause", "resume", "stop", "set" or "ping".
        **settings: of "set": `max_num_seqs`.

    Returns: the answer; `pid` is the run's.

    Raises:
        BatchgenError: no run listens there, or it refuses; says why.
    """
    path = socket_path(output)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_ANSWER_WITHIN_S)
            connection.connect(str(path))
            connection.sendall(json.dumps({"command": command} | settings).encode() + b"\n")
            answer = json.loads(_receive_line(connection) or b"{}")
    except (OSError, ValueError) as error:
        raise BatchgenError(f"no run of {output} answers on this machine ({error})") from error
    if not answer.get("ok"):
        raise BatchgenError(f"the run of {output} refuses: {answer.get('error', 'no reason given')}")
    return dict(answer)


def socket_path(output: Path) -> Path:
    """Where the socket of an output folder's run is: the same for every spelling of the folder's path."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(output))).hexdigest()[:16] + ".sock"
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(home) / "batchgen" / "control" / name
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        return path
    return Path(tempfile.gettempdir()) / f"batchgen-{os.getuid()}" / name


def _receive_line(connection: socket.socket) -> bytes:
    received = b""
    while b"\n" not in received and len(received) < _MAX_MESSAGE:
        data = connection.recv(4096)
        if not data:
            break
        received += data
    return received.partition(b"\n")[0]
