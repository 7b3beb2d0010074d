"""`batchgen generate`: one prompt, one model, the text on standard output."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchgen.cli.settings import parse_settings
from batchgen.errors import ConfigError, EngineError, ModelError
from batchgen.quantities import counted

if TYPE_CHECKING:
    from batchgen.api.caller import Caller
    from batchgen.api.prompt_forms import Read
    from batchgen.engine.client import EngineClient
    from batchgen.engine.messages import EngineRequest
    from batchgen.lora import AdapterFacts
    from batchgen.outputs import PositionLogprobs, RequestOutput
    from batchgen.sampling_params import SamplingParams

# What is told of the engine's decisions: in which types it computes and keeps numbers.
_PRECISION = ("dtype", "quantization", "kv_cache_dtype")
# How long a wait for new text may be before the bar looks at the engine's numbers.
_POLL_S = 0.5


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
    n: Annotated[int | None, typer.Option("-n", min=1, help="How many texts. Default: 1.")] = None,
    beam_width: Annotated[
        int | None, typer.Option(min=1, help="Search so many beams; the texts, best first.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="Show each token's log probability, and so many likely others.")
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="SCHEMA", help="A JSON schema or a file with one; the text conforms to it."
        ),
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The whole text matches it.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="The text is one of these; may be given several times.")
    ] = None,
    grammar: Annotated[
        str | None,
        typer.Option(help="A grammar in Lark's syntax or GBNF, or a file with one; the text conforms to it."),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A LoRA adapter: a folder as peft writes it, or a hub id."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Engine setting, as in --set max_model_len=2048, or sampling parameter, as in "
            "--set sampling.repetition_penalty=1.1.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but the text.")] = False,
) -> None:
    """Generate text for one prompt. The text goes to standard output, all else to standard error.

    A terminal shows the text as it comes; a file or a pipe gets it whole.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    engine_args, given = parse_settings(settings or [])
    flags: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    flags |= {"seed": seed, "max_tokens": max_tokens, "stop": stop or None, "n": n, "logprobs": logprobs}
    flags |= _beams(beam_width, n, temperature)
    said = {name: value for name, value in flags.items() if value is not None}
    if twice := sorted(said.keys() & given.keys()):
        raise ConfigError(
            f"--set sampling.{twice[0]}: a flag says it too ({said[twice[0]]!r}); leave one of the two out"
        )
    given |= said
    if rules := _grammar(json_schema, regex, choice, grammar):
        given["structured_outputs"] = {**(given.get("structured_outputs") or {}), **rules}

    facts = None if adapter is None else _adapter_facts(adapter, engine_args)
    from batchgen.api.caller import Caller

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    caller = Caller("generate", model, engine_args, begins=True)
    try:
        params, read = _params(caller, given), _read(caller, text, system, chat)
    except BaseException:
        caller.abandon()
        raise
    engine = caller.start(False, on_loading=say)
    try:
        info = engine.info
        for line in info.decided(*_PRECISION):
            say(line)
        say(f"{info.model}: loaded in {info.load_s:.1f} s")
        caller.check([params], info)
        name = None if facts is None else facts.path.name
        if facts is not None and name is not None:
            loaded = engine.load_adapter(name, str(facts.path))
            say(f"adapter {name}: rank {facts.max_rank}, {counted(facts.num_modules, 'module')}")
            for warning in loaded.warnings:
                say(f"adapter {name}: {warning}")
        streams = sys.stdout.isatty() and params.num_samples == 1
        request = caller.request(read, params, streams=streams, adapter=name)
        start = time.monotonic()
        output = _run(engine, request, use_tqdm=not (quiet or streams) and sys.stderr.isatty())
        seconds = time.monotonic() - start
    finally:
        engine.shutdown()
    if output.error is not None:
        raise EngineError(f"{output.error.code}: {output.error.message}")
    for sample in output.outputs:
        if not streams:
            typer.echo(sample.text)
        for position in sample.logprobs or ():
            typer.echo(_shown(position or {}), err=True)
    say(_summary(output, seconds))


def _adapter_facts(adapter: str, engine_args: dict[str, Any]) -> "AdapterFacts":
    """What `--adapter` names, looked at before the model loads; the engine gets slots."""
    from batchgen.lora import check_adapter

    if engine_args.setdefault("enable_lora", True) is not True:
        raise ConfigError("--set enable_lora: an --adapter needs it to be true; leave one of the two out")
    try:
        return check_adapter(adapter)
    except (ConfigError, ModelError) as error:
        raise ConfigError(f"--adapter {adapter}: {error}") from error


def _beams(width: int | None, n: int | None, temperature: float | None) -> dict[str, Any]:
    """What `--beam-width` stands for: as many texts as beams, unless `-n` says how many."""
    if width is None:
        return {}
    if n is not None and n > width:
        raise ConfigError(f"-n {n} is more than --beam-width {width}; a search finds one text for each beam")
    if temperature:
        raise ConfigError(
            f"--temperature {temperature} does not go with --beam-width: a search draws nothing"
        )
    return {"use_beam_search": True, "temperature": 0, "best_of": width, "n": n or width}


def _grammar(
    json_schema: str | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> dict[str, Any]:
    """What `structured_outputs` the flags stand for; {} for none."""
    given = {"json": json_schema, "regex": regex, "choice": choice or None, "grammar": grammar}
    found = {name: value for name, value in given.items() if value is not None}
    if json_schema is not None and not json_schema.lstrip().startswith("{"):
        path = Path(json_schema)
        if not path.is_file():
            raise ConfigError(f"--json {json_schema}: neither a JSON schema nor a file that is there")
        found["json"] = path.read_text(encoding="utf-8")
    # A grammar has a rule with a colon; what has none can only be a file.
    if grammar is not None and ":" not in grammar:
        path = Path(grammar)
        if not path.is_file():
            raise ConfigError(f"--grammar {grammar}: neither a grammar nor a file that is there")
        found["grammar"] = path.read_text(encoding="utf-8")
    return found


def _params(caller: "Caller", given: dict[str, Any]) -> "SamplingParams":
    """The model's own parameters with what was given in their place."""
    from batchgen.sampling_defaults import OF_DRAWING
    from batchgen.sampling_params import RequestOutputKind, SamplingParams

    defaults = caller.default_params.to_mapping()
    if given.get("use_beam_search"):
        for name in OF_DRAWING:
            del defaults[name]
    params = SamplingParams.from_mapping({**defaults, **given}, "--set sampling")
    return replace(params, output_kind=RequestOutputKind.CUMULATIVE)


def _read(caller: "Caller", text: str, system: str | None, chat: bool | None) -> "Read":
    """The prompt, through the chat template or as it is."""
    from batchgen.api.prompt_forms import read_prompt

    if chat is None:
        chat = system is not None or caller.tokenizer.has_chat_template
    if not chat:
        if system is not None:
            raise ConfigError("--system needs the chat template; leave --no-chat out")
        return read_prompt(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return caller.render([*messages, {"role": "user", "content": text}])[0]


def _run(client: "EngineClient", request: "EngineRequest", *, use_tqdm: bool) -> "RequestOutput":
    """Run a request; one that streams is shown on standard output as it comes, up to the end of its line."""
    from batchgen.api.progress_bar import progress_bar

    client.add(request)
    num_shown = 0
    with progress_bar(1, use_tqdm) as bar:
        while True:
            bar.see(client.stats())
            for output in client.poll(_POLL_S):
                if request.streams:
                    text = output.outputs[0].text if output.outputs else ""
                    has_ended = output.finished and (output.error is None or num_shown > 0)
                    typer.echo(text[num_shown:], nl=has_ended)
                    num_shown = len(text)
                if output.finished:
                    bar.add(output)
                    return output


def _shown(position: "PositionLogprobs") -> str:
    """A token and the likely others, in one line."""
    return "  ".join(f"{entry.decoded_token!r} {entry.logprob:.3f}" for entry in position.values())


def _summary(output: "RequestOutput", seconds: float) -> str:
    generated = sum(len(sample.token_ids) for sample in output.outputs)
    reasons = ", ".join(sample.finish_reason or "?" for sample in output.outputs)
    is_cut = any(sample.valid is False for sample in output.outputs)
    note = "; not valid, because cut short" if is_cut else ""
    return (
        f"{counted(len(output.prompt_token_ids), 'prompt token')}, {generated:,} generated in "
        f"{seconds:.1f} s ({generated / max(seconds, 1e-9):.1f} tokens/s); ended by {reasons}{note}"
    )
