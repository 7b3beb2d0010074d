"""batchgen and its peers on the same requests, the same weights and the same machine, in one sitting.

    python -m benchmarks.peers.compare FOLDER --vllm PYTHON --openvino PYTHON --transformers PYTHON

FOLDER is what `benchmarks.peers.prepare` wrote. A peer takes part if its environment's interpreter is
named, here or by BATCHGEN_PEER_VLLM, _OPENVINO, _TRANSFORMERS. The engines of a column are loaded side by
side, each in a process of its own, and take turns: every case of every round goes through all of them, one
after the other, another first each time, so that a machine that changes its pace does so for all. Greedy,
end-of-text ignored, exact output counts, prefix caches cold, the machine waited for until it is idle; loading
is timed apart. Prints output tokens/s (medians) and batchgen's ratio to the best peer (the median of the
rounds' ratios), adds lines to benchmarks/results/peers.jsonl, and draws what stands there of each column and
case since its last sitting.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.peers.cases import COLUMNS, Case, Column, make_cases
from benchmarks.peers.loaded import Ended, Loaded
from benchmarks.peers.picture import draw
from benchmarks.peers.summary import OURS, Cell, groups, memory_table, newest, ratio, table

PEERS = ("vllm", "openvino", "transformers")
DEFAULT_COLUMNS = "fp32,fp32-kv16,int8"


class Sitting:
    """All runs of one comparison, and what came of them."""

    def __init__(self, args: argparse.Namespace, cases: list[Case], pythons: dict[str, str], folder: Path):
        self._args, self._cases, self._pythons, self._folder = args, cases, pythons, folder
        self.cells: dict[tuple[str, str, str], Cell] = {}
        self.facts: dict[tuple[str, str], dict[str, Any]] = {}  # what loading came to
        self.outputs: dict[tuple[str, str, str], list[list[int]]] = {}

    def run(self, column: Column, rounds: int) -> None:
        """Every engine loaded, then every case by each in turn, so often."""
        loaded: dict[str, Loaded] = {}
        try:
            for engine in self._pythons:
                if engine in column.settings:
                    self._load(column, engine, loaded)
                else:
                    print(f"{column.name}: {engine} has nothing of the kind and is left out", flush=True)
            for number in range(rounds):
                print(f"{column.name}, round {number + 1} of {rounds}", flush=True)
                for place, case in enumerate(self._cases):
                    engines = list(loaded)
                    turn = (number + place) % len(engines) if engines else 0
                    for engine in engines[turn:] + engines[:turn]:
                        self._ask(column, engine, case.name, loaded)
        finally:
            for process in loaded.values():
                process.close()

    def _load(self, column: Column, engine: str, loaded: dict[str, Loaded]) -> None:
        asked = self._order(column, engine)
        if engine != OURS and not Path(asked["model"]).exists():
            self._refuse(column, engine, f"no {asked['model']}; benchmarks.peers.prepare makes it")
            return
        process = Loaded(self._pythons[engine], asked, self._folder, f"{column.name}-{engine}")
        loaded[engine] = process
        try:
            told = process.answer()
        except Ended as end:
            told = {"refused": str(end)}
        if "refused" in told:
            self._refuse(column, engine, told["refused"])
            loaded.pop(engine).close()
            return
        self.facts[column.name, engine] = told

    def _ask(self, column: Column, engine: str, case: str, loaded: dict[str, Loaded]) -> None:
        try:
            self._take(column, engine, loaded[engine].run(case))
        except Ended as end:
            self._refuse(column, engine, str(end))
            loaded.pop(engine).close()

    def _order(self, column: Column, engine: str) -> dict[str, Any]:
        settings, args = dict(column.settings[engine]), self._args
        model = str(args.folder / settings.pop("model", "hf"))
        return {
            "engine": engine,
            "settings": settings,
            "model": args.model if engine == OURS and args.model else model,
            "cases": [case.plain() for case in self._cases],
            "threads": args.threads,
            "kv_gib": args.kv_gib,
            "max_num_seqs": args.max_num_seqs,
            "idle_limit_s": args.idle_limit,
            "transformers_batch_size": args.transformers_batch_size,
            "openvino_batch_tokens": args.openvino_batch_tokens,
        }

    def _take(self, column: Column, engine: str, line: dict[str, Any]) -> None:
        key = (column.name, line["case"], engine)
        cell = self.cells.setdefault(key, Cell(*key))
        case = next(case for case in self._cases if case.name == line["case"])
        cell.add(line, case.generated)
        if cell.refused:
            print(f"  {engine} does without {column.name} {case.name}: {cell.refused}", flush=True)
            return
        self.outputs[key] = line.pop("outputs")
        cell.load_s = self.facts[column.name, engine]["load_s"]
        noise = " (noisy)" if line["noisy"] else ""
        print(f"  {column.name} {case.name} {engine}: {cell.rates[-1]:.1f} tokens/s{noise}", flush=True)

    def _refuse(self, column: Column, engine: str, why: str) -> None:
        print(f"  {engine} does without {column.name}: {why}", flush=True)

    def ordered(self) -> list[Cell]:
        """The cells by column and case, engines in their usual order."""
        columns, cases = list(COLUMNS), [case.name for case in self._cases]
        engines = [OURS, *PEERS]

        def place(cell: Cell) -> tuple[int, int, int]:
            return columns.index(cell.column), cases.index(cell.case), engines.index(cell.engine)

        return sorted(self.cells.values(), key=place)

    def equal_texts(self, cell: Cell) -> int | None:
        """How many outputs of the last round are batchgen's to the last token."""
        ours = self.outputs.get((cell.column, cell.case, OURS))
        theirs = self.outputs.get((cell.column, cell.case, cell.engine))
        return sum(a == b for a, b in zip(ours, theirs, strict=True)) if ours and theirs else None


def save(sitting: Sitting, cases: list[Case], args: argparse.Namespace) -> None:
    """A line for each cell that ran."""
    by_name = {case.name: case for case in cases}
    model = (args.folder / "model.txt").read_text(encoding="utf-8").strip()
    for group in groups(sitting.ordered()).values():
        times = ratio(group)
        for cell in group:
            if not cell.rates:
                continue
            case, facts = by_name[cell.case], sitting.facts[cell.column, cell.engine]
            about = {"model": model, "column": cell.column, "case": cell.case, "engine": cell.engine}
            about |= {"n": len(case.requests), "generated": case.generated}
            about |= {"threads": args.threads, "kv_gib": args.kv_gib}
            measured = {
                "tokens_per_s": record.spread(cell.rates),
                "rounds": [round(rate, 2) for rate in cell.rates],
                "noisy": cell.noisy,
                "peak_mib": max(cell.peaks_mib, default=None),
                "load_s": cell.load_s,
                "equal_to_batchgen": sitting.equal_texts(cell),
                "engine_versions": facts["versions"],
                "settings": facts["settings"],
            }
            if cell.engine == OURS and times:
                measured["ratio_to_best_peer"] = round(times, 3)
            record.append("peers", about, measured)


def _arguments() -> argparse.Namespace:
    parser = record.arguments(__doc__)
    parser.add_argument("folder", type=Path, help="what benchmarks.peers.prepare wrote")
    for peer in PEERS:
        variable = "BATCHGEN_PEER_" + peer.upper()
        parser.add_argument(f"--{peer}", metavar="PYTHON", default=os.environ.get(variable))
    parser.add_argument("--model", help="another model for batchgen than FOLDER/hf")
    parser.add_argument("--columns", default=DEFAULT_COLUMNS, help=f"of {', '.join(COLUMNS)}")
    parser.add_argument("--cases", default="all", help="the workloads' names, single, long; or all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, help="only the first N requests of each case")
    parser.add_argument("--threads", type=int, default=record.machine()["cores"])
    parser.add_argument("--kv-gib", type=int, default=6, help="memory for KV blocks, the same for all")
    parser.add_argument("--max-num-seqs", type=int, help="default: each engine's own")
    parser.add_argument("--idle-limit", type=float, default=60, help="seconds to wait for an idle machine")
    parser.add_argument("--transformers-batch-size", type=int, default=32)
    parser.add_argument("--openvino-batch-tokens", type=int, default=512)
    parser.add_argument("--picture", type=Path, help="where an SVG of this sitting goes")
    return parser.parse_args()


def main() -> None:
    args = _arguments()
    args.folder = args.folder.absolute()
    config = json.loads((args.folder / "hf" / "config.json").read_text(encoding="utf-8"))
    cases = make_cases(args.cases, args.limit, config["vocab_size"])
    columns = [COLUMNS[name] for name in args.columns.split(",")]
    named = {peer: getattr(args, peer) for peer in PEERS}
    pythons = {OURS: sys.executable} | {peer: python for peer, python in named.items() if python}
    if len(pythons) == 1:
        print("no peer's environment is named: batchgen runs alone")
    # A shell lets what it starts in the background ignore an interrupt; what has been measured would be lost.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        sitting = Sitting(args, cases, pythons, Path(folder))
        try:
            for column in columns:
                sitting.run(column, args.rounds)
        except KeyboardInterrupt:
            print("interrupted: what has been measured counts")
    cells = sitting.ordered()
    print(f"\n{table(cells)}\n\nFigures and ratios are medians of the rounds, each by itself.\n")
    print(memory_table(cells))
    title = f"{record.machine()['cpu']}, {args.threads} cores"
    if args.picture:
        args.picture.write_text(draw(cells, title), encoding="utf-8")
    if not args.no_save:
        save(sitting, cases, args)
        lines = (record.RESULTS / "peers.jsonl").read_text(encoding="utf-8").splitlines()
        drawn = draw(newest(map(json.loads, lines)), title)
        (record.RESULTS / "peers.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
