"""Runs -> medians and ratios to the best peer, and the table that shows them. Pure functions."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

OURS = "batchgen"


@dataclass
class Cell:
    """One engine on one case in one column, over all rounds."""

    column: str
    case: str
    engine: str
    rates: list[float] = field(default_factory=list)  # output tokens/s
    peaks_mib: list[int] = field(default_factory=list)
    load_s: float | None = None
    noisy: int = 0
    refused: str | None = None

    @property
    def rate(self) -> float | None:
        """The median; None if it never ran."""
        return statistics.median(self.rates) if self.rates else None

    def add(self, run: Mapping[str, Any], generated: int) -> None:
        """Take a line of `benchmarks.peers.child` for this case."""
        if "refused" in run:
            self.refused = str(run["refused"])
            return
        self.rates.append(generated / run["seconds"])
        self.noisy += bool(run["noisy"])
        if run["peak_mib"] is not None:
            self.peaks_mib.append(run["peak_mib"])


def best_peer(cells: Iterable[Cell]) -> Cell | None:
    """The fastest that is not batchgen, among cells of one column and case."""
    ran = [cell for cell in cells if cell.engine != OURS and cell.rate]
    return max(ran, key=lambda cell: cell.rate or 0.0, default=None)


def ratio(cells: Iterable[Cell]) -> float | None:
    """batchgen's tokens/s over the best peer's, the median of the rounds; None where either is missing."""
    some = list(cells)
    ours = next((cell for cell in some if cell.engine == OURS), None)
    best = best_peer(some)
    if ours is None or best is None:
        return None
    rounds = [one / other for one, other in zip(ours.rates, best.rates, strict=False)]
    return statistics.median(rounds) if rounds else None


def groups(cells: Iterable[Cell]) -> dict[tuple[str, str], list[Cell]]:
    """(column, case) -> its cells, in the order in which they come."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.column, cell.case), []).append(cell)
    return found


def newest(lines: Iterable[Mapping[str, Any]]) -> list[Cell]:
    """The last sitting's cells of each column and case, out of the lines of results/peers.jsonl."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        case = line["case"]
        group = found.setdefault((case["column"], case["case"]), {})
        # Ours is the first of a sitting's.
        if case["engine"] == OURS:
            group.clear()
        group[case["engine"]] = line
    cells = [
        Cell(column, case, engine, rates=list(line["rounds"]), noisy=line["noisy"])
        for (column, case), group in found.items()
        for engine, line in group.items()
    ]
    columns = list(dict.fromkeys(cell.column for cell in cells))
    # The made-up cases come behind the workloads, as in a sitting.
    return sorted(
        cells, key=lambda cell: (columns.index(cell.column), cell.case in ("single", "long"), cell.case)
    )


def table(cells: Iterable[Cell]) -> str:
    """A Markdown table: a row for each column and case, an engine each, then batchgen to the best peer.

    A star stands at a figure some of whose runs were noisy; a dash where an engine has none. Figures are
    medians of the rounds, and so are ratios: they need not divide to one another.
    """
    some = list(cells)
    engines = list(dict.fromkeys(cell.engine for cell in some))
    rows = [["output tokens/s", "case", *engines, "to the best peer"]]
    for (column, case), group in groups(some).items():
        by_engine = {cell.engine: cell for cell in group}
        times, figures = ratio(group), [_figure(by_engine.get(engine)) for engine in engines]
        rows.append([column, case, *figures, "–" if times is None else f"{times:.2f}×"])
    return _aligned(rows)


def memory_table(cells: Iterable[Cell]) -> str:
    """Load time of each engine in each column, and its peak memory: the most of any case and round."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.column, cell.engine), []).append(cell)
    rows = [["column", "engine", "peak MiB", "load s"]]
    for (column, engine), group in found.items():
        peaks = [peak for cell in group for peak in cell.peaks_mib]
        loads = [cell.load_s for cell in group if cell.load_s is not None]
        if peaks or loads:
            peak = str(max(peaks)) if peaks else "–"
            load = f"{loads[0]:.1f}" if loads else "–"
            rows.append([column, engine, peak, load])
    return _aligned(rows)


def _figure(cell: Cell | None) -> str:
    if cell is None or cell.rate is None:
        return "–"
    return f"{cell.rate:.1f}" + ("*" if cell.noisy else "")


def _aligned(rows: list[list[str]]) -> str:
    """Markdown whose columns also line up as plain text; all but the first two to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| "
        + " | ".join(
            text.ljust(width) if place < 2 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    ]
    rule = ("-" * (width + 1) + ("-" if place < 2 else ":") for place, width in enumerate(widths))
    lines.insert(1, "|" + "|".join(rule) + "|")
    return "\n".join(lines)
