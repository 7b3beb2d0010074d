"""What `reproducible` costs: the engine with its own matrix product beside the same engine with torch's.

    python -m benchmarks.engine.bench_reproducible --batches 1,8,64 --repeat 3

Everything but the linear layers is the same. torch's products (oneDNN, with the weight reordered once) are
the fastest that a library has here, and change bits with the number of rows; ours do not. Two engines take
turns on the same requests, greedily; the line also says how many rows came out with other tokens.
"""

import statistics
import time
from typing import Any

import torch
from typing_extensions import override

from batchgen.kernels.backend import PackedLinear
from batchgen.kernels.ops import Kernels
from benchmarks import record
from benchmarks.engine.bench_offline import MODEL
from benchmarks.engine.example_texts import beginnings


class ReorderedLinear(PackedLinear):
    """A weight in the layout that oneDNN likes; the plain one is kept for the rows of a tied embedding."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, is_head: bool):
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self.reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 64)

    @override
    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]

    @override
    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, self.reordered]


def torch_linear(x: torch.Tensor, packed: ReorderedLinear, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] -> [T, N]."""
    made = torch.ops.mkldnn._linear_pointwise(x, packed.reordered, packed.bias, "none", [], "")
    return made if out is None else out.copy_(made)


def engine(model: str, threads: int, with_torch: bool) -> Any:
    """An engine in this process."""
    from batchgen import LLM
    from batchgen.worker import decisions

    choose = decisions.choose

    def with_library_products(*given: Any, **named: Any) -> Kernels:
        kernels: Any = choose(*given, **named)
        kernels._linear, kernels._pack_linear = torch_linear, ReorderedLinear
        return kernels

    decisions.choose = with_library_products if with_torch else choose
    try:
        return LLM(model, in_process=True, dtype="float32", num_threads=threads, max_model_len=1024)
    finally:
        decisions.choose = choose


def main() -> None:
    """Measure every batch size; print, and add a line each to results/."""
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=record.machine()["cores"])
    args = parser.parse_args()

    from batchgen import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    engines = {
        "batchgen": engine(args.model, args.threads, with_torch=False),
        "torch": engine(args.model, args.threads, with_torch=True),
    }
    tokenizer = engines["batchgen"].get_tokenizer()
    for batch in map(int, args.batches.split(",")):
        # More texts than this of that length the example does not have; the others come again.
        texts = beginnings(tokenizer, min(batch, 48), args.prompt_tokens)
        prompts = (texts * 2)[:batch]
        rates: dict[str, list[float]] = {name: [] for name in engines}
        tokens: dict[str, list[list[int]]] = {}
        for repeat in range(args.repeat + 1):
            for name, llm in engines.items():
                llm.reset_prefix_cache()
                start = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                took = time.perf_counter() - start
                tokens[name] = [output.outputs[0].token_ids for output in outputs]
                if repeat:  # the first is a warm-up
                    rates[name].append(sum(map(len, tokens[name])) / took)
        others = sum(ours != theirs for ours, theirs in zip(*tokens.values(), strict=True))
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(rates["batchgen"], rates["torch"], strict=True)
        )
        print(
            f"batch {batch:3d}: {statistics.median(rates['batchgen']):.1f} tokens/s reproducible, "
            f"{statistics.median(rates['torch']):.1f} with torch's products ({ratio:.3f}); "
            f"{others} of {batch} rows came out with other tokens"
        )
        if not args.no_save:
            case = {"model": args.model, "batch": batch, "threads": args.threads}
            measured = {
                "ratio": round(ratio, 3),
                "tokens_per_s": {name: record.spread(values) for name, values in rates.items()},
                "rows_with_other_tokens": others,
            }
            record.append("reproducible", case, measured)
    for llm in engines.values():
        llm.shutdown()


if __name__ == "__main__":
    main()
