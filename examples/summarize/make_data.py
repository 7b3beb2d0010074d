"""Writes texts.parquet: public-domain texts from texts.jsonl, and documentation of Python's standard library.

The first part is committed beside this file; every machine with Python has the second. The same Python gives
the same bytes.
"""

import ast
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
MODULES = (
    "abc argparse ast asyncio.events asyncio.locks asyncio.queues base64 bisect calendar collections "
    "concurrent.futures configparser contextlib copy csv dataclasses datetime decimal difflib dis doctest "
    "email.message enum fileinput fnmatch fractions functools getpass gettext glob graphlib gzip hashlib "
    "heapq html.parser http.client http.cookiejar imaplib inspect io ipaddress json json.decoder "
    "linecache locale logging logging.handlers lzma mailbox mimetypes multiprocessing.pool numbers "
    "operator os pathlib pdb pickle pickletools pkgutil platform plistlib pprint profile pstats queue "
    "random reprlib sched secrets selectors shelve shlex shutil signal smtplib socket socketserver "
    "sqlite3 ssl statistics string struct subprocess tarfile tempfile textwrap threading timeit tokenize "
    "trace traceback types typing unittest unittest.case unittest.mock urllib.parse urllib.request "
    "urllib.robotparser uuid warnings wave weakref xml.dom.minidom xml.sax.handler zipfile zipimport"
).split()
PER_MODULE = 2
SHORTEST, LONGEST = 60, 7000  # characters: from a line to pages
LONG, NUM_LONG = 1500, 20  # so many of the docstrings longer than that, so that the demo ends within minutes
SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "title", "language", "text", "source", "license")])


def docstrings(module: str) -> Iterator[tuple[str, str]]:
    """Dotted names and docstrings of a module and its public classes and functions; nothing is run."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    todo: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]] = [(module, tree)]
    while todo:
        name, node = todo.pop(0)
        text = ast.get_docstring(node)
        if text:
            yield name, inspect.cleandoc(text)
        if not isinstance(node, ast.FunctionDef):
            inner = (child for child in node.body if isinstance(child, ast.ClassDef | ast.FunctionDef))
            todo += [(f"{name}.{child.name}", child) for child in inner if not child.name.startswith("_")]


def python_rows() -> Iterator[dict[str, str]]:
    """The first few docstrings of each module."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    num_long = 0
    for module in MODULES:
        taken = 0
        for name, text in docstrings(module):
            if not SHORTEST <= len(text) <= LONGEST or (len(text) > LONG and num_long == NUM_LONG):
                continue
            num_long += len(text) > LONG
            taken += 1
            yield {
                "id": f"python-{name}",
                "title": name,
                "language": "en",
                "text": text,
                "source": f"Python {version} standard library, documentation of {name}",
                "license": "PSF-2.0",
            }
            if taken == PER_MODULE:
                break


def main() -> None:
    with (HERE / "texts.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    rows += python_rows()
    path = HERE / "texts.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)
    lengths = sorted(len(row["text"]) for row in rows)
    languages = len({row["language"] for row in rows})
    print(
        f"{path.name}: {len(rows)} rows in {languages} languages, {lengths[0]} to {lengths[-1]} characters, "
        f"{sum(lengths)} in all"
    )


if __name__ == "__main__":
    main()
