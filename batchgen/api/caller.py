"""Caller: what LLM and AsyncLLM share: the tokenizer, the parameters that hold, and prompts as requests."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any

from batchgen.api.prompt_forms import Read, read_conversations
from batchgen.byte_tokenizer import ByteTokenizer
from batchgen.config import EngineConfig
from batchgen.engine.client import EngineClient
from batchgen.engine.core_request import BadWords
from batchgen.engine.messages import EngineInfo, EngineRequest, pack_ids
from batchgen.engine.start import begin_engine, start_engine
from batchgen.errors import ConfigError, InputError
from batchgen.field_rules import is_whole, plain
from batchgen.models.location import resolve_model
from batchgen.outputs import RequestOutput, ScoreOutput
from batchgen.quantities import counted
from batchgen.sampling_checks import check_engine_limits
from batchgen.sampling_defaults import effective_params, generation_defaults
from batchgen.sampling_params import SamplingParams
from batchgen.seeds import row_seed
from batchgen.tokenizer import Tokenizer, tokenizer_of
from batchgen.tokenizer.guard import guarded

log = logging.getLogger(__name__)

# What `wake_up` may be asked for; both wake together.
_TAGS = ("weights", "kv_cache")


class Caller:
    """One model as its callers see it, without an engine. May be used by several threads at once.

    Args:
        name: of the class whose arguments they are, for messages.
        model: as `LLM` takes it.
        engine_args: the engine arguments of `batchgen.config`.
        begins: begin with the engine's process before the tokenizer is loaded; `start` or `abandon` must
            follow.

    Raises:
        ConfigError, ModelError: an argument is wrong, or the tokenizer cannot be loaded.
    """

    def __init__(self, name: str, model: str, engine_args: Mapping[str, Any], *, begins: bool = False):
        self.config = EngineConfig.from_engine_args(name, model=str(model), **engine_args)
        settings = self.config.model
        self._is_echo = settings.model.startswith("echo:")
        self._begun = begin_engine(self.config) if begins else None
        try:
            self.tokenizer: Tokenizer | ByteTokenizer = (
                ByteTokenizer() if self._is_echo else tokenizer_of(settings)
            )
        except BaseException:
            if self._begun is not None:
                self._begun.kill()
            raise
        self._bad_words = BadWords(self.tokenizer)
        self._numbers = count()

    def start(self, in_process: bool, on_loading: Callable[[str], None] | None = None) -> EngineClient:
        """Start the engine; see `start_engine`."""
        begun = {} if self._begun is None else {"begun": self._begun}
        self._begun = None
        return start_engine(
            self.config, self.tokenizer, in_process=in_process, on_loading=on_loading, **begun
        )

    def abandon(self) -> None:
        """End the process that was begun: there is nothing to `start` for."""
        if self._begun is not None:
            self._begun.kill()

    @cached_property
    def default_params(self) -> SamplingParams:
        """The model's generation_config over batchgen's defaults."""
        settings = self.config.model
        if settings.generation_config == "none" or self._is_echo:
            return SamplingParams()
        defaults = generation_defaults(resolve_model(settings.model, settings.revision))
        return effective_params({}, defaults)[0]

    def check(self, params: Iterable[SamplingParams], info: EngineInfo, has_priority: bool = False) -> None:
        """Refuse what no request can have on this engine, before any runs.

        Raises:
            ConfigError: a parameter beyond the engine's limits, a bad word without tokens, priorities that
                nobody would look at.
        """
        if has_priority and self.config.scheduler.scheduling_policy != "priority":
            raise ConfigError(
                "priority has no effect under scheduling_policy: fcfs; set scheduling_policy='priority'"
            )
        for each in {id(each): each for each in params}.values():
            check_engine_limits(each, info)
            self._bad_words.ids(each.bad_words)

    def render(self, messages: Any, **options: Any) -> list[Read]:
        """Conversations as prompts, by the model's chat template.

        Args:
            messages: one conversation or many.
            options: of `Tokenizer.render_chat`.

        Raises:
            ConfigError: something that is no conversation.
            InputError, TemplateError: the template refuses one; says which.
        """
        prompts = []
        for number, conversation in enumerate(read_conversations(messages)):
            try:
                text = self.tokenizer.render_chat(guarded(conversation, self.tokenizer.guard), **options)
            except InputError as error:
                raise type(error)(f"conversation {number}: {error}") from error
            # The template has written the special tokens; adding them again would double the BOS.
            ids = self.tokenizer.encode_guarded(text, add_special_tokens=False)
            prompts.append(Read(self.tokenizer.unguard(text), pack_ids(ids)))
        return prompts

    def request(
        self,
        prompt: Read,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        streams: bool = False,
        is_pinned: bool = False,
        adapter: str | None = None,
    ) -> EngineRequest:
        """A request to the engine; without an id of its own its running number is its id.

        Raises:
            ConfigError: an id that is no text, a priority that is no whole number.
        """
        if request_id is not None:
            check_request_id(request_id)
        if not is_whole(priority):
            raise ConfigError(f"priority must be a whole number; got {priority!r:.80}")
        packed = prompt.ids
        if packed is None:
            packed = pack_ids(self.tokenizer.encode(prompt.text or ""))
        number = next(self._numbers)
        seed = params.seed if params.seed is not None else row_seed(self.config.model.seed, 0, number)
        return EngineRequest(
            request_id=str(number) if request_id is None else plain(request_id),
            prompt_token_ids=packed,
            params=params,
            seed=seed,
            prompt=prompt.text,
            streams=streams,
            priority=plain(priority),
            cache_salt=prompt.cache_salt,
            is_pinned=is_pinned,
            adapter=adapter,
        )


def chat_options(
    chat_template: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The arguments of `chat` that are the template's, as `Caller.render` takes them."""
    return {
        **(chat_template_kwargs or {}),
        "chat_template": chat_template,
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }


def warn_of_failures(outputs: Sequence[RequestOutput | ScoreOutput]) -> None:
    """Say once for a call that some of it could not be served: an empty text alone is easily overlooked."""
    failed = [(number, output.error) for number, output in enumerate(outputs) if output.error is not None]
    if failed:
        number, error = failed[0]
        log.warning(
            "%d of %s failed (each output has its `error`); prompt %d: %s: %s",
            len(failed), counted(len(outputs), "prompt"), number, error.code, error.message,
        )  # fmt: skip


def check_request_id(request_id: object) -> None:
    """Refuse what cannot name a request.

    Raises:
        ConfigError: no text, or an empty one.
    """
    if not isinstance(request_id, str) or not request_id:
        raise ConfigError(f"a request id must be a non-empty text; got {request_id!r:.80}")


def check_level(level: int) -> None:
    """Refuse a sleep that there is not.

    Raises:
        ConfigError: another level than 1 and 2.
    """
    if level not in (1, 2):
        raise ConfigError(f"sleep level must be 1 or 2; got {level!r}")


def check_tags(tags: Sequence[str] | None) -> None:
    """Refuse to wake a part of an engine.

    Raises:
        ConfigError: other tags than all.
    """
    if tags is not None and set(tags) != set(_TAGS):
        raise ConfigError(f"wake_up wakes the engine whole; leave tags out, or give {list(_TAGS)}")
