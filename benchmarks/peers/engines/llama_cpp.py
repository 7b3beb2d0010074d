"""llama.cpp through llama-cpp-python: its batch of many sequences, with new ones admitted as old ones end.

The library decodes a batch of tokens that belong to several sequences; who is in the batch is the caller's
business. Here as in its own server: every running sequence gives its newest token, and what is left of the
batch is filled with prompts. A common beginning is computed once and its cells given to every sequence that
starts with it.
"""

from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.engine.workloads import Request
from benchmarks.peers.cases import common_tokens

PACKAGES = ("llama-cpp-python",)
MOST_SEQUENCES = 128
BATCH_TOKENS = 512
SHARED_FROM = 64  # tokens in common
_CACHE = {"f32": llama_cpp.GGML_TYPE_F32, "f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
# Bytes for each number of the cache, to turn a size in memory into cells.
_BYTES = {"f32": 4, "f16": 2, "q8_0": 34 / 32}


@dataclass
class _Sequence:
    slot: int
    number: int
    request: Request
    done: int = 0  # prompt tokens in the cache
    ids: list[int] = field(default_factory=list)


class Engine:
    def __init__(self, order: dict[str, Any]):
        self._kv = order["settings"]["kv"]
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            order["model"].encode(), llama_cpp.llama_model_default_params()
        )
        assert self._model, f"llama.cpp cannot load {order['model']}"
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        # One slot beside those of the sequences holds the common beginning.
        self._slots = min(
            order["max_num_seqs"] or MOST_SEQUENCES, llama_cpp.llama_max_parallel_sequences() - 1
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = int(order["kv_gib"] * 2**30 / self._bytes_of_a_token())
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max, params.kv_unified = self._slots + 1, True
        params.n_threads = params.n_threads_batch = order["threads"]
        params.type_k = params.type_v = _CACHE[self._kv]
        self._cells = params.n_ctx
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, "llama.cpp cannot make a context"
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def _bytes_of_a_token(self) -> float:
        """Keys and values of all layers."""
        heads = llama_cpp.llama_model_n_head(self._model)
        width = (
            llama_cpp.llama_model_n_embd(self._model) // heads * llama_cpp.llama_model_n_head_kv(self._model)
        )
        return llama_cpp.llama_model_n_layer(self._model) * 2 * width * _BYTES[self._kv]

    def generate(self, requests: list[Request]) -> list[list[int]]:
        llama_cpp.llama_memory_clear(self._memory, True)
        common = common_tokens(requests) if len(requests) > 1 else 0
        prefix = requests[0].prompt_token_ids[:common] if common >= SHARED_FROM else []
        for start in range(0, len(prefix), BATCH_TOKENS):
            part = prefix[start : start + BATCH_TOKENS]
            self._decode([(token, start + n, self._slots, False) for n, token in enumerate(part)])
        waiting = list(enumerate(requests))[::-1]
        free, running = list(range(self._slots))[::-1], []
        outputs: list[list[int]] = [[] for _ in requests]
        used = len(prefix)
        while waiting or running:
            while waiting and free and used + _cells(waiting[-1][1], prefix) <= self._cells:
                number, request = waiting.pop()
                sequence = _Sequence(free.pop(), number, request, done=len(prefix))
                used += _cells(request, prefix)
                if prefix:
                    llama_cpp.llama_memory_seq_cp(self._memory, self._slots, sequence.slot, 0, len(prefix))
                running.append(sequence)
            assert running, "a request needs more cells than there are: --kv-gib"
            self._step(running)
            for sequence in [one for one in running if len(one.ids) == one.request.max_tokens]:
                outputs[sequence.number] = sequence.ids
                llama_cpp.llama_memory_seq_rm(self._memory, sequence.slot, -1, -1)
                used -= _cells(sequence.request, prefix)
                free.append(sequence.slot)
                running.remove(sequence)
        return outputs

    def _step(self, running: list[_Sequence]) -> None:
        """One batch: the newest token of each that has one, then prompts as far as they fit."""
        rows, drawing = [], []
        for sequence in running:
            if sequence.ids:
                position = len(sequence.request.prompt_token_ids) + len(sequence.ids) - 1
                drawing.append((len(rows), sequence))
                rows.append((sequence.ids[-1], position, sequence.slot, True))
        for sequence in running:
            prompt = sequence.request.prompt_token_ids
            part = prompt[sequence.done : sequence.done + BATCH_TOKENS - len(rows)]
            for token in part:
                ends = sequence.done + 1 == len(prompt)
                if ends:
                    drawing.append((len(rows), sequence))
                rows.append((token, sequence.done, sequence.slot, ends))
                sequence.done += 1
        self._decode(rows)
        for row, sequence in drawing:
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            sequence.ids.append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Token, position, slot and whether its logits are read."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, slot, wanted) in enumerate(rows):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, slot
        status = llama_cpp.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode: {status}"

    def forget(self) -> None:
        """Every call begins with an empty cache."""

    def settings(self) -> dict[str, Any]:
        return {
            "kv": self._kv,
            "max_num_seqs": self._slots,
            "batch_tokens": BATCH_TOKENS,
            "cells": self._cells,
        }

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def _cells(request: Request, prefix: list[int]) -> int:
    return len(request.prompt_token_ids) + request.max_tokens - len(prefix)
