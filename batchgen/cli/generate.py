"""`batchgen generate`: one prompt, one model, the text on standard output."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchgen.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from batchgen.api import LLM
    from batchgen.outputs import RequestOutput
    from batchgen.sampling_params import SamplingParams


def generate(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A folder, a .gguf file, a hub id or package:NAME/FILE.")
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt; - reads standard input.")],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat", help="Send it through the chat template. Default: if the model has one."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Default: up to the model's context.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy. Default: the model's own.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: the model's own.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Default: the model's own.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Default: the model's own.")] = None,
    seed: Annotated[int | None, typer.Option(help="For the same text again.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text to stop before; may be given several times.")
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="How many texts.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Engine setting, as in --set max_model_len=2048."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but the text.")] = False,
) -> None:
    """Generate text for one prompt. The text goes to standard output, all else to standard error."""
    text = sys.stdin.read() if prompt == "-" else prompt
    engine_args = _engine_args(settings or [])
    given: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    given |= {"seed": seed, "max_tokens": max_tokens, "stop": stop or None, "n": n}

    from batchgen.api import LLM

    with LLM(model, **engine_args) as llm:
        if not quiet:
            typer.echo(f"{llm.info.model}: loaded in {llm.info.load_s:.1f} s", err=True)
        params = _params(llm, {name: value for name, value in given.items() if value is not None})
        start = time.monotonic()
        output = _generate(llm, text, system, chat, params)
        seconds = time.monotonic() - start
    if output.error is not None:
        raise EngineError(f"{output.error.code}: {output.error.message}")
    for sample in output.outputs:
        typer.echo(sample.text)
    if not quiet:
        _summarise(output, seconds)


def _engine_args(settings: list[str]) -> dict[str, Any]:
    """Engine arguments from KEY=VALUE texts; the values in YAML, as in a job file."""
    if not settings:
        return {}
    from batchgen.jobs.yaml_file import parse_yaml

    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write it as key=value")
        found[name.strip().removeprefix("engine.")] = parse_yaml(value, f"--set {setting}").data
    return found


def _params(llm: "LLM", given: dict[str, Any]) -> "SamplingParams":
    from dataclasses import replace

    return replace(llm.get_default_sampling_params(), **given)


def _generate(
    llm: "LLM", text: str, system: str | None, chat: bool | None, params: "SamplingParams"
) -> "RequestOutput":
    if chat is None:
        chat = system is not None or llm.get_tokenizer().has_chat_template
    if not chat:
        if system is not None:
            raise ConfigError("--system needs the chat template; leave --no-chat out")
        return llm.generate(text, params, use_tqdm=False)[0]
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    return llm.chat(messages, params, use_tqdm=False)[0]


def _summarise(output: "RequestOutput", seconds: float) -> None:
    generated = sum(len(sample.token_ids) for sample in output.outputs)
    reasons = ", ".join(sample.finish_reason or "?" for sample in output.outputs)
    typer.echo(
        f"{len(output.prompt_token_ids)} prompt tokens, {generated} generated in {seconds:.1f} s "
        f"({generated / max(seconds, 1e-9):.1f} tokens/s); ended by {reasons}",
        err=True,
    )
