"""draw: a QuantReport as bars, an SVG written by hand: a panel for each measure, a bar for each scheme."""

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchgen.api.eval_quant import QuantReport, SchemeReport

_COLORS = ("#8b949e", "#1f6feb", "#d29922", "#3fb950", "#8957e5", "#db61a2", "#f0883e", "#39c5cf")
_LABELS, _BARS, _FIGURES, _BAR, _TOP = 190, 430, 150, 16, 70

Measure = tuple[str, Callable[["SchemeReport"], float | None], str]
_MEASURES: tuple[Measure, ...] = (
    ("change of perplexity beside the float model", lambda each: each.change * 100, "+.2f %"),
    ("divergence from it (KL), nats a token", lambda each: each.kl, ".5f"),
    ("likeliest token is another", lambda each: 100 - each.same_top * 100, ".1f %"),
    ("weights in memory", lambda each: each.weights_mib, ".0f MiB"),
    ("most memory while loading", lambda each: each.loading_mib, ".0f MiB"),
    ("generated tokens a second, 16 prompts", lambda each: each.tokens_per_s, ".0f"),
)


def draw(report: "QuantReport") -> str:
    """An SVG. The longest bar of a panel fills its width."""
    width = _LABELS + _BARS + _FIGURES
    parts = [
        _text(16, 28, report.model, size=16, weight="bold"),
        _text(16, 48, f"{report.num_tokens} tokens of {report.data}", size=12),
    ]
    y = _TOP
    for title, value, form in _MEASURES:
        values = [value(each) for each in report.schemes]
        most = max((abs(each) for each in values if each is not None), default=0.0)
        parts.append(_text(16, y + 14, title, size=13, weight="bold"))
        y += 22
        for number, (scheme, each) in enumerate(zip(report.schemes, values, strict=True)):
            parts.append(_text(16, y + _BAR - 4, _label(scheme), size=12))
            length = 0.0 if each is None or not most else round(abs(each) / most * _BARS, 1)
            color = _COLORS[number % len(_COLORS)]
            parts.append(f'<rect x="{_LABELS}" y="{y}" width="{length}" height="{_BAR}" fill="{color}"/>')
            parts.append(_text(_LABELS + length + 6, y + _BAR - 4, _figure(each, form), size=11))
            y += _BAR + 3
        y += 14
    size = f'width="{width}" height="{y}" viewBox="0 0 {width} {y}"'
    style = 'font-family="system-ui, sans-serif" fill="#24292f"'
    back = f'<rect width="{width}" height="{y}" fill="#ffffff"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>'
    return "\n".join([head, back, *parts, "</svg>"]) + "\n"


def _label(scheme: "SchemeReport") -> str:
    name = scheme.scheme if len(scheme.scheme) <= 18 else f"…{scheme.scheme[-17:]}"
    return f"{name}, KV {scheme.kv_cache_dtype}"


def _figure(value: float | None, form: str) -> str:
    if value is None:
        return "?"
    number, _, unit = form.partition(" ")
    return f"{value:{number}}{f' {unit}' if unit else ''}"


def _text(x: float, y: float, text: str, *, size: int, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
