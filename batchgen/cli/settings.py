"""parse_settings: what `--set KEY=VALUE` says."""

from typing import Any

from batchgen.errors import ConfigError


def parse_settings(settings: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Engine arguments and sampling parameters from KEY=VALUE texts; the values in YAML, as in a job file."""
    if not settings:
        return {}, {}
    from batchgen.jobs.yaml_file import parse_yaml

    engine: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write it as key=value")
        section, dot, key = name.strip().partition(".")
        if not dot:
            section, key = "engine", section
        if section not in ("engine", "sampling"):
            raise ConfigError(f"--set {setting}: there is engine.KEY and sampling.KEY here, not {section!r}")
        _put(
            sampling if section == "sampling" else engine,
            key,
            parse_yaml(value, f"--set {setting}").data,
            setting,
        )
    return engine, sampling


def _put(target: dict[str, Any], key: str, value: Any, setting: str) -> None:
    """Set a key, or one inside a mapping: `structured_outputs.regex`."""
    *outer, last = key.split(".")
    for name in outer:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {setting}: {name} is set to {target!r:.40} and has no keys")
    target[last] = value
