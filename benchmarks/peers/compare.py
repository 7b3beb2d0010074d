"""batchgen and its peers on the same requests, the same weights and the same machine, in one sitting.

    python -m benchmarks.peers.compare FOLDER --vllm PYTHON --openvino PYTHON --transformers PYTHON

FOLDER is what `benchmarks.peers.prepare` wrote. A peer takes part if its environment's interpreter is
named, here or by BATCHGEN_PEER_VLLM, _OPENVINO, _TRANSFORMERS. Every run is a process of its
own; in each round every column goes through all engines before the next begins, another engine first each
time. Greedy, end-of-text ignored, exact output counts, prefix caches cold, the machine waited for until it
is idle; loading is timed apart. Prints output tokens/s (medians) and batchgen's ratio to the best peer,
draws them, and adds lines to benchmarks/results/peers.jsonl.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.peers.cases import COLUMNS, Case, Column, make_cases
from benchmarks.peers.picture import draw
from benchmarks.peers.summary import OURS, Cell, groups, memory_table, ratio, table

PEERS = ("vllm", "openvino", "transformers")
DEFAULT_COLUMNS = "fp32,fp32-kv16,int8"


class Sitting:
    """All runs of one comparison, and what came of them."""

    def __init__(self, args: argparse.Namespace, cases: list[Case], pythons: dict[str, str], folder: Path):
        self._args, self._cases, self._pythons, self._folder = args, cases, pythons, folder
        self.cells: dict[tuple[str, str, str], Cell] = {}
        self.facts: dict[tuple[str, str], dict[str, Any]] = {}
        self.outputs: dict[tuple[str, str, str], list[list[int]]] = {}
        self._refused: set[tuple[str, str]] = set()

    def round(self, number: int, column: Column) -> None:
        """Every engine once, in an order that turns with the number."""
        engines = [engine for engine in self._pythons if engine in column.settings]
        turn = number % len(engines) if engines else 0
        for engine in engines[turn:] + engines[:turn]:
            if (column.name, engine) not in self._refused:
                self._run(column, engine)

    def _run(self, column: Column, engine: str) -> None:
        asked = self._order(column, engine)
        if engine != OURS and not Path(asked["model"]).exists():
            self._refuse(column, engine, f"no {asked['model']}; benchmarks.peers.prepare makes it")
            return
        order = self._folder / "order.json"
        order.write_text(json.dumps(asked), encoding="utf-8")
        lines, log = self._folder / "lines.jsonl", self._folder / f"{column.name}-{engine}.log"
        lines.unlink(missing_ok=True)
        with log.open("w") as output:
            command = [self._pythons[engine], "-m", "benchmarks.peers.child", str(order), str(lines)]
            done = subprocess.run(
                command,
                cwd=record.ROOT,
                env=_environment(self._pythons[engine], engine),
                stdout=output,
                stderr=output,
            )
        told = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        for line in told:
            self._take(column, engine, line)
        if done.returncode:
            self._refuse(column, engine, f"ended with {done.returncode}:\n{_last_lines(log)}")

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
        if "case" not in line:
            if "refused" in line:
                self._refuse(column, engine, line["refused"])
            else:
                facts = self.facts.setdefault((column.name, engine), {**line, "loads_s": []})
                facts["loads_s"].append(line["load_s"])
            return
        key = (column.name, line["case"], engine)
        cell = self.cells.setdefault(key, Cell(*key))
        case = next(case for case in self._cases if case.name == line["case"])
        cell.add(line, case.generated)
        if cell.refused:
            print(f"  {engine} does without {column.name} {case.name}: {cell.refused}", flush=True)
            return
        self.outputs[key] = line.pop("outputs")
        cell.loads_s = self.facts[column.name, engine]["loads_s"]
        noise = " (noisy)" if line["noisy"] else ""
        print(f"  {column.name} {case.name} {engine}: {cell.rates[-1]:.1f} tokens/s{noise}", flush=True)

    def _refuse(self, column: Column, engine: str, why: str) -> None:
        self._refused.add((column.name, engine))
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
                "load_s": record.spread(cell.loads_s),
                "equal_to_batchgen": sitting.equal_texts(cell),
                "engine_versions": facts["versions"],
                "settings": facts["settings"],
            }
            if cell.engine == OURS and times:
                measured["ratio_to_best_peer"] = round(times, 3)
            record.append("peers", about, measured)


def _environment(python: str, engine: str) -> dict[str, str]:
    """The engine's environment first on PATH; vLLM's OpenMP runtime is the one that its manual preloads."""
    bin_folder = Path(python).absolute().parent
    environment = dict(os.environ, PATH=f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}")
    openmp = bin_folder.parent / "lib" / "libiomp5.so"
    if engine == "vllm" and openmp.is_file():
        environment["LD_PRELOAD"] = str(openmp)
    return environment


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-12:])


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
    parser.add_argument(
        "--picture", type=Path, help="where the SVG goes; default: results/peers.svg if saved"
    )
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
            for number in range(args.rounds):
                print(f"round {number + 1} of {args.rounds}", flush=True)
                for column in columns:
                    sitting.round(number, column)
        except KeyboardInterrupt:
            print("interrupted: what has been measured counts")
    cells = sitting.ordered()
    print(f"\n{table(cells)}\n\n{memory_table(cells)}")
    picture = args.picture or (None if args.no_save else record.RESULTS / "peers.svg")
    if picture:
        machine = record.machine()
        picture.write_text(draw(cells, f"{machine['cpu']}, {args.threads} cores"), encoding="utf-8")
    if not args.no_save:
        save(sitting, cases, args)


if __name__ == "__main__":
    main()
