"""The medians as bars, an SVG written by hand: a panel for each column, a group of bars for each case."""

from collections.abc import Iterable
from html import escape

from benchmarks.peers.summary import OURS, Cell, groups, ratio

_COLORS = ("#1f6feb", "#d29922", "#8957e5", "#3fb950", "#8b949e")
_BAR, _GAP, _LEFT, _PANEL, _TOP = 16, 22, 150, 70, 56
_WIDTH, _LABELS = 860, 190


def draw(cells: Iterable[Cell], title: str) -> str:
    """An SVG. The longest bar of a group fills the width: cases differ by a hundred times in tokens/s."""
    shown = [cell for cell in cells if cell.rate]
    engines = sorted({cell.engine for cell in shown}, key=lambda name: (name != OURS, name))
    color = {engine: _COLORS[place % len(_COLORS)] for place, engine in enumerate(engines)}
    parts = [_text(16, 26, title, size=16, weight="bold"), *_legend(engines, color)]
    y, column_before = _TOP, None
    for (column, case), group in groups(shown).items():
        if column != column_before:
            y += _PANEL - _GAP
            parts.append(_text(16, y, f"{column}: output tokens/s", size=14, weight="bold"))
            y += 12
            column_before = column
        times = ratio(group)
        label = case + (f"  {times:.2f}× best peer" if times else "")
        parts.append(_text(16, y + _BAR - 3, label, size=12))
        most = max(cell.rate or 0.0 for cell in group)
        for cell in sorted(group, key=lambda cell: engines.index(cell.engine)):
            parts += _bar(cell, y, most, color[cell.engine])
            y += _BAR + 2
        y += _GAP - 8
    size = f'width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}"'
    style = 'font-family="system-ui, sans-serif" fill="#24292f"'
    back = f'<rect width="{_WIDTH}" height="{y}" fill="#ffffff"/>'
    return (
        "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', back, *parts, "</svg>"]) + "\n"
    )


def _bar(cell: Cell, y: int, most: float, color: str) -> list[str]:
    rate = cell.rate or 0.0
    width = round(rate / most * (_WIDTH - _LABELS - _LEFT - 60), 1)
    figure = f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"
    return [
        f'<rect x="{_LABELS}" y="{y}" width="{width}" height="{_BAR}" fill="{color}"/>',
        _text(_LABELS + width + 6, y + _BAR - 4, f"{figure} {cell.engine}", size=11),
    ]


def _legend(engines: list[str], color: dict[str, str]) -> list[str]:
    parts, x = [], 16
    for engine in engines:
        parts.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{color[engine]}"/>')
        parts.append(_text(x + 18, 49, engine, size=12))
        x += 40 + 8 * len(engine)
    return parts


def _text(x: float, y: float, text: str, *, size: int, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'
