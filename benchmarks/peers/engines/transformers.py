"""transformers' generate() on static batches, padded on the left, in arrival order."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine.workloads import Request

PACKAGES = ("transformers", "torch")
# Of a padded batch: a longer one does not fit beside its attention mask.
MOST_TOKENS = 32768


class Engine:
    def __init__(self, order: dict[str, Any]):
        torch.set_num_threads(order["threads"])
        self._batch_size, self._dtype = order["transformers_batch_size"], order["settings"]["dtype"]
        self._model = AutoModelForCausalLM.from_pretrained(
            order["model"], dtype=getattr(torch, self._dtype), attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(self, requests: list[Request]) -> list[list[int]]:
        outputs: list[list[int]] = []
        while rest := requests[len(outputs) :]:
            batch = rest[: self._batch_size]
            while len(batch) > 1 and _width(batch) * len(batch) > MOST_TOKENS:
                batch = batch[: len(batch) // 2]
            outputs += self._generate(batch)
        return outputs

    @torch.inference_mode()
    def _generate(self, batch: list[Request]) -> list[list[int]]:
        width = _width(batch)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            start = width - len(request.prompt_token_ids)
            ids[row, start:] = torch.tensor(request.prompt_token_ids)
            mask[row, start:] = 1
        longest = max(request.max_tokens for request in batch)
        out = self._model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=longest
        )
        return [
            row[width : width + request.max_tokens].tolist() for row, request in zip(out, batch, strict=True)
        ]

    def forget(self) -> None:
        """Nothing is kept between calls."""

    def settings(self) -> dict[str, Any]:
        return {"dtype": self._dtype, "batch_size": self._batch_size}

    def close(self) -> None:
        pass


def _width(batch: list[Request]) -> int:
    return max(len(request.prompt_token_ids) for request in batch)
