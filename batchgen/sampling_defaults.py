"""What a model's own files say of sampling, and the SamplingParams that hold in the end. No torch."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from batchgen.errors import ConfigError
from batchgen.models.end_ids import id_list
from batchgen.models.location import ModelLocation
from batchgen.sampling_params import REFUSED, SamplingParams

GENERATION_CONFIG = "generation_config"

# Names in generation_config.json -> ours. `max_length` is left out: it counts the prompt, and is mostly
# a leftover.
_TAKEN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repetition_penalty": "repetition_penalty",
}
# What a model's file may say of drawing, which a beam search does not do.
OF_DRAWING = ("temperature", "top_p", "top_k", "min_p")


def generation_defaults(location: ModelLocation) -> dict[str, Any]:
    """SamplingParams fields that the model's generation_config.json sets, under our names.

    `eos_token_id` is there too, always as a list. {} where there is no such file. `do_sample: false` without
    a temperature means temperature 0.
    """
    data = location.read_json("generation_config.json") or {}
    found = {ours: data[theirs] for theirs, ours in _TAKEN.items() if data.get(theirs) is not None}
    if data.get("do_sample") is False:
        found.setdefault("temperature", 0.0)
    if data.get("eos_token_id") is not None:
        found["eos_token_id"] = id_list(data["eos_token_id"], "generation_config.json")
    return found


def effective_params(
    given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[SamplingParams, dict[str, str]]:
    """The params that hold, and for every field where its value came from.

    Args:
        given: what the user wrote, by SamplingParams' names (`max_new_tokens` is taken for `max_tokens`).
        defaults: of `generation_defaults`; {} to leave the model's own out.

    Returns: the params, and field -> "job", "generation_config" or "default".

    Raises:
        ConfigError: a value out of range; says so when it came from the model.
    """
    values = dict(given)
    if "max_new_tokens" in values and "max_tokens" not in values:
        values["max_tokens"] = values.pop("max_new_tokens")
    origins = {spec.name: "default" for spec in fields(SamplingParams) if spec.name not in REFUSED}
    origins.pop("output_kind")
    origins |= {name: "job" for name in values if name != "output_kind"}
    own: dict[str, Any] = {}
    left_out = OF_DRAWING if values.get("use_beam_search") else ()
    for name, value in defaults.items():
        if name in values or name == "eos_token_id" or name in left_out:
            continue
        own[name] = value
        origins[name] = GENERATION_CONFIG
    if own:
        try:
            SamplingParams(**own)
        except ConfigError as error:
            raise ConfigError(
                f"the model's {GENERATION_CONFIG}.json: {error}; set it yourself, or generation_config: none"
            ) from error
    return SamplingParams.from_mapping({**own, **values}), origins
