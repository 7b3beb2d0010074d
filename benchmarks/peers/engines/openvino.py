"""OpenVINO GenAI's continuous batching pipeline on token ids.

Its prefix cache is read only when a request is added: behind a long common beginning the first request is
therefore given alone. A new pipeline for each case keeps the cache cold.
"""

import gc
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.engine.workloads import Request
from benchmarks.peers.cases import common_tokens
from benchmarks.peers.refused import Refused

PACKAGES = ("openvino-genai", "openvino")
PRIMED_FROM = 64  # tokens in common
MOST_SEQUENCES = 256  # its own default


class Engine:
    def __init__(self, order: dict[str, Any]):
        self._folder, self._order = order["model"], order
        self._most = order["max_num_seqs"] or MOST_SEQUENCES
        self._properties = {"INFERENCE_NUM_THREADS": order["threads"]}
        if hint := order["settings"].get("hint"):
            self._properties["INFERENCE_PRECISION_HINT"] = hint
        if cache := order["settings"].get("kv"):
            self._properties["KV_CACHE_PRECISION"] = cache
        self._pipeline = self._new()

    def _new(self) -> Any:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = self._order["kv_gib"]
        scheduler.max_num_seqs = self._most
        scheduler.max_num_batched_tokens = self._order["openvino_batch_tokens"]
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        try:
            return openvino_genai.ContinuousBatchingPipeline(self._folder, scheduler, "CPU", self._properties)
        except RuntimeError as error:
            raise Refused(str(error)) from error

    def generate(self, requests: list[Request]) -> list[list[int]]:
        if len(requests) > 1 and common_tokens(requests) >= PRIMED_FROM:
            return self._submit(requests[:1]) + self._submit(requests[1:])
        return self._submit(requests)

    def _submit(self, requests: list[Request]) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([r.prompt_token_ids], dtype=np.int64)) for r in requests]
        configs = []
        for request in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.do_sample, config.ignore_eos = request.max_tokens, False, True
            # Whatever id: it is ignored, but there must be one.
            config.set_eos_token_id(0)
            configs.append(config)
        return [list(result.m_generation_ids[0]) for result in self._pipeline.generate(prompts, configs)]

    def forget(self) -> None:
        self._pipeline = None
        gc.collect()
        self._pipeline = self._new()

    def settings(self) -> dict[str, Any]:
        return {
            **self._properties,
            "max_num_seqs": self._most,
            "max_num_batched_tokens": self._order["openvino_batch_tokens"],
            "primed_from": PRIMED_FROM,
        }

    def close(self) -> None:
        self._pipeline = None
