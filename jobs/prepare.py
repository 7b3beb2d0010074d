"""PreparedJob: a job with everything opened that needs no model: tokenizer, source, parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchgen.config import EngineConfig
from batchgen.echo import EchoOptions
from batchgen.errors import ConfigError
from batchgen.jobs.adapters import check_adapters
from batchgen.jobs.columns import EXTRAS, OutputColumns
from batchgen.jobs.fingerprint import fingerprint
from batchgen.jobs.manifest import Manifest
from batchgen.jobs.prompts import PromptRenderer
from batchgen.jobs.sources import Source, open_source
from batchgen.jobs.spec import JobSpec
from batchgen.lora.adapter_facts import AdapterFacts
from batchgen.sampling_params import RequestOutputKind, SamplingParams

_ECHO = "echo:"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A checked job.

    Args:
        params: effective sampling parameters of every row; the seed comes with the row.
        origins: sampling parameter -> where its value came from.
        adapters: by name, those that rows may ask for.
        fingerprint: see fingerprint.py.
    """

    spec: JobSpec
    config: EngineConfig
    tokenizer: Any
    source: Source
    params: SamplingParams
    origins: Mapping[str, str]
    columns: OutputColumns
    adapters: Mapping[str, AdapterFacts]
    fingerprint: Mapping[str, Any]

    def renderer(self, max_model_len: int | None) -> PromptRenderer:
        """What makes prompts of rows, for a model of that length."""
        return PromptRenderer(
            self.spec.prompt,
            self.spec.sampling,
            self.source.schema,
            self.tokenizer,
            max_model_len,
            is_typed=self.source.is_typed,
            adapters=self.adapters,
        )

    def sampling_with_origins(self) -> dict[str, list[Any]]:
        """Sampling parameter -> [value, where it came from]."""
        values = self.params.to_mapping() | {"seed": self.spec.sampling.seed}
        return {name: [value, self.origins[name]] for name, value in values.items()}


def prepare(spec: JobSpec, stored: Manifest | None = None) -> PreparedJob:
    """Open and check all that can be before a model loads.

    Args:
        spec: the job.
        stored: the first run's manifest, when there was one.

    Raises:
        InputError: the source or the prompt is wrong.
        ConfigError: the model is not there, an adapter cannot be used, a sampling parameter is wrong, a
            column has a name of ours.
    """
    config = spec.engine_config()
    with spec.placing_errors("model"):
        tokenizer, model_identity, defaults = _open_model(config)
    adapters = check_adapters(spec)
    params, origins = _sampling(spec, defaults)
    with spec.placing_errors("sampling"):
        _check_grammar(params, tokenizer)
    with spec.placing_errors():
        source = open_source(spec.input, spec.base_dir, None if stored is None else stored.source)
        columns = OutputColumns(
            source.schema,
            [file.name for file in source.files],
            num_samples=params.n,
            prefix=spec.output.prefix,
            extras=extra_columns(params.to_mapping()),
        )
    prepared = PreparedJob(
        spec=spec,
        config=config,
        tokenizer=tokenizer,
        source=source,
        params=params,
        origins=origins,
        columns=columns,
        adapters=adapters,
        fingerprint=fingerprint(
            spec,
            model=model_identity,
            tokenizer=tokenizer.identity(),
            sampling=params.to_mapping(),
            adapters={name: facts.content_hash for name, facts in adapters.items()},
        ),
    )
    # Made once more when the model's length is known; this one finds what is wrong with the template.
    with spec.placing_errors():
        prepared.renderer(config.model.max_model_len)
    return prepared


def _open_model(config: EngineConfig) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """The tokenizer, the identity of the model's files, and the model's own sampling defaults."""
    settings = config.model
    if settings.model.startswith(_ECHO):
        from batchgen.byte_tokenizer import ByteTokenizer

        options = EchoOptions.parse(settings.model)
        return ByteTokenizer(), {"echo": f"fail={options.fail}"}, {}
    from batchgen.models.location import resolve_model
    from batchgen.sampling_defaults import generation_defaults
    from batchgen.tokenizer import tokenizer_of

    location = resolve_model(settings.model, settings.revision)
    tokenizer = tokenizer_of(settings)
    defaults = generation_defaults(location) if settings.generation_config == "auto" else {}
    return tokenizer, location.identity(), defaults


def _sampling(spec: JobSpec, defaults: Mapping[str, Any]) -> tuple[SamplingParams, dict[str, str]]:
    from batchgen.sampling_defaults import effective_params

    params, origins = effective_params(spec.sampling.given_params(), defaults)
    if params.n > 1 and params.is_greedy and not params.use_beam_search:
        raise ConfigError(
            f"sampling.n: {params.n} samples at temperature {params.temperature:g} "
            f"({origins['temperature']}) are {params.n} copies; raise sampling.temperature or set n: 1"
        )
    # Every row brings its seed, and only whole rows are stored.
    return replace(params, seed=None, output_kind=RequestOutputKind.FINAL_ONLY), origins


def _check_grammar(params: SamplingParams, tokenizer: Any) -> None:
    """Refuse a grammar that no row could be held to."""
    if params.structured_outputs is None:
        return
    from batchgen.structured.grammars import Grammars
    from batchgen.structured.vocabulary import Vocabulary

    reason = Grammars(Vocabulary(tokenizer, tokenizer.eos_token_ids)).refusal(params.structured_outputs)
    if reason is not None:
        raise ConfigError(f"sampling.{reason}")


def extra_columns(sampling: Mapping[str, Any]) -> list[str]:
    """Which of the output's `EXTRAS` there are, by what the sampling parameters ask for."""
    wanted = {
        "valid": ("structured_outputs",),
        "logprobs": ("logprobs", "logprob_token_ids"),
        "prompt_logprobs": ("prompt_logprobs",),
    }
    return [name for name in EXTRAS if any(sampling.get(key) is not None for key in wanted[name])]
