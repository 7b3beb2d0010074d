"""Tokens per second with LoRA adapters in the batch, beside the base model's: what rows of their own cost.

    python -m benchmarks.engine.bench_lora --adapters 8 --ranks 16,64 --repeat 5

Beginnings of texts go on, greedily; the adapters are random ones of all linear layers, each with an even
share of the rows. Base rows, rows with adapters, and an engine without slots take turns, so that whatever
else the machine does slows all of them.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.engine.bench_offline import MODEL
from benchmarks.engine.example_texts import beginnings


def write_adapters(model: str, folder: Path, rank: int, count: int) -> list[Any]:
    """Adapters of all linear layers of a model, as requests name them."""
    from batchgen import LoRARequest
    from batchgen.lora.base_modules import base_modules
    from batchgen.tiny_adapters import write_adapter
    from batchgen.worker.model_files import ModelFiles

    modules = base_modules(ModelFiles(model).shape)
    shapes = {name: module.weight_shape for name, module in modules.items() if module.kind == "linear"}
    made = []
    for number in range(count):
        path = folder / f"{rank}-{number}"
        write_adapter(path, shapes, rank=rank, alpha=rank, seed=number, strength=0.01)
        made.append(LoRARequest(f"rank {rank}, {number}", number + 1, path))
    return made


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--quantization", default="none,int8", help="none and int8, or one of them")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=record.machine()["cores"])
    args = parser.parse_args()
    ranks = [int(rank) for rank in args.ranks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        loras = {rank: write_adapters(args.model, Path(folder), rank, args.adapters) for rank in ranks}
        for quantization in args.quantization.split(","):
            measured = _measure(args, loras, None if quantization == "none" else quantization)
            print(f"{quantization:5s} {_words(measured)}", flush=True)
            if not args.no_save:
                case = {
                    name: getattr(args, name)
                    for name in ("model", "batch", "adapters", "prompt_tokens", "max_tokens", "threads")
                }
                record.append("lora", {**case, "quantization": quantization}, measured)


def _measure(args: Any, loras: dict[int, list[Any]], quantization: str | None) -> dict[str, Any]:
    from batchgen import LLM, SamplingParams

    settings: dict[str, Any] = {
        "dtype": "float32", "num_threads": args.threads, "quantization": quantization,
        "max_num_seqs": args.batch, "enable_prefix_caching": False,
    }  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    with (
        LLM(args.model, **settings) as plain,
        LLM(args.model, **settings, enable_lora=True, max_loras=args.adapters) as slots,
    ):
        prompts = beginnings(plain.get_tokenizer(), 48, args.prompt_tokens)
        prompts = (prompts * (args.batch // len(prompts) + 1))[: args.batch]
        arms: dict[str, tuple[Any, Any]] = {"without slots": (plain, None), "base rows": (slots, None)}
        for rank, given in loras.items():
            arms[f"rank {rank}"] = slots, (given * args.batch)[: args.batch]
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(args.repeat + 1):
            for name, (llm, given) in arms.items():
                start = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=given)
                took = time.perf_counter() - start
                # The first round loads adapters and records programs.
                if number:
                    rates[name].append(sum(len(output.outputs[0].token_ids) for output in outputs) / took)
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(rates[name], rates["base rows"], strict=True)), 3)
        for name in rates
    }
    return {
        "ratio_to_base_rows": ratios,
        "tokens_per_s": {name: record.spread(values) for name, values in rates.items()},
    }


def _words(measured: dict[str, Any]) -> str:
    rates, ratios = measured["tokens_per_s"], measured["ratio_to_base_rows"]
    return "; ".join(f"{name} {rates[name]['median']:.0f} tokens/s ({ratios[name]:.3f})" for name in rates)


if __name__ == "__main__":
    main()
