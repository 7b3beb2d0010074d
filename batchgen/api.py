"""What a notebook or a script calls: LLM (generate, chat) and run_job."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from batchgen.byte_tokenizer import ByteTokenizer
from batchgen.config import EngineConfig, ModelSettings
from batchgen.engine.client import EngineClient
from batchgen.engine.messages import EngineInfo, EngineRequest, EngineStats, pack_ids
from batchgen.engine.start import start_engine
from batchgen.errors import EngineError, InputError
from batchgen.models.location import resolve_model
from batchgen.outputs import RequestOutput
from batchgen.prompt_forms import Messages, Prompt, Read, one_each, read_conversations, read_prompts
from batchgen.sampling_defaults import effective_params, generation_defaults
from batchgen.sampling_params import SamplingParams
from batchgen.seeds import row_seed
from batchgen.tokenizer import Tokenizer, tokenizer_of

if TYPE_CHECKING:
    from batchgen.jobs.runner import JobSummary
    from batchgen.jobs.spec import JobSpec

# Requests handed to the engine for each that can run: enough to keep it full, few enough for flat memory.
_WINDOW_PER_SEQ = 4
# How old the numbers may be that another thread sees while one generates.
_STATS_S = 0.5


class LLM:
    """A model and the engine that runs it. The engine lives in a child process and dies with this one.

    May be used from several threads: calls of `generate` and `chat` run one after the other.

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
        self._is_busy = threading.Lock()
        self._newest_stats = self._engine.stats()

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
        usable. Outputs come whole, whatever `output_kind` says.

        Args:
            prompts: one prompt or many.
            sampling_params: one for all or one each; default: `get_default_sampling_params`.
            use_tqdm: show a progress bar on stderr.
            priority: one each; lower runs first under `scheduling_policy: priority`.

        Raises:
            ConfigError: something that is no prompt or no SamplingParams, before any prompt runs.
        """
        return self._generate(read_prompts(prompts), sampling_params, use_tqdm, priority)

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

        Text such as "<|im_end|>" inside a message stays text; only the template writes control tokens.

        Raises:
            ConfigError: something that is no conversation.
            InputError, TemplateError: the model has no chat template, or the template refuses a conversation;
                says which.
        """
        prompts: list[Read] = []
        for number, conversation in enumerate(read_conversations(messages)):
            try:
                text = self._tokenizer.render_chat(
                    _guarded(conversation, self._tokenizer.guard),
                    chat_template=chat_template,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **(chat_template_kwargs or {}),
                )
            except InputError as error:
                raise type(error)(f"conversation {number}: {error}") from error
            # The template has written the special tokens; adding them again would double the BOS.
            ids = self._tokenizer.encode_guarded(text, add_special_tokens=False)
            prompts.append((self._tokenizer.unguard(text), pack_ids(ids)))
        return self._generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer | ByteTokenizer:
        """The tokenizer that prompts go through."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation_config over batchgen's defaults."""
        return self._default_params

    @cached_property
    def _default_params(self) -> SamplingParams:
        if self.config.model.generation_config == "none" or _is_echo(self.config.model):
            return SamplingParams()
        defaults = generation_defaults(resolve_model(self.config.model.model, self.config.model.revision))
        return effective_params({}, defaults)[0]

    def get_metrics(self) -> EngineStats:
        """A snapshot of queues, KV blocks and counters.

        While another thread generates it is at most half a second or a step old, and has no block map.
        """
        if not self._is_busy.acquire(blocking=False):
            return self._newest_stats
        try:
            return self._engine.stats(with_block_map=True)
        finally:
            self._is_busy.release()

    def shutdown(self) -> None:
        """End the engine and free its memory."""
        self._engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _generate(
        self,
        prompts: Sequence[Read],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = one_each(given, len(prompts), "sampling_params", SamplingParams)
        order = one_each(0 if priority is None else priority, len(prompts), "priority", int)
        requests = map(self._request, prompts, params, order)
        with self._is_busy:
            return self._run(requests, len(prompts), use_tqdm)

    def _request(self, prompt: Read, params: SamplingParams, priority: int) -> EngineRequest:
        text, packed = prompt
        if packed is None:
            packed = pack_ids(self._tokenizer.encode(text or ""))
        number, self._num_requests = self._num_requests, self._num_requests + 1
        seed = params.seed if params.seed is not None else row_seed(self.config.model.seed, 0, number)
        return EngineRequest(
            request_id=str(number),
            prompt_token_ids=packed,
            params=params,
            seed=seed,
            prompt=text,
            streams=False,
            priority=priority,
        )

    def _run(self, requests: Iterator[EngineRequest], total: int, use_tqdm: bool) -> list[RequestOutput]:
        window = _WINDOW_PER_SEQ * max(1, self._engine.stats().max_num_seqs)
        outputs: dict[str, RequestOutput | None] = {}  # in the order of the prompts
        num_done = generated = 0
        with (
            self._aborting(),
            tqdm(total=total, disable=not use_tqdm, unit="prompt", dynamic_ncols=True) as bar,
        ):
            while num_done < total:
                while len(outputs) < total and len(outputs) - num_done < window:
                    request = next(requests)
                    outputs[request.request_id] = None
                    self._engine.add(request)
                for output in self._engine.poll(_STATS_S):
                    # An interrupted call may have left a finished one behind.
                    if not output.finished or output.request_id not in outputs:
                        continue
                    outputs[output.request_id] = output
                    num_done += 1
                    generated += sum(len(sample.token_ids) for sample in output.outputs)
                    bar.update()
                self._newest_stats = self._engine.stats()
                elapsed = bar.format_dict["elapsed"]
                if elapsed:
                    bar.set_postfix_str(f"{generated / elapsed:.0f} tokens/s", refresh=False)
        return [output for output in outputs.values() if output is not None]

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
    return ByteTokenizer() if _is_echo(settings) else tokenizer_of(settings)


def _guarded(value: Any, guard: Callable[[str], str]) -> Any:
    """A conversation whose texts are marked as data."""
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {key: _guarded(each, guard) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_guarded(each, guard) for each in value]
    return value
