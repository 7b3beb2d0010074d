"""The compiled library as Python functions: built, loaded and typed once per process."""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

from batchgen.kernels.cpu.build import BuildError, library_path

log = logging.getLogger("batchgen.kernels")

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, str] = {  # p pointer, n size or stride, i int, f float; the result after the colon
    "bg_panel": ":n",
    "bg_linear_pack": "ppnni:",
    "bg_linear_rows": "pppnnni:n",
    "bg_linear": "pnpppnnni:",
    "bg_rms_norm": "pnppnnnfi:",
    "bg_add_rms_norm": "pnpppnnfi:",
    "bg_rotary": "pnnpnnnpnpnnii:n",
    "bg_silu_mul": "pnpnni:",
    "bg_store_kv": "pnpnpnpnnnni:n",
    "bg_attention": "pnnpnnnnnpppnnffnpi:n",
    "bg_sample": "pnnnpppppppi:n",
    "bg_score_tokens": "pnnnpnpnppppi:n",
    "bg_penalise": "pnnpnppppppi:n",
}
_TYPES = {"p": _POINTER, "n": _SIZE, "i": _INT, "f": _FLOAT}


class Library:
    """The functions of the library, as plain attributes so that a call costs no look-up by name."""

    def __init__(self, path: Path):
        loaded = ctypes.CDLL(str(path))

        def function(name: str) -> Callable[..., int]:
            arguments, result = _SIGNATURES[name].split(":")
            found = getattr(loaded, name)
            found.argtypes = [_TYPES[letter] for letter in arguments]
            found.restype = _TYPES[result] if result else None
            return found  # type: ignore[no-any-return]

        self.path = path
        self.panel = function("bg_panel")()
        self.linear_pack = function("bg_linear_pack")
        self.linear_rows = function("bg_linear_rows")
        self.linear = function("bg_linear")
        self.rms_norm = function("bg_rms_norm")
        self.add_rms_norm = function("bg_add_rms_norm")
        self.rotary = function("bg_rotary")
        self.silu_mul = function("bg_silu_mul")
        self.store_kv = function("bg_store_kv")
        self.attention = function("bg_attention")
        self.sample = function("bg_sample")
        self.score_tokens = function("bg_score_tokens")
        self.penalise = function("bg_penalise")


@cache
def load() -> Library | str:
    """The library, or why there is none. Warns once if there is none."""
    try:
        return Library(library_path())
    except (BuildError, OSError, AttributeError) as error:
        log.warning("C kernels are not available, the slow reference runs instead: %s", error)
        return str(error)
