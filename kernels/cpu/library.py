"""The compiled library as Python functions: built, loaded and typed once per process."""

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

from batchgen.kernels.cpu.build import BuildError, library_path

log = logging.getLogger("batchgen.kernels")

_POINTER, _SIZE, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
# Functions beside the table of kernels: p pointer, n size or stride, i int, f float; result after the colon.
_SIGNATURES: dict[str, str] = {
    "bg_panel": ":n",
    "bg_linear_pack": "ppnni:",
    "bg_int8_bytes": "nn:n",
    "bg_int8_pack": "ppppnnni:",
    "bg_coded_pack": "ppnnni:",
    "bg_coded_pack_groups": "ppnnni:",
    "bg_int8_use_amx": "n:n",
    "bg_int8_is_fast": ":n",
    "bg_lora_has_integers": ":i",
    "bg_lora_put": "ppnn:",
    "bg_lora_put_part": "pnppnn:",
    "bg_run": "pnpi:n",
    "bg_run_once": "pni:n",
    "bg_attention_plan_new": ":p",
    "bg_attention_plan_free": "p:",
    "bg_sample": "pnnnpppppppi:n",
    "bg_score_tokens": "pnnnpnpnppppi:n",
    "bg_penalise": "pnnpnppppppi:n",
    "bg_dequantize": "nppni:n",
    "bg_round_groups": "pnnpppppnnnnnnni:n",
    "bg_ceilings": "pnpi:",
}
_TYPES = {"p": _POINTER, "n": _SIZE, "i": _INT, "f": _FLOAT}


class Library:
    """The functions of the library, as plain attributes so that a call costs no look-up by name.

    `kinds` numbers its kernels: the rows of the table in kernels.h by name.
    """

    def __init__(self, path: Path):
        loaded = ctypes.CDLL(str(path))

        def function(name: str) -> Callable[..., int]:
            arguments, result = _SIGNATURES[name].split(":")
            found = getattr(loaded, name)
            found.argtypes = [_TYPES[letter] for letter in arguments]
            found.restype = _TYPES[result] if result else None
            return found  # type: ignore[no-any-return]

        self.path = path
        self.kinds = _kinds(loaded)
        self.run, self.run_once = function("bg_run"), function("bg_run_once")
        self.panel = function("bg_panel")()
        self.linear_pack = function("bg_linear_pack")
        self.int8_bytes, self.int8_pack = function("bg_int8_bytes"), function("bg_int8_pack")
        self.coded_pack = function("bg_coded_pack")
        self.coded_pack_groups = function("bg_coded_pack_groups")
        self.lora_has_integers = bool(function("bg_lora_has_integers")())
        self.lora_put, self.lora_put_part = function("bg_lora_put"), function("bg_lora_put_part")
        self.int8_is_fast = function("bg_int8_is_fast")
        self.int8_use_amx = function("bg_int8_use_amx")
        self.attention_plan_new = function("bg_attention_plan_new")
        self.attention_plan_free = function("bg_attention_plan_free")
        self.sample = function("bg_sample")
        self.score_tokens = function("bg_score_tokens")
        self.penalise = function("bg_penalise")
        self.dequantize = function("bg_dequantize")
        self.round_groups = function("bg_round_groups")
        self.ceilings = function("bg_ceilings")


def _kinds(loaded: ctypes.CDLL) -> dict[str, int]:
    name_of = loaded.bg_kernel_name
    name_of.argtypes, name_of.restype = [_SIZE], ctypes.c_char_p
    kinds: dict[str, int] = {}
    while (name := name_of(len(kinds))) is not None:
        kinds[name.decode()] = len(kinds)
    return kinds


@cache
def load() -> Library | str:
    """The library, or why there is none. Warns once if there is none."""
    try:
        return Library(library_path())
    except (BuildError, OSError, AttributeError) as error:
        log.warning("C kernels are not available, the slow reference runs instead: %s", error)
        return str(error)
