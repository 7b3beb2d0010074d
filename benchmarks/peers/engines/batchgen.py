"""batchgen as a user of `LLM` has it: the engine in its child process."""

from typing import Any

from batchgen import LLM, SamplingParams
from batchgen.errors import ConfigError
from benchmarks.engine.workloads import Request
from benchmarks.peers.refused import Refused

PACKAGES = ("batchgen", "torch")


class Engine:
    def __init__(self, order: dict[str, Any]):
        self._settings = {
            **order["settings"],
            "num_threads": order["threads"],
            "kv_cache_memory_bytes": order["kv_gib"] * 2**30,
        }
        if order["max_num_seqs"]:
            self._settings["max_num_seqs"] = order["max_num_seqs"]
        try:
            self._llm = LLM(order["model"], **self._settings)
        except ConfigError as error:
            raise Refused(str(error)) from error

    def generate(self, requests: list[Request]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=r.max_tokens) for r in requests]
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            if output.error:
                raise Refused(str(output.error))
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        assert self._llm.reset_prefix_cache()

    def settings(self) -> dict[str, Any]:
        return {**self._settings, "decisions": list(self._llm.info.decisions)}

    def close(self) -> None:
        self._llm.shutdown()
