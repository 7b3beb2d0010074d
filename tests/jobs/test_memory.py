"""Memory does not grow with the number of rows."""

import subprocess
import sys
from pathlib import Path

import pytest

CEILING_MB = 300

RUN = """
import re
from pathlib import Path
from batchgen.jobs.runner import run
from batchgen.jobs.spec import JobSpec
summary = run(JobSpec.from_mapping({
    "model": "echo:?jitter=30",
    "input": {"path": "in.parquet"},
    "prompt": {"column": "text"},
    "sampling": {"max_tokens": 200},
    "output": {"path": "out"},
}, Path.cwd()), quiet=True)
# Not getrusage: its peak counts the process that started this one, too.
peak_kb = re.search("VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
print(summary.rows_done, summary.exit_code, int(peak_kb) // 1024)
"""
MAKE = """
import pyarrow as pa, pyarrow.parquet as pq
for start in range(0, 200_000, 20_000):
    # 150 MB of text in all, so that keeping it would show.
    table = pa.table({"text": [f"row {i} " for i in range(start, start + 20_000)],
                      "rest": [f"{i} " * 100 for i in range(start, start + 20_000)]})
    if start == 0:
        writer = pq.ParquetWriter("in.parquet", table.schema)
    writer.write_table(table, row_group_size=2000)
writer.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_200_000_rows_stay_under_a_fixed_ceiling(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", MAKE], cwd=tmp_path, check=True)
    done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    rows, code, peak_mb = map(int, done.stdout.split())
    assert (rows, code) == (200_000, 0)
    assert peak_mb < CEILING_MB
