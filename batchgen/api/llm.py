"""LLM: what a notebook or a script calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.api.batch_runner import BatchRunner
from batchgen.api.beams import beam_output, beam_params
from batchgen.api.caller import Caller, chat_options, check_level, check_tags, warn_of_failures
from batchgen.api.enqueueing import Enqueueing, Params
from batchgen.api.lora_names import LoRA, LoRANames, by_adapter
from batchgen.api.progress_bar import progress_bar
from batchgen.api.prompt_forms import Messages, Prompt, Read, read_prompt, read_prompts
from batchgen.api.scoring import make_pairs, score_pairs
from batchgen.api.stats_log import StatsLog
from batchgen.byte_tokenizer import ByteTokenizer
from batchgen.config import EngineConfig
from batchgen.engine.messages import EngineInfo, EngineStats
from batchgen.errors import ConfigError
from batchgen.foreign_names import WithoutForeignMethods
from batchgen.lora_request import LoRARequest
from batchgen.outputs import BeamSearchOutput, RequestOutput, ScoreOutput
from batchgen.sampling_params import BeamSearchParams, SamplingParams
from batchgen.tokenizer import Tokenizer


class LLM(Enqueueing, WithoutForeignMethods):
    """A model and the engine that runs it. The engine lives in a child process and dies with this one.

    May be used from several threads, and inside a running event loop: calls run one after the other.

    Args:
        model: a folder with safetensors, a .gguf file, a hub id, or `package:NAME/FILE`.
        in_process: run the engine in this process instead (for debugging).
        **engine_args: the engine arguments of `batchgen.config`, vLLM's names.

    Raises:
        ConfigError, ModelError, CapacityError: before or while the model loads.
        EngineError: from any call, once the engine has died; `in_flight` then says what it was at.
    """

    def __init__(self, model: str, *, in_process: bool = False, **engine_args: Any):
        self._caller = Caller("LLM", model, engine_args, begins=not in_process)
        self._engine = self._caller.start(in_process)
        self._runner = BatchRunner(self._engine, StatsLog(self.config.model.disable_log_stats))
        self._lora_names = LoRANames(self.config.lora.enable_lora)

    @property
    def config(self) -> EngineConfig:
        """The engine arguments as they were given."""
        return self._caller.config

    @property
    def info(self) -> EngineInfo:
        """What the engine resolved to: sizes, decisions with reasons, environment."""
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: LoRA = None,
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
            lora_request: an adapter for all or one each, None among these for the base model. Needs
                `enable_lora: true`; those that were not seen before are loaded first.
            priority: one each; lower runs first. Needs `scheduling_policy: priority`.

        Raises:
            ConfigError: something that is no prompt or no SamplingParams, or more than the engine can give,
                before any prompt runs.
            ConfigError, ModelError: an adapter that does not fit the model; see `add_lora`.
        """
        return self._generate(read_prompts(prompts), sampling_params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        lora_request: LoRA = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered by the model's chat template.

        Text such as "<|im_end|>" inside a message stays text; only the template writes control tokens.
        `tools` are given to the template, which says how they are shown.

        Raises:
            ConfigError: something that is no conversation; what `generate` raises.
            InputError, TemplateError: the model has no chat template, or the template refuses a conversation;
                says which.
        """
        options = chat_options(
            chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs
        )
        read = self._caller.render(messages, **options)
        return self._generate(read, sampling_params, use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        lora_request: LoRA = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best sequences for each prompt, found inside the engine.

        Raises:
            ConfigError: something that is no prompt or no BeamSearchParams.
        """
        if not isinstance(params, BeamSearchParams):
            raise ConfigError(f"params must be BeamSearchParams; got {params!r:.80}")
        read = read_prompts(prompts)
        outputs = self._generate(read, beam_params(params), use_tqdm, lora_request=lora_request)
        tokenizer, ends = self._caller.tokenizer, self.info.eos_token_ids
        return [beam_output(output, params, tokenizer, ends) for output in outputs]

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoreOutput]:
        """How likely the model finds each continuation of its prompt; outputs in the order of continuations.

        A prompt that several continuations share is computed once and read from the prefix cache after that.

        Args:
            prompts: one for all continuations, or one each.
            continuations: texts or token ids.
            use_tqdm: show a progress bar on stderr.
            lora_request: the adapter to compute with.

        Raises:
            ConfigError: another number of prompts than continuations, or one without tokens.
        """
        pairs = make_pairs(read_prompts(prompts), read_prompts(continuations), self._caller.tokenizer.encode)
        loras = self._named_loras(lora_request, 1)
        with progress_bar(len(pairs), use_tqdm, "score") as bar:

            def run(prompts: Sequence[Read], params: Sequence[SamplingParams]) -> list[RequestOutput]:
                requests = self._requests(prompts, params, None, loras * len(prompts))
                return self._runner.run(requests, len(prompts), bar)

            scores = score_pairs(pairs, run)
        warn_of_failures(scores)
        return scores

    def get_tokenizer(self) -> Tokenizer | ByteTokenizer:
        """The tokenizer that prompts go through."""
        return self._caller.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation_config over batchgen's defaults."""
        return self._caller.default_params

    def get_metrics(self) -> EngineStats:
        """A snapshot of queues, KV blocks and counters.

        While another thread generates it is at most half a second or a step old, and has no block map.
        """
        return self._runner.stats()

    def in_flight(self) -> list[str]:
        """Ids of the requests not finished; after the engine's death those that it died with."""
        return self._engine.in_flight()

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`. What was enqueued waits, and loses nothing but time.

        Args:
            level: 1 drops the KV cache and, on a GPU, moves the weights to host memory; 2 drops both, and
                waking loads the model anew.

        Raises:
            ConfigError: another level.
        """
        check_level(level)
        self._runner.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Be ready again after `sleep`; nothing is cached then. Does nothing when awake.

        Raises:
            ConfigError: tags for a part of the engine; it wakes whole.
        """
        check_tags(tags)
        self._runner.wake_up()

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        return self._runner.is_asleep

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks and end all pins; requests that run keep what they use."""
        return self._runner.ask(self._engine.reset_prefix_cache)

    def pin_prefix(self, prompt: Prompt, lora_request: LoRARequest | None = None) -> str:
        """Keep the full blocks of a prompt in the prefix cache; returns the pin's id, for `unpin_prefix`.

        Pinned blocks yield only when nothing else could run. They serve prompts with the same adapter.

        Raises:
            ConfigError: no prompt, or one that cannot be served; says why.
        """
        (lora,) = self._named_loras(lora_request, 1)
        request = self._caller.request(
            read_prompt(prompt),
            SamplingParams(temperature=0, max_tokens=1),
            is_pinned=True,
            adapter=None if lora is None else lora.lora_name,
        )
        with progress_bar(1, False) as bar:
            (output,) = self._runner.run(iter([request]), 1, bar)
        if output.error is not None:
            raise ConfigError(f"the prompt cannot be pinned: {output.error.message}")
        return request.request_id

    def unpin_prefix(self, pin: str) -> bool:
        """Let a pinned prefix go; False if it had yielded or is unknown."""
        return self._runner.ask(self._engine.unpin_prefix, pin)

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
        sampling_params: Params,
        use_tqdm: bool,
        priority: Sequence[int] | None = None,
        lora_request: LoRA = None,
    ) -> list[RequestOutput]:
        loras = self._named_loras(lora_request, len(prompts))
        requests = self._requests(prompts, sampling_params, priority, loras)
        order = by_adapter(loras, self.config.lora.max_loras)
        is_in_order = all(place == number for place, number in enumerate(order))
        if not is_in_order:
            # Made in their own order, which their seeds come from.
            made = list(requests)
            requests = iter([made[number] for number in order])
        with progress_bar(len(prompts), use_tqdm) as bar:
            outputs = self._runner.run(requests, len(prompts), bar)
        if not is_in_order:
            outputs = [
                output for _, output in sorted(zip(order, outputs, strict=True), key=lambda pair: pair[0])
            ]
        for output, lora in zip(outputs, loras, strict=True):
            output.tell_lora(lora)
        warn_of_failures(outputs)
        return outputs
