"""What a notebook or a script calls: LLM (generate, chat) and run_job."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from batchgen.byte_tokenizer import ByteTokenizer
from batchgen.config import EngineConfig, ModelSettings
from batchgen.engine.client import EngineClient
from batchgen.engine.messages import EngineInfo, EngineRequest, EngineStats, pack_ids
from batchgen.engine.start import start_engine
from batchgen.errors import ConfigError, EngineError
from batchgen.models.location import resolve_model
from batchgen.outputs import RequestOutput
from batchgen.sampling_defaults import effective_params, generation_defaults
from batchgen.sampling_params import SamplingParams
from batchgen.seeds import row_seed
from batchgen.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from batchgen.jobs.runner import JobSummary
    from batchgen.jobs.spec import JobSpec

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

# Requests handed to the engine for each that can run: enough to keep it full, few enough for flat memory.
_WINDOW_PER_SEQ = 4


class LLM:
    """A model and the engine that runs it. The engine lives in a child process and dies with this one.

    Args:
        model: a folder with safetensors, a .gguf file, a hub id, or `package:NAME/FILE`.
        in_process: run the engine in this process instead (for debugging).
        **engine_args: the engine arguments of `batchgen.config`, vLLM's names.

    Raises:
        ConfigError, ModelError, CapacityError: before or while the model loads.
        EngineError: from any call, once the engine has died.
    """

    def __init__(self, model: str, *, in_process: bool = False, **engine_args: Any):
        self.config = EngineConfig.from_engine_args("LLM", model=str(model), **engine_args)
        settings = self.config.model
        self._tokenizer = _load_tokenizer(settings)
        self._engine: EngineClient = start_engine(self.config, self._tokenizer, in_process=in_process)
        self._num_requests = 0

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved to: sizes, decisions with reasons, environment."""
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt; outputs in the order of the prompts.

        A prompt is a text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`. A prompt
        that cannot be served has `error` set in its output; it never raises. Interrupting leaves the engine
        usable.

        Args:
            prompts: one prompt or many.
            sampling_params: one for all or one each; default: `get_default_sampling_params`.
            use_tqdm: show a progress bar on stderr.
            priority: one each; lower runs first under `scheduling_policy: priority`.
        """
        listed = _as_prompts(prompts)
        params = _one_each(
            sampling_params or self.get_default_sampling_params(), len(listed), "sampling_params"
        )
        order = _one_each(priority or 0, len(listed), "priority")
        requests = (
            self._request(prompt, each, rank)
            for prompt, each, rank in zip(listed, params, order, strict=True)
        )
        return self._run(requests, len(listed), use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered by the model's chat template.

        Raises:
            TemplateError: the model has no chat template, or the template refuses a conversation.
        """
        conversations = _as_conversations(messages)
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = self._tokenizer.render_chat(
                conversation,
                chat_template=chat_template,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            # The template has written the special tokens; adding them again would double the BOS.
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer | ByteTokenizer:
        """The tokenizer that prompts go through."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation_config over batchgen's defaults."""
        if self.config.model.generation_config == "none" or _is_echo(self.config.model):
            return SamplingParams()
        defaults = generation_defaults(resolve_model(self.config.model.model, self.config.model.revision))
        return effective_params({}, defaults)[0]

    def get_metrics(self) -> EngineStats:
        """A snapshot of queues, KV blocks and counters."""
        return self._engine.stats(with_block_map=True)

    def shutdown(self) -> None:
        """End the engine and free its memory."""
        self._engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _request(self, prompt: Prompt, params: SamplingParams, priority: int) -> EngineRequest:
        text, ids = self._tokenize(prompt)
        number, self._num_requests = self._num_requests, self._num_requests + 1
        seed = params.seed if params.seed is not None else row_seed(self.config.model.seed, 0, number)
        return EngineRequest(
            request_id=str(number),
            prompt_token_ids=pack_ids(ids),
            params=params,
            seed=seed,
            prompt=text,
            streams=bool(params.stop),
            priority=priority,
        )

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping):
            return None, prompt
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if ids is not None:
            return text, ids
        if text is None:
            raise ConfigError(f"a prompt mapping needs 'prompt' or 'prompt_token_ids'; got {sorted(prompt)}")
        return text, self._tokenizer.encode(text)

    def _run(self, requests: Iterator[EngineRequest], total: int, use_tqdm: bool) -> list[RequestOutput]:
        window = _WINDOW_PER_SEQ * max(1, self._engine.stats().max_num_seqs)
        done: dict[str, RequestOutput] = {}
        order: list[str] = []
        generated = 0
        with (
            self._aborting(),
            tqdm(total=total, disable=not use_tqdm, unit="prompt", dynamic_ncols=True) as bar,
        ):
            while len(done) < total:
                while len(order) < total and len(order) - len(done) < window:
                    request = next(requests)
                    order.append(request.request_id)
                    self._engine.add(request)
                for output in self._engine.poll():
                    if not output.finished:
                        continue
                    done[output.request_id] = output
                    generated += sum(len(sample.token_ids) for sample in output.outputs)
                    bar.update()
                elapsed = bar.format_dict["elapsed"]
                if elapsed:
                    bar.set_postfix_str(f"{generated / elapsed:.0f} tokens/s", refresh=False)
        return [done[request_id] for request_id in order]

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """Whatever ends a call early takes its requests out of the engine: the next call starts clean."""
        try:
            yield
        except BaseException:
            with suppress(EngineError):  # a dead engine holds no requests; the first error is the one to show
                self._engine.abort(self._engine.in_flight())
            raise


def run_job(
    job: "str | Path | Mapping[str, Any] | JobSpec",
    *,
    overrides: Sequence[str] = (),
    limit: int | None = None,
    output: str | Path | None = None,
    restart: bool = False,
    quiet: bool = False,
) -> "JobSummary":
    """Run a job to its end, or go on with it where it was: what `batchgen run` does.

    Args:
        job: path of a job file, the same as a mapping, or a JobSpec.
        overrides: "section.key=value" strings, as `--set` takes them.
        limit: stop after so many rows.
        output: the output folder, in place of the job's own.
        restart: start over, dropping what an earlier run left.
        quiet: no progress display.

    Raises:
        ConfigError, InputError: the job is wrong; nothing was loaded.
        ResumeError: the output belongs to another job, or another run holds it.
    """
    from batchgen.jobs.runner import run
    from batchgen.jobs.spec import JobSpec, load_spec

    if isinstance(job, str | Path):
        spec = load_spec(job, overrides=overrides, limit=limit, output=output)
    elif isinstance(job, Mapping):
        spec = JobSpec.from_mapping(job, overrides=overrides, limit=limit, output=output)
    else:
        spec = job.with_overrides(overrides, limit=limit, output=output)
    return run(spec, restart=restart, quiet=quiet)


def _is_echo(settings: ModelSettings) -> bool:
    return settings.model.startswith("echo:")


def _load_tokenizer(settings: ModelSettings) -> Tokenizer | ByteTokenizer:
    if _is_echo(settings):
        return ByteTokenizer()
    return load_tokenizer(
        settings.model,
        revision=settings.revision,
        tokenizer=settings.tokenizer,
        tokenizer_revision=settings.tokenizer_revision,
        chat_template=settings.chat_template,
    )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # one list of token ids
    return list(prompts)  # type: ignore[arg-type]


def _as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]  # one conversation
    return list(messages)  # type: ignore[arg-type]


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ConfigError(
            f"{name} has {len(value)} entries for {count} prompts; give one for all or one each"
        )
    return list(value)
