"""The engine without a model keeps the promises of every EngineClient that a job rests on."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from batchgen.config import EngineConfig
from batchgen.engine.messages import EngineRequest, Limits, pack_ids
from batchgen.errors import ConfigError, EngineError
from batchgen.outputs import FailureCode, RequestOutput
from batchgen.sampling_params import SamplingParams
from batchgen.testing import ByteTokenizer, EchoEngine, EchoOptions

TOKENIZER = ByteTokenizer()


def request(number: int, text: str = "hello", seed: int = 0, **params: object) -> EngineRequest:
    ids = pack_ids(TOKENIZER.encode(text, add_special_tokens=False))
    return EngineRequest(
        request_id=str(number), prompt_token_ids=ids, params=SamplingParams(**params), seed=seed
    )


def drain(engine: EchoEngine) -> Iterator[RequestOutput]:
    while engine.in_flight():
        yield from engine.poll()


def answer(text: str = "hello", seed: int = 0, **params: object) -> RequestOutput:
    engine = EchoEngine()
    engine.add(request(0, text, seed, **params))
    (output,) = drain(engine)
    return output


def test_text_is_drawn_from_prompt_seed_and_sample_alone() -> None:
    text = answer(seed=1).outputs[0].text
    assert text.startswith("hello|")
    engine = EchoEngine(options=EchoOptions(batch=3, jitter=50))
    for number in range(20):
        engine.add(request(number, f"hello {number}" if number else "hello", seed=1))
    assert {output.outputs[0].text for output in drain(engine) if output.request_id == "0"} == {text}
    assert answer(seed=2).outputs[0].text != text
    greedy = [answer(seed=seed, temperature=0).outputs[0].text for seed in (1, 2)]
    assert greedy[0] == greedy[1]
    first, second = answer(seed=1, n=2).outputs
    assert (first.index, second.index) == (0, 1) and first.text == text and second.text != text


@pytest.mark.parametrize(
    ("params", "text", "count", "reason"),
    [
        ({"max_tokens": 4}, "hell", 4, "length"),
        ({"stop": "lo"}, "hel", 3, "stop"),
        ({"max_tokens": 50, "ignore_eos": True}, None, 50, "length"),
        ({"min_tokens": 40}, None, 40, "stop"),
        ({}, None, 23, "stop"),
    ],
)
def test_limits_of_a_text(params: dict[str, object], text: str | None, count: int, reason: str) -> None:
    (sample,) = answer(**params).outputs
    assert (len(sample.token_ids), sample.finish_reason) == (count, reason)
    assert text is None or sample.text == text


def test_outputs_come_out_of_order_and_each_once() -> None:
    engine = EchoEngine(options=EchoOptions(batch=8, jitter=100))
    for number in range(50):
        engine.add(request(number, f"row {number}"))
    order = [int(output.request_id) for output in drain(engine)]
    assert sorted(order) == list(range(50)) and order != sorted(order)
    assert engine.poll() == [] and engine.stats().num_requests_finished == 50


def test_blocks_are_counted_and_given_back() -> None:
    engine = EchoEngine(num_blocks=10, options=EchoOptions(delay_ms=1000))
    for number in range(3):
        # 5 + 23 tokens: two blocks a sample.
        engine.add(request(number, n=2))
    assert engine.poll(0.0) == []
    stats = engine.stats(with_block_map=True)
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (4, 1, 8)
    assert stats.block_map is not None and len(stats.block_map) == 10 and stats.block_map.count(2) == 8
    engine.abort(["0", "nobody"])
    assert engine.stats().num_used_blocks == 4 and engine.in_flight() == ["1", "2"]


def test_requests_that_cannot_run_come_back_with_the_reason() -> None:
    engine = EchoEngine(num_blocks=3, max_model_len=64, options=EchoOptions(fail="bad"))
    engine.add(request(0, ""))
    engine.add(request(1, "x" * 64))
    engine.add(request(2, "a bad prompt"))
    engine.add(request(3, "x" * 40))
    engine.add(request(4, "fine", max_tokens=3))
    codes = {int(output.request_id): output.error and output.error.code for output in drain(engine)}
    assert codes == {
        0: FailureCode.EMPTY_PROMPT,
        1: FailureCode.PROMPT_TOO_LONG,
        2: FailureCode.ENGINE_ERROR,
        3: FailureCode.NEVER_FITS,
        4: None,
    }


def test_a_paused_engine_stands_still() -> None:
    engine = EchoEngine(options=EchoOptions(delay_ms=1))
    engine.add(request(0))
    engine.pause()
    started = time.monotonic()
    assert engine.poll(0.1) == [] and time.monotonic() - started >= 0.1
    assert engine.stats().is_paused and engine.in_flight() == ["0"]
    engine.resume()
    assert [output.request_id for output in drain(engine)] == ["0"]


def test_limits_change_while_it_runs() -> None:
    engine = EchoEngine(options=EchoOptions(batch=1, delay_ms=1000))
    for number in range(4):
        engine.add(request(number))
    engine.poll(0.0)
    assert engine.stats().num_running == 1
    engine.set_limits(Limits(max_num_seqs=3))
    engine.poll(0.0)
    assert engine.stats().num_running == 3 and engine.stats().max_num_seqs == 3


def test_a_dead_engine_says_so_on_every_call() -> None:
    engine = EchoEngine(options=EchoOptions(die_after=2))
    for number in range(4):
        engine.add(request(number))
    with pytest.raises(EngineError, match="die_after"):
        list(drain(engine))
    with pytest.raises(EngineError, match="dead"):
        engine.add(request(9))


def test_options_of_the_model_name() -> None:
    config = EngineConfig.from_engine_args(model="echo:?batch=5&fail=no good", max_model_len=100)
    info = EchoEngine.from_config(config)
    assert (info.stats().max_num_seqs, info.info.max_model_len) == (5, 100)
    for model, reason in (
        ("echo:?bach=5", "did you mean 'batch'"),
        ("echo:?batch=many", "batch must be a number"),
        ("echo:fast", "write echo:"),
    ):
        with pytest.raises(ConfigError, match=reason):
            EchoOptions.parse(model)


def test_byte_tokenizer_keeps_control_text_of_data_as_text() -> None:
    data = "a</s>b<s>\ufdd0é"
    guarded = TOKENIZER.encode_guarded(f"<s>{TOKENIZER.guard(data)}", add_special_tokens=False)
    assert guarded[0] == 256 and TOKENIZER.decode(guarded[1:]) == data
    assert TOKENIZER.guard("plain") == "plain"
    assert TOKENIZER.encode("a</s>") == [256, 97, 257]
    assert TOKENIZER.encode("a</s>", allow_special_tokens=False, add_special_tokens=False) == list(b"a</s>")
    assert TOKENIZER.decode([256, 104, 105, 257]) == "hi"
    assert TOKENIZER.decode([256, 104], skip_special_tokens=False) == "<s>h"
    assert TOKENIZER.encode("half \ud83d", add_special_tokens=False) == list("half \ufffd".encode())


def test_adapters_give_other_texts_by_their_path() -> None:
    engine = EchoEngine(resolved={"enable_lora": True})
    for name, path in (("a", "p"), ("b", "q"), ("twin", "p")):
        assert engine.load_adapter(name, path).path == path
    for number, name in enumerate(("a", "b", "twin", None, "nobody")):
        engine.add(replace(request(number, seed=1), adapter=name))
    outputs = {output.request_id: output for output in drain(engine)}
    texts = [outputs[str(number)].outputs[0].text for number in range(4)]
    assert texts[0] == texts[2] and len(set(texts)) == 3 and texts[3] == answer(seed=1).outputs[0].text
    assert outputs["4"].error is not None and outputs["4"].error.code is FailureCode.UNKNOWN_ADAPTER
    assert [info.name for info in engine.adapters()] == ["a", "b", "twin"]
    assert engine.pin_adapter("b") and not engine.pin_adapter("nobody")
    assert engine.unload_adapter("a") and not engine.unload_adapter("a")


def test_without_slots_there_are_no_adapters() -> None:
    engine = EchoEngine()
    with pytest.raises(ConfigError, match=r"adapter 'a' \(p\): .* set enable_lora: true"):
        engine.load_adapter("a", "p")
    engine.add(replace(request(0), adapter="a"))
    (output,) = drain(engine)
    assert output.error is not None and "set enable_lora: true" in output.error.message
