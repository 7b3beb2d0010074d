"""Says where a job's results are and shows some of them: python examples/show.py OUTPUT [HOW_MANY].

Needs nothing of batchgen: the output is a dataset that `datasets` loads by itself.
"""

import sys
import textwrap
from pathlib import Path

from datasets import load_from_disk


def main() -> None:
    folder = Path(sys.argv[1])
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    rows = load_from_disk(str(folder))
    print(f"{len(rows)} results in {folder}; load them with datasets.load_from_disk({str(folder)!r}).")
    for number in range(count):
        row = rows[number * max(1, len(rows) // count)]
        print(f"\n{row.get('title', row['row_index'])}")
        print(textwrap.indent(textwrap.fill(row["generated_text"] or "(none)", 100), "    "))


if __name__ == "__main__":
    main()
