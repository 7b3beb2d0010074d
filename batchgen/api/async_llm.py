"""AsyncLLM: a model for code that runs in an event loop: outputs as they come, many requests at once."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from batchgen.api.caller import Caller, chat_options, check_level, check_request_id, check_tags
from batchgen.api.engine_thread import EngineThread
from batchgen.api.lora_names import LoRANames
from batchgen.api.output_stream import OutputStream
from batchgen.api.prompt_forms import Messages, Prompt, Read, read_prompt
from batchgen.api.stats_log import StatsLog
from batchgen.byte_tokenizer import ByteTokenizer
from batchgen.config import EngineConfig
from batchgen.engine.messages import AdapterInfo, EngineInfo, EngineRequest, EngineStats
from batchgen.errors import ConfigError, EngineError
from batchgen.foreign_names import ASYNC_METHODS, WithoutForeignMethods
from batchgen.lora_request import LoRARequest
from batchgen.outputs import RequestOutput
from batchgen.sampling_params import RequestOutputKind, SamplingParams
from batchgen.tokenizer import Tokenizer

# A longer text is encoded in a thread of its own: the loop has others to serve.
_LONG_TEXT = 4096


class AsyncLLM(WithoutForeignMethods):
    """A model and the engine that runs it, for event loops: one thread talks to the engine, no loop waits.

    `AsyncLLM(...)` waits until the model is loaded; `await AsyncLLM.start(...)` lets the loop go on. Serves
    any number of event loops and threads.

    Args:
        model: as `LLM` takes it.
        in_process: run the engine in this process instead of in a child (for debugging).
        **engine_args: the engine arguments of `batchgen.config`, vLLM's names.

    Raises:
        ConfigError, ModelError, CapacityError: before or while the model loads.
        EngineError: in everyone who waits, once the engine has died; `in_flight` then says who that was.
    """

    _not_offered = ASYNC_METHODS

    def __init__(self, model: str, *, in_process: bool = False, **engine_args: Any):
        self._caller = Caller("AsyncLLM", model, engine_args, begins=not in_process)
        client = self._caller.start(in_process)
        self._info = client.info
        self._thread = EngineThread(client, StatsLog(self.config.model.disable_log_stats))
        # The engine goes with this object; the thread holds no reference to it.
        self._finalizer = weakref.finalize(self, self._thread.shutdown, 0.0)
        self._is_asleep = False
        self._lora_names = LoRANames(self.config.lora.enable_lora)
        self._loading: dict[tuple[str, str], Future[AdapterInfo]] = {}

    @classmethod
    async def start(cls, model: str, *, in_process: bool = False, **engine_args: Any) -> Self:
        """Load a model while the event loop goes on."""
        return await asyncio.to_thread(cls, model, in_process=in_process, **engine_args)

    @property
    def config(self) -> EngineConfig:
        """The engine arguments as they were given."""
        return self._caller.config

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved to: sizes, decisions with reasons, environment."""
        return self._info

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one prompt as they come, by `sampling_params.output_kind`; the last is `finished`.

        Leaving the loop early, cancelling the task, or closing the generator aborts the request. A reader
        that is slower than the engine gets several steps in one output and loses nothing.

        Args:
            prompt: a text, token ids, or a mapping with `prompt` or `prompt_token_ids`.
            sampling_params: default: `get_default_sampling_params`.
            request_id: unique among those in flight, for `abort`; default: a running number.
            lora_request: an adapter; needs `enable_lora: true`. One that was not seen before is loaded first.
            priority: lower runs first. Needs `scheduling_policy: priority`.

        Raises:
            ConfigError: no prompt, or parameters that the engine cannot follow; nothing has run.
            ConfigError, ModelError: an adapter that does not fit the model; see `add_lora`.
            EngineError: the engine died or was shut down, it sleeps, or the id is in flight.
        """
        read = read_prompt(prompt)
        is_long = read.ids is None and len(read.text or "") > _LONG_TEXT
        return self._run(lambda: read, is_long, sampling_params, request_id, priority, lora_request)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer to one conversation as it comes; see `LLM.chat` and `generate`.

        Raises:
            ConfigError, InputError, TemplateError, EngineError: as these do.
        """
        options = chat_options(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )

        def render() -> Read:
            prompts = self._caller.render(messages, **options)
            if len(prompts) != 1:
                raise ConfigError(f"chat takes one conversation at a time; got {len(prompts)}")
            return prompts[0]

        return self._run(render, True, sampling_params, request_id, priority, lora_request)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Drop requests: their generators end with what there is, `finish_reason` "abort".

        Unknown and finished ids are ignored.

        Raises:
            ConfigError: an id that is no text.
        """
        is_one = isinstance(request_id, str) or not isinstance(request_id, Iterable)
        ids: list[Any] = [request_id] if is_one else list(request_id)
        for each in ids:
            check_request_id(each)
        await asyncio.wrap_future(self._thread.abort_ids(ids))

    async def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`; what is in flight waits, and loses nothing but time."""
        check_level(level)
        await asyncio.wrap_future(self._thread.ask(lambda client: client.sleep(level)))
        self._is_asleep = True

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Be ready again after `sleep`; does nothing when awake."""
        check_tags(tags)
        if self._is_asleep:
            await asyncio.wrap_future(self._thread.ask(lambda client: client.wake_up()))
            self._is_asleep = False

    async def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        return self._is_asleep

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; requests that run keep what they use."""
        return await asyncio.wrap_future(self._thread.ask(lambda client: client.reset_prefix_cache()))

    async def add_lora(self, lora_request: LoRARequest) -> AdapterInfo:
        """Check an adapter's files and let prompts name it; see `LLM.add_lora`."""
        self._lora_names.check_enabled()
        name, path = lora_request.lora_name, lora_request.path
        info = await asyncio.wrap_future(self._thread.ask(lambda client: client.load_adapter(name, path)))
        self._lora_names.loaded(lora_request)
        return info

    async def remove_lora(self, lora: LoRARequest | str | int) -> bool:
        """Forget an adapter, given by name or number; requests in flight end with it."""
        name = self._lora_names.name_of(lora)
        self._lora_names.forget(name)
        return await asyncio.wrap_future(self._thread.ask(lambda client: client.unload_adapter(name)))

    async def list_loras(self) -> list[AdapterInfo]:
        """The adapters that are loaded, in that order."""
        return await asyncio.wrap_future(self._thread.ask(lambda client: client.adapters()))

    async def pin_lora(self, lora: LoRARequest | str | int) -> bool:
        """Keep an adapter in memory until it is removed; whether there is one."""
        name = self._lora_names.name_of(lora)
        return await asyncio.wrap_future(self._thread.ask(lambda client: client.pin_adapter(name)))

    async def get_metrics(self) -> EngineStats:
        """A snapshot of queues, KV blocks and counters."""
        return await asyncio.wrap_future(self._thread.ask(lambda client: client.stats(with_block_map=True)))

    def get_tokenizer(self) -> Tokenizer | ByteTokenizer:
        """The tokenizer that prompts go through."""
        return self._caller.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation_config over batchgen's defaults."""
        return self._caller.default_params

    def in_flight(self) -> list[str]:
        """Ids of the requests not finished; after the engine's death those that it died with."""
        return self._thread.in_flight()

    def shutdown(self) -> None:
        """End the engine and free its memory; whoever still waits gets an EngineError."""
        self._finalizer.detach()
        self._thread.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _load_once(self, lora: LoRARequest) -> None:
        """Have an adapter loaded, unless another task is just having that done."""
        key = lora.lora_name, lora.path
        loading = self._loading.get(key)
        if loading is None:
            loading = self._thread.ask(lambda client: client.load_adapter(*key))
            self._loading[key] = loading
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
        # Whoever gives up waiting must not take it from the others.
        await asyncio.shield(asyncio.wrap_future(loading))
        self._lora_names.loaded(lora)

    async def _run(
        self,
        read: Callable[[], Read],
        is_slow: bool,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int | None,
        lora_request: LoRARequest | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """One request from its prompt to its end; a slow `read` goes into a thread."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"sampling_params must be SamplingParams; got {params!r:.80}")
        self._caller.check([params], self._info, has_priority=priority is not None)
        if self._is_asleep:
            raise EngineError("the engine sleeps; call wake_up() first")
        (lora,) = self._lora_names.read(lora_request, 1)
        for missing in self._lora_names.to_load([lora]):
            await self._load_once(missing)

        def make() -> EngineRequest:
            return self._caller.request(
                read(),
                params,
                request_id=request_id,
                priority=priority or 0,
                streams=params.output_kind is not RequestOutputKind.FINAL_ONLY,
                adapter=None if lora is None else lora.lora_name,
            )

        request = await asyncio.to_thread(make) if is_slow else make()
        stream = OutputStream(request.request_id, params, asyncio.get_running_loop())
        self._thread.add(request, stream)
        is_over = False
        try:
            while not is_over:
                output = await stream.next()
                is_over = output.finished
                output.tell_lora(lora)
                yield output
        finally:
            if not is_over:
                self._thread.abort(stream)
