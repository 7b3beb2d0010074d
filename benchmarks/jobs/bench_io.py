"""Rows per second of everything around the engine, with the model `echo:`, which answers at once.

    python -m benchmarks.jobs.bench_io --rows 50000

Reading Parquet, rendering, tokenizing by bytes, committing and sealing shards, in the temporary folder.
"""

import resource
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.jobs.runner import run
from batchgen.jobs.spec import JobSpec
from benchmarks import record


def make_input(path: Path, num_rows: int) -> None:
    """A Parquet file of numbered rows of about 120 characters, in row groups of 10 000."""
    text = "A row of text, neither long nor short, such as many datasets of questions have: number {}."
    table = pa.table({"id": range(num_rows), "text": [text.format(number) for number in range(num_rows)]})
    pq.write_table(table, path, row_group_size=10_000)


def one_run(folder: Path, number: int) -> float:
    """Seconds of one job over the file, from the job file's mapping to the last sealed shard."""
    job = {
        "model": "echo:?batch=256",
        "input": {"path": "rows.parquet"},
        "prompt": {"template": "Say it again: {{ text }}"},
        "sampling": {"max_tokens": 16},
        "output": {"path": f"out-{number}"},
    }
    start = time.perf_counter()
    summary = run(JobSpec.from_mapping(job, folder), quiet=True)
    seconds = time.perf_counter() - start
    assert summary.exit_code == 0, summary
    return seconds


def main() -> None:
    parser = record.arguments(__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_input(folder / "rows.parquet", args.rows)
        rates = []
        for number in range(args.repeat):
            seconds = one_run(folder, number)
            rates.append(args.rows / seconds)
            print(f"round {number + 1}: {seconds:.2f} s, {rates[-1]:.0f} rows/s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{record.spread(rates)['median']:.0f} rows/s (median); peak memory {peak / 2**20:.0f} MiB")
    if not args.no_save:
        record.append("io", {"rows": args.rows}, {"rows_per_s": record.spread(rates), "peak_bytes": peak})


if __name__ == "__main__":
    main()
