"""`python -m batchgen.api.eval_child TASK`: one scheme of `eval_quant`, in a process of its own.

So what is measured of its memory is its own. TASK is a JSON file; the answer goes to its "answer", where an
error of ours stands as one.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchgen.api.batch_runner import BatchRunner
from batchgen.api.caller import Caller
from batchgen.api.progress_bar import progress_bar
from batchgen.api.prompt_forms import Read
from batchgen.api.stats_log import StatsLog
from batchgen.api.workload import exact
from batchgen.engine.in_process import InProcessClient
from batchgen.engine.loading import load_core
from batchgen.engine.messages import pack_ids
from batchgen.errors import BatchgenError
from batchgen.worker.model_files import ModelFiles
from batchgen.worker.whole_logits import whole_logits

if TYPE_CHECKING:
    from batchgen.models.decoder import Decoder

# Of each distribution of the float model; the rest of the vocabulary counts as one.
_MOST_LIKELY = 256
_LOOK_S = 0.002


def main() -> int:
    """Measure what the task says."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        answer = _measure(task)
    except BatchgenError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    Path(task["answer"]).write_text(json.dumps(answer), encoding="utf-8")
    return 0


def _measure(task: dict[str, Any]) -> dict[str, Any]:
    _import_kernels()
    caller = Caller("eval_quant", task["model"], task["engine_args"])
    shape = ModelFiles(task["model"], caller.config.model.revision).shape
    config = caller.config.with_values(max_model_len=min(task["max_len"], shape.max_len))
    before = _own_mib()
    with _peak() as loading:
        started = time.perf_counter()
        core = load_core(config, tokenizer_eos_ids=caller.tokenizer.eos_token_ids)
        load_s = time.perf_counter() - started
    model = core.executor.model  # type: ignore[attr-defined]
    with _peak() as serving:
        runner = BatchRunner(InProcessClient(core, caller.tokenizer), StatsLog(is_disabled=True))
        speed = _speed(caller, runner, task)
    found = _compare(model, task["pieces"], Path(task["truth"]), task["is_truth"])
    return {
        "load_s": load_s,
        "weights_mib": sum(each.untyped_storage().nbytes() for each in _once(model.tensors())) / 2**20,
        "loading_mib": _above(loading, before),
        "serving_mib": _above(serving, before),
        "resolved": {name: core.info.resolved[name] for name in ("quantization", "kv_cache_dtype", "dtype")},
        **speed,
        **found,
    }


def _import_kernels() -> None:
    """What every scheme needs alike must not count as memory of the first model's."""
    import batchgen.worker.load  # noqa: F401
    from batchgen.kernels.cpu.library import load

    load()
    torch.ones(64, 64) @ torch.ones(64, 64)


def _speed(caller: Caller, runner: BatchRunner, task: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second of all prompts together, once warm."""
    prompts = [Read(None, pack_ids(ids)) for ids in task["prompts"]]
    for count in (4, task["new_tokens"]):
        asked = [caller.request(prompt, exact(count)) for prompt in prompts]
        runner.engine.reset_prefix_cache()
        with progress_bar(0, False) as bar:
            started = time.perf_counter()
            outputs = runner.run(iter(asked), len(asked), bar)
            seconds = time.perf_counter() - started
    errors = [output.error.message for output in outputs if output.error is not None]
    if errors:
        raise BatchgenError(f"a prompt could not be run: {errors[0]}")
    runner.engine.reset_prefix_cache()
    new_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return {"tokens_per_s": new_tokens / seconds}


def _compare(
    model: "Decoder", pieces: Sequence[Sequence[int]], truth: Path, is_truth: bool
) -> dict[str, Any]:
    """Losses of each piece, and beside the truth divergence and agreement; or the truth itself."""
    kept = None if is_truth else np.load(truth)
    ids, logprobs = [], []
    losses, divergence, same, position = [], [], [], 0
    for piece in pieces:
        loss, following = 0.0, torch.tensor([*piece[1:], 0])
        row = 0
        for logits in whole_logits(model, piece):
            # The last position has nothing after it.
            count = min(len(logits), len(piece) - 1 - row)
            if count <= 0:
                break
            scores = logits[:count].to(torch.float32).log_softmax(dim=-1)
            loss -= float(scores.gather(1, following[row : row + count, None]).to(torch.float64).sum())
            row += count
            if kept is None:
                best = scores.topk(min(_MOST_LIKELY, scores.shape[1]))
                ids.append(best.indices.to(torch.int32).numpy())
                logprobs.append(best.values.numpy())
                continue
            at = slice(position, position + count)
            position += count
            tokens = torch.from_numpy(kept["ids"][at].astype(np.int64))
            divergence.append(_divergence(torch.from_numpy(kept["logprobs"][at]), scores.gather(1, tokens)))
            same.append(scores.argmax(dim=-1) == tokens[:, 0])
        losses.append(loss / (len(piece) - 1))
    if kept is None:
        np.savez(truth, ids=np.concatenate(ids), logprobs=np.concatenate(logprobs))
        return {"losses": losses}
    return {
        "losses": losses,
        "kl": float(torch.cat(divergence).mean()),
        "same_top": float(torch.cat(same).to(torch.float64).mean()),
    }


def _divergence(truth: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Of each row, in nats; what is not among the likeliest is one token more: truth, found [T, k] -> [T]."""
    truth, found = truth.to(torch.float64), found.to(torch.float64)
    rest = [(1 - each.exp().sum(dim=1)).clamp(min=1e-12) for each in (truth, found)]
    likely = (truth.exp() * (truth - found)).sum(dim=1)
    return likely + rest[0] * (rest[0].log() - rest[1].log())


def _once(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One of those that share memory."""
    return list({each.untyped_storage().data_ptr(): each for each in tensors}.values())


def _own_mib() -> float | None:
    """Memory of this process without what it maps of files; None where nobody tells."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    told = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(told["RssAnon"].split()[0]) / 1024 if "RssAnon" in told else None


def _above(peak: Sequence[float], before: float | None) -> float | None:
    return None if before is None or not peak else max(peak) - before


@contextmanager
def _peak() -> Iterator[list[float]]:
    """The memory of this process, looked at all the time: a list that holds the most of it."""
    most: list[float] = []
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_S):
            now = _own_mib()
            if now is not None and (not most or now > most[0]):
                most[:] = [now]

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        is_over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
