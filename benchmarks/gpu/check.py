"""Holds the GPU kernels to the reference on a card, and runs a tiny model through the whole engine on it.

    python -m benchmarks.gpu.check [--interpret] [--out FILE]

It needs nothing but the working tree and torch, triton, transformers, pyarrow and pytest. Every result is
printed and written to a file of JSON lines as soon as it is known, so an interrupted run keeps what it has.
`--interpret` runs the same on the CPU in Triton's interpreter, in tiny shapes. Exit code: 0 all good, 1 some
failed, 2 no card.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = "tests/kernels/test_gpu_kernels.py"
VERDICT = re.compile(r"::(?P<name>\S+) (?P<verdict>PASSED|FAILED|ERROR|SKIPPED)")

Result = dict[str, Any]


def contract(device: str) -> Iterator[Result]:
    """The kernels' contract tests, each as one result, in a process that a broken kernel may take with it."""
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as settings:
        # Not the repository's own settings: they ask for plugins that a bare machine lacks.
        settings.write("[pytest]\n")
        settings.flush()
        command = [sys.executable, "-m", "pytest", TESTS, "-v", "-c", settings.name, "--rootdir", str(ROOT)]
        command += ["--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider", "--tb=short"]
        process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        )  # fmt: skip
        log, seen, started = [], 0, time.perf_counter()
        assert process.stdout is not None
        for line in process.stdout:
            log.append(line)
            found = VERDICT.search(line)
            if found and found["verdict"] != "SKIPPED":
                seen += 1
                now = time.perf_counter()
                yield {"name": found["name"], "ok": found["verdict"] == "PASSED", "seconds": now - started}
                started = now
        if process.wait() != 0 or not seen:
            yield {"name": "log", "ok": False, "detail": "".join(log)[-8000:]}


def speed(device: str) -> Iterator[Result]:
    """Decode and prefill attention: time, and the share of the machine's own copy rate or of SDPA's time."""
    import torch
    from torch.nn import functional

    from batchgen.kernels.cases import AttentionCase, make_inputs
    from batchgen.kernels.ops import choose

    is_card = device == "cuda"
    dtype = "bfloat16" if is_card else "float16"
    repeats = 20 if is_card else 1

    def seconds(work: Callable[[], object]) -> float:
        work()
        times = []
        for _ in range(repeats):
            if is_card:
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if is_card:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    source = torch.empty(2**30 if is_card else 2**16, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_rate = 2 * source.numel() / seconds(lambda: target.copy_(source))
    yield {"name": "copy", "ok": True, "gbytes_per_s": copy_rate / 1e9}
    sequences, length = (256, 2048) if is_card else (2, 40)
    shapes = {"decode": ([1] * sequences, [length] * sequences)}
    shapes["prefill"] = ([length] * 4, [length] * 4) if is_card else ([20], [20])
    for name, (query_lens, seq_lens) in shapes.items():
        case = AttentionCase(
            name=name, query_lens=query_lens, seq_lens=seq_lens, num_heads=32, num_kv_heads=8, head_dim=128
        )
        kernels = choose(device, dtype, backend="gpu", head_dim=case.head_dim)
        inputs = make_inputs(case, kernels, dtype, device)
        taken = seconds(lambda inputs=inputs, case=case: inputs.attend(case))
        result: Result = {"name": name, "ok": True, "milliseconds": taken * 1e3}
        if name == "decode":
            read = sum(seq_lens) * kernels.kv_block_bytes(inputs.kv.spec) / case.block_size
            result["share_of_copy_rate"] = read / taken / copy_rate
        else:
            shape = (len(seq_lens), 32, seq_lens[0], 128)
            query, key, value = (
                torch.randn(shape, device=device, dtype=inputs.query.dtype) for _ in range(3)
            )
            theirs = seconds(
                lambda q=query, k=key, v=value: functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True
                )
            )
            result["times_of_sdpa"] = taken / theirs
        yield result
    from benchmarks.kernels import bench_swap

    if not is_card:
        bench_swap.POOL_BLOCKS = 4
    layers, blocks = (32, 64) if is_card else (2, 2)
    yield {"name": "swap, GB/s", "ok": True, **bench_swap.measure(layers, 8, 128, blocks, repeats, device)}


def engine(device: str) -> Iterator[Result]:
    """Greedy tokens of a tiny random model through LLM, with mixed prompts, against transformers."""
    from batchgen import LLM
    from batchgen.tiny_models import tiny_model

    count, length = (32, 24) if device == "cuda" else (4, 5)
    model = tiny_model(vocab_size=_vocab_size()).to(device)
    prompts = _prompts(count)
    with tempfile.TemporaryDirectory() as folder:
        expected = _greedy_tokens(model, Path(folder), prompts, length, device)
        started = time.perf_counter()
        llm = LLM(
            folder, device=device, dtype="float32", kernel_backend="gpu", max_num_seqs=8,
            num_gpu_blocks_override=40, in_process=True,
        )  # fmt: skip
        with llm:
            agree = _num_agreeing(llm, prompts, expected)
            decisions = [str(decision) for decision in llm.info.decisions]
    yield {
        "name": "greedy tokens",
        "ok": agree == count,
        "detail": f"{agree} of {count} prompts agree with transformers",
        "seconds": time.perf_counter() - started,
        "decisions": decisions,
    }


def memory(device: str) -> Iterator[Result]:
    """Windowed layers and full ones in one pool that is too small; blocks go to host memory; sleep."""
    import torch

    from batchgen import LLM
    from batchgen.tiny_models import tiny_model

    count, length = (16, 40) if device == "cuda" else (3, 12)
    model = tiny_model(
        "Qwen2ForCausalLM", vocab_size=_vocab_size(), num_hidden_layers=4, use_sliding_window=True,
        sliding_window=20, max_window_layers=2,
    ).to(device)  # fmt: skip
    prompts = _prompts(count, least=28)
    with tempfile.TemporaryDirectory() as folder:
        expected = _greedy_tokens(model, Path(folder), prompts, length, device)
        del model
        llm = LLM(
            folder, device=device, dtype="float32", kernel_backend="gpu", max_num_seqs=8, in_process=True,
            num_gpu_blocks_override=16, swap_space=0.01, preemption_mode="swap", enable_prefix_caching=False,
        )  # fmt: skip
        with llm:
            agree = _num_agreeing(llm, prompts, expected)
            swapped = llm.get_metrics().choices["preempt_swap"]
            yield {
                "name": "windows and swap",
                "ok": agree == count and swapped > 0,
                "detail": f"{agree} of {count} prompts agree with transformers, {swapped} swapped out",
            }
            for level in (1, 2):
                before = torch.cuda.memory_reserved() if device == "cuda" else 0
                llm.sleep(level)
                left = torch.cuda.memory_reserved() if device == "cuda" else 0
                llm.wake_up()
                agree = _num_agreeing(llm, prompts, expected)
                yield {
                    "name": f"sleep, level {level}",
                    "ok": agree == count and (device != "cuda" or left < before),
                    "detail": f"{agree} of {count} prompts agree afterwards",
                    "mib_before": before / 2**20,
                    "mib_asleep": left / 2**20,
                }


def _vocab_size() -> int:
    """As many ids as the tokenizer has: batchgen never draws an id that means nothing."""
    from batchgen.tiny_models import SPECIAL_TOKENS

    return 256 + len(SPECIAL_TOKENS)


def _prompts(count: int, least: int = 3) -> list[list[int]]:
    from batchgen.tiny_models import random_ids

    return [random_ids(least + 5 * index % 60, index, _vocab_size()) for index in range(count)]


def _greedy_tokens(
    model: Any, folder: Path, prompts: list[list[int]], length: int, device: str
) -> list[list[int]]:
    """Store the model in a folder; what transformers generates, which keeps the end of text from coming."""
    import torch

    from batchgen.tiny_models import write_folder

    write_folder(model, folder)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
        )
        expected.append(made[0, len(prompt) :].tolist())
    return expected


def _num_agreeing(llm: Any, prompts: list[list[int]], expected: list[list[int]]) -> int:
    from batchgen import SamplingParams

    length = len(expected[0])
    params = SamplingParams(temperature=0.0, max_tokens=length, min_tokens=length)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(
        list(output.outputs[0].token_ids) == tokens for output, tokens in zip(outputs, expected, strict=True)
    )


STEPS: dict[str, Callable[[str], Iterator[Result]]] = {
    "contract": contract,
    "engine": engine,
    "memory": memory,
    "speed": speed,
}


def main() -> int:
    """Run every step; a step that breaks is a failed result and the next one runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--interpret", action="store_true", help="run on the CPU, in tiny shapes")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.jsonl"), help="file of JSON lines")
    parser.add_argument("--only", choices=STEPS, action="append", help="run only this step; may be repeated")
    arguments = parser.parse_args()
    if arguments.interpret:
        # Before anything imports triton, here and in children.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from benchmarks.record import commit, machine, versions

    if not arguments.interpret and not torch.cuda.is_available():
        print(
            "There is no CUDA device here. `--interpret` runs the same on the CPU, slowly and in tiny shapes."
        )
        return 2
    device = "cpu" if arguments.interpret else "cuda"
    about = {**commit(), "machine": machine(), "versions": versions()}
    about["card"] = torch.cuda.get_device_name() if device == "cuda" else "interpreter"
    is_good = True
    with arguments.out.open("w", encoding="utf-8") as lines:

        def keep(result: Result) -> None:
            lines.write(json.dumps(result) + "\n")
            lines.flush()

        keep({"step": "machine", **about})
        print(f"{about['card']}, commit {about['commit']}{' with changes' if about['dirty'] else ''}")
        for step in arguments.only or STEPS:
            try:
                for result in STEPS[step](device):
                    keep({"step": step, **result})
                    is_good &= result["ok"]
                    print(_line(step, result), flush=True)
            except Exception:
                is_good = False
                keep({"step": step, "name": "broke off", "ok": False, "detail": traceback.format_exc()})
                print(f"{step:9}FAIL  broke off\n{traceback.format_exc()}", flush=True)
    print(f"{'all good' if is_good else 'NOT good'}; lines in {arguments.out}")
    return 0 if is_good else 1


def _line(step: str, result: Result) -> str:
    verdict = "ok" if result["ok"] else "FAIL"
    numbers = "  ".join(f"{key} {value:.4g}" for key, value in result.items() if isinstance(value, float))
    return f"{step:9}{verdict:6}{result['name']:70.70}  {result.get('detail', '')}  {numbers}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
