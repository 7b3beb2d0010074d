"""load_executor: from an EngineConfig to tokens; what is decided, what is refused."""

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.engine.scheduler_output import DrawRules, SamplingRow, ScheduledSequence, SchedulerOutput
from batchgen.errors import CapacityError, ConfigError, EngineError, UnsupportedModelError
from batchgen.kernels.cpu.build import ISA_CAPS, ISA_VARIABLE
from batchgen.sampling_params import SamplingParams
from batchgen.tiny_models import random_ids, tiny_model, write_folder, write_gguf
from batchgen.worker.device import environment

GREEDY = SamplingParams(temperature=0)
PROMPTS = [random_ids(count, seed=count, vocab_size=256) for count in (5, 17, 40)]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_greedy_tokens_equal_transformers(backend: str, folder: Path, load: Any, generate: Any) -> None:
    from transformers import AutoModelForCausalLM

    ours = generate(load(folder, kernel_backend=backend), PROMPTS, 12)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        expected = whole[0, len(prompt) :].tolist()
        # Ids 260 to 299 have no token; where transformers draws one, the texts part.
        agree = next((at for at, token in enumerate(expected) if token >= 260), 12)
        assert tokens[:agree] == expected[:agree]


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.5, top_p=0.9)], ids=["greedy", "drawn"]
)
def test_a_row_gives_the_same_tokens_alone_and_in_a_batch(
    params: SamplingParams, folder: Path, load: Any, generate: Any
) -> None:
    executor = load(folder)
    together = generate(executor, PROMPTS, 10, params)
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        assert generate(executor, [prompt], 10, params, first_block=30)[0] == tokens


def test_a_gguf_file_gives_the_tokens_of_its_folder(
    tmp_path: Path, folder: Path, load: Any, generate: Any
) -> None:
    path = write_gguf(tiny_model(), tmp_path / "tiny.gguf")
    assert generate(load(path), PROMPTS, 10) == generate(load(folder), PROMPTS, 10)


def test_every_auto_is_decided_with_a_reason(folder: Path, load: Any) -> None:
    info = load(folder).info
    assert (info.architecture, info.max_model_len, info.vocab_size) == ("LlamaForCausalLM", 128, 300)
    assert info.resolved["dtype"] == "float32"
    assert info.resolved["max_num_seqs"] == 128
    assert info.num_blocks == 128 * 8
    assert info.reproducible
    for name in (
        "dtype",
        "device",
        "max_model_len",
        "max_num_seqs",
        "num_blocks",
        "reproducible",
        "kernels",
    ):
        assert any(text.startswith(f"{name}=") and "(" in text for text in info.decisions), name
    assert {"torch", "batchgen", "dtype", "threads", "kernels", "instruction_set"} <= set(info.environment)
    json.dumps(info.resolved)


def test_the_environment_names_the_widest_instructions_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> str:
        return environment(torch.device("cpu"), "float32", None, "float32", "cpu")["instruction_set"]

    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    assert found() == torch.backends.cpu.get_cpu_capability()
    for caps in ISA_CAPS.get(platform.machine(), {}):
        monkeypatch.setenv(ISA_VARIABLE, caps)
        assert found().endswith(f", kernels up to {caps}")


def test_what_is_given_is_no_decision(folder: Path, load: Any) -> None:
    info = load(folder, dtype="bfloat16", max_num_seqs=3, max_model_len=64, num_gpu_blocks_override=9).info
    assert info.resolved["dtype"] == "bfloat16"
    assert (info.max_model_len, info.num_blocks, info.reproducible) == (64, 9, False)
    assert not [
        text for text in info.decisions if text.startswith(("dtype=", "max_num_seqs=", "max_model_len="))
    ]


def test_ends_of_a_text_are_those_of_all_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, load: Any
) -> None:
    # BG-15
    folder = write_folder(tiny_model(), tmp_path, eos_token_id=[257, 0])
    with caplog.at_level("INFO", logger="batchgen.worker"):
        info = load(folder).info
    assert info.eos_token_ids == (257, 0)
    assert "257 (generation_config, config, tokenizer), 0 (generation_config)" in caplog.text


def test_ids_without_a_token_are_not_drawn(folder: Path, load: Any, generate: Any) -> None:
    # BG-11: the head has 300 rows, the tokenizer 260 ids.
    params = SamplingParams(temperature=0, logit_bias={280: 100.0, 259: 50.0})
    assert generate(load(folder), PROMPTS[:1], 3, params) == [[259, 259, 259]]


def test_reproducible_is_refused_where_it_is_not_built(folder: Path, load: Any) -> None:
    assert load(folder, reproducible=True).info.reproducible
    assert not load(folder, reproducible=False).info.reproducible
    with pytest.raises(ConfigError, match=r"reproducible: true cannot be had: .*reference"):
        load(folder, reproducible=True, kernel_backend="reference")


def test_settings_that_do_not_fit_the_model_are_refused(folder: Path, tmp_path: Path, load: Any) -> None:
    with pytest.raises(ConfigError, match="max_model_len=129 is more than the 128 positions"):
        load(folder, max_model_len=129)
    with pytest.raises(ConfigError, match="holds no model"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["BloomForCausalLM"]}')
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM is not built"):
        load(tmp_path)


def test_settings_that_the_machine_lacks_are_refused_before_anything_is_read(
    folder: Path, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("batchgen.worker.model_files.ModelFiles.build")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for wish, words in (
        ({"kernel_backend": "gpu"}, "kernel_backend='gpu' cannot serve linear for float32 on cpu"),
        ({"kernel_backend": "gpu", "quantization": "auto"}, "kernel_backend='gpu' cannot serve"),
        ({"device": "cuda"}, "device: cuda was asked for"),
        ({"max_model_len": 1000}, "max_model_len=1000 is more than"),
    ):
        with pytest.raises(ConfigError, match=f"^{words}"):
            load(folder, **wish)


def test_a_prompt_that_is_not_cut_must_fit_a_step(folder: Path, load: Any) -> None:
    info = load(folder, enable_chunked_prefill=False).info
    assert info.resolved["max_num_batched_tokens"] == 512, "the usual is enough for 128 positions"
    wide = load(folder, enable_chunked_prefill=False, max_num_batched_tokens=128).info
    assert wide.resolved["max_num_batched_tokens"] == 128
    message = "enable_chunked_prefill: false .* max_num_batched_tokens=127 is less than max_model_len=128"
    with pytest.raises(ConfigError, match=message):
        load(folder, enable_chunked_prefill=False, max_num_batched_tokens=127)


def test_a_long_model_that_does_not_cut_prompts_takes_them_in_one_step(tmp_path: Path, load: Any) -> None:
    long = write_folder(tiny_model(max_position_embeddings=3000), tmp_path)
    info = load(long, enable_chunked_prefill=False).info
    assert info.resolved["max_num_batched_tokens"] == 3000
    assert "max_num_batched_tokens=3000 (a prompt of max_model_len is computed in one step)" in info.decisions
    assert load(long).info.resolved["max_num_batched_tokens"] == 512


def test_preemption_follows_the_room_for_swapping(folder: Path, load: Any) -> None:
    info = load(folder).info
    assert (info.num_cpu_blocks, info.resolved["swap_space"]) == (0, 0.0)
    assert info.resolved["preemption_mode"] == "recompute"
    info = load(folder, swap_space=0.001).info
    # A block of both layers: 16 tokens, 2 heads of 16, keys and values, in float32.
    assert info.block_bytes == 2 * 16 * 2 * 16 * 2 * 4
    assert info.num_cpu_blocks == int(0.001 * 2**30) // info.block_bytes
    assert info.resolved["preemption_mode"] is None
    assert "preemption_mode=by cost (the cheaper of recompute and swap each time)" in info.decisions
    for mode in ("swap", "recompute"):
        assert load(folder, swap_space=0.001, preemption_mode=mode).info.resolved["preemption_mode"] == mode
    with pytest.raises(ConfigError, match=r"preemption_mode: swap .* swap_space is 0"):
        load(folder, preemption_mode="swap")
    with pytest.raises(CapacityError, match=r"swap_space=1e\+06 asks for .* MiB are free; give less"):
        load(folder, swap_space=1_000_000)


def test_groups_of_layers_are_told(tmp_path: Path, load: Any) -> None:
    options = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    info = load(write_folder(tiny_model("Qwen2ForCausalLM", **options), tmp_path)).info
    assert info.group_windows == (None, 20)
    assert info.num_groups == 2
    # Half the bytes of a block that serves both layers.
    assert info.block_bytes == 16 * 2 * 16 * 2 * 4


def test_copied_blocks_are_read_as_the_original(folder: Path, load: Any) -> None:
    executor = load(folder)
    prompt = PROMPTS[1]
    draw = (SamplingRow(0, DrawRules(GREEDY), (0, 0, 17), 0),)
    whole = ScheduledSequence(0, prompt, 0, ([0, 1],), draw)
    expected = executor.execute(SchedulerOutput(0, (whole,))).token_ids
    last = ScheduledSequence(1, prompt[16:], 16, ([5, 6],), draw)
    step = SchedulerOutput(1, (last,), block_copies=((0, 5),))
    assert executor.execute(step).token_ids == expected


def test_a_token_not_known_to_the_scheduler_is_the_one_drawn_before(
    folder: Path, load: Any, generate: Any
) -> None:
    executor = load(folder)
    known = generate(executor, PROMPTS[:1], 2)[0]
    prompt, draw = PROMPTS[0], (SamplingRow(0, DrawRules(GREEDY), (0, 0, 0), 0),)
    executor.execute(SchedulerOutput(0, (ScheduledSequence(0, prompt, 0, ([3],), draw),)))
    ahead = executor.execute(SchedulerOutput(1, (ScheduledSequence(0, [-1], len(prompt), ([3],), draw),)))
    assert ahead.token_ids == [known[1]]


def test_a_prompt_in_progress_draws_nothing(folder: Path, load: Any) -> None:
    executor = load(folder)
    step = SchedulerOutput(4, (ScheduledSequence(0, [1, 2, 3], 0, ([0],)),))
    result = executor.execute(step)
    assert (result.step, result.token_ids) == (4, [])
    assert executor.execute(SchedulerOutput(5, ())).token_ids == []


def test_the_end(folder: Path, load: Any) -> None:
    executor = load(folder)
    with pytest.raises(EngineError, match="no pool in host memory"):
        executor.execute(SchedulerOutput(0, (), swap_in=((0, 1),)))
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        executor.execute(SchedulerOutput(0, ()))
