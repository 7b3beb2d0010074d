"""Enqueueing: the methods of LLM that start prompts without waiting for them, and those about adapters."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchgen.api.batch_runner import BatchRunner
from batchgen.api.caller import Caller, chat_options, warn_of_failures
from batchgen.api.lora_names import LoRA, LoRANames
from batchgen.api.progress_bar import progress_bar
from batchgen.api.prompt_forms import Messages, Prompt, Read, one_each, read_prompts
from batchgen.engine.client import EngineClient
from batchgen.engine.messages import AdapterInfo, EngineRequest
from batchgen.lora_request import LoRARequest
from batchgen.outputs import RequestOutput
from batchgen.sampling_params import SamplingParams

Params = SamplingParams | Sequence[SamplingParams] | None


class Enqueueing:
    """What LLM has of this."""

    _caller: Caller
    _engine: EngineClient
    _runner: BatchRunner
    _lora_names: LoRANames

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        lora_request: LoRA = None,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Start prompts without waiting for them; returns their request ids.

        Raises:
            ConfigError: what `generate` raises.
        """
        return self._enqueue(read_prompts(prompts), sampling_params, lora_request, priority)

    def enqueue_chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        lora_request: LoRA = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Start conversations without waiting for their answers; returns their request ids.

        Raises:
            ConfigError, InputError, TemplateError: what `chat` raises.
        """
        options = chat_options(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        return self._enqueue(
            self._caller.render(messages, **options), sampling_params, lora_request, priority
        )

    def wait_for_completion(self, use_tqdm: bool = True) -> list[RequestOutput]:
        """The outputs of all prompts enqueued since the last time, in that order."""
        with progress_bar(self._runner.num_enqueued, use_tqdm) as bar:
            outputs = self._runner.wait(bar)
        warn_of_failures(outputs)
        return outputs

    def add_lora(self, lora_request: LoRARequest) -> AdapterInfo:
        """Check an adapter's files and let prompts name it; one of the same name is replaced.

        `generate` does it by itself for an adapter that it has not seen.

        Raises:
            ConfigError, ModelError: no such adapter, or one that does not fit this model; says why.
        """
        self._lora_names.check_enabled()
        info = self._runner.ask(self._engine.load_adapter, lora_request.lora_name, lora_request.path)
        self._lora_names.loaded(lora_request)
        return info

    def remove_lora(self, lora: LoRARequest | str | int) -> bool:
        """Forget an adapter, given by name or number; whether there was one.

        Requests in flight end with it.
        """
        name = self._lora_names.name_of(lora)
        self._lora_names.forget(name)
        return self._runner.ask(self._engine.unload_adapter, name)

    def list_loras(self) -> list[AdapterInfo]:
        """The adapters that are loaded, in that order."""
        return self._runner.ask(self._engine.adapters)

    def pin_lora(self, lora: LoRARequest | str | int) -> bool:
        """Keep an adapter in memory until it is removed; whether there is one of that name or number."""
        return self._runner.ask(self._engine.pin_adapter, self._lora_names.name_of(lora))

    def _named_loras(self, given: LoRA, count: int) -> list[LoRARequest | None]:
        """The adapter of each of so many prompts; those that are new are loaded."""
        requests = self._lora_names.read(given, count)
        for request in self._lora_names.to_load(requests):
            self.add_lora(request)
        return requests

    def _enqueue(
        self,
        prompts: Sequence[Read],
        sampling_params: Params,
        lora_request: LoRA,
        priority: Sequence[int] | None,
    ) -> list[str]:
        loras = self._named_loras(lora_request, len(prompts))
        ids = self._runner.enqueue(self._requests(prompts, sampling_params, priority, loras))
        self._runner.remember_loras(zip(ids, loras, strict=True))
        return ids

    def _requests(
        self,
        prompts: Sequence[Read],
        sampling_params: Params,
        priority: Sequence[int] | None,
        loras: Sequence[LoRARequest | None] | None = None,
    ) -> Iterator[EngineRequest]:
        """The requests of a call, checked as a whole and made one by one."""
        given = self._caller.default_params if sampling_params is None else sampling_params
        params = one_each(given, len(prompts), "sampling_params", SamplingParams)
        order = one_each(0 if priority is None else priority, len(prompts), "priority", int)
        self._caller.check(params, self._engine.info, has_priority=priority is not None)
        return (
            self._caller.request(
                prompt, each, priority=rank, adapter=None if lora is None else lora.lora_name
            )
            for prompt, each, rank, lora in zip(
                prompts, params, order, loras or [None] * len(prompts), strict=True
            )
        )
