"""Hub datasets over HTTP: a small server on loopback speaks what reading needs of the hub's interface."""

import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

FIRST, SECOND = "1" * 40, "2" * 40


class Hub:
    """One dataset, `org/name`, with its files at each commit."""

    def __init__(self):
        self.main = FIRST
        self.commits = {FIRST: self._files([1, 2]), SECOND: self._files([8, 9])}
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                self._answer(with_body=True)

            def do_HEAD(self):
                self._answer(with_body=False)

            def _answer(self, with_body):
                found = hub.find(self.path.split("?")[0])
                self.send_response(404 if found is None else 200)
                content, commit = found or (b"", None)
                if commit is None:
                    self.send_header(
                        "X-Error-Code", "RepoNotFound" if "org/name" not in self.path else "EntryNotFound"
                    )
                else:
                    self.send_header("X-Repo-Commit", commit)
                    self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if with_body:
                    self.wfile.write(content)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @staticmethod
    def _files(train):
        files = {}
        for split, rows in (("train", train), ("test", [3])):
            sink = io.BytesIO()
            pq.write_table(pa.table({"n": rows}), sink)
            files[f"data/{split}-00000-of-00001.parquet"] = sink.getvalue()
        return files

    def find(self, path):
        """(content, commit) of what stands at a URL path."""
        api, repository = "/api/datasets/org/name", "/datasets/org/name/resolve/"
        if path.startswith(repository):
            revision, _, name = path.removeprefix(repository).partition("/")
            commit = self._commit(revision)
            content = self.commits[commit].get(name) if commit else None
            return None if content is None else (content, commit)
        if not path.startswith(api):
            return None
        kind, _, rest = path.removeprefix(api).strip("/").partition("/")
        revision, _, folder = rest.partition("/")
        commit = self._commit(revision or "main")
        if commit is None:
            return None
        answer = self._tree(commit, folder) if kind == "tree" else self._info(commit)
        return json.dumps(answer).encode(), commit

    def _commit(self, revision):
        return self.main if revision == "main" else revision if revision in self.commits else None

    def _info(self, commit):
        return {
            "id": "org/name",
            "sha": commit,
            "siblings": [{"rfilename": name} for name in self.commits[commit]],
        }

    def _tree(self, commit, folder):
        entries = {}
        for name, content in self.commits[commit].items():
            path = PurePosixPath(name)
            for part in (path, *path.parents):
                if part != PurePosixPath(".") and part.parent == PurePosixPath(folder or "."):
                    kind = "file" if part == path else "directory"
                    oid = hashlib.sha1(content).hexdigest()
                    size = len(content) if kind == "file" else 0
                    entries[str(part)] = {"type": kind, "path": str(part), "size": size, "oid": oid}
        return list(entries.values())


@pytest.fixture
def run_reader(tmp_path):
    """Opens `org/name` in a process that may go online; gives back its rows, identity and error."""

    def run(url, stored=None, **section):
        script = """
            import json, sys
            from pathlib import Path
            from batchgen.errors import SourceError
            from batchgen.jobs.row import RowPosition
            from batchgen.jobs.sections import InputSpec
            from batchgen.jobs.sources import open_source
            section, stored = json.loads(sys.argv[1])
            try:
                source = open_source(InputSpec.model_validate(section), Path("."), stored)
            except SourceError as error:
                print(json.dumps({"error": str(error)}))
                sys.exit()
            batches = source.batches(RowPosition(0, 0, 0))
            rows = [n for batch in batches for n in batch.columns["n"].to_pylist()]
            print(json.dumps({"rows": rows, "identity": source.identity(), "kind": type(source).__name__}))
        """
        environment = {
            **os.environ,
            "HF_ENDPOINT": url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_CACHE"):
            environment.pop(name, None)
        arguments = json.dumps([{"path": "org/name", **section}, stored])
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.slow
def test_a_hub_dataset_is_pinned_to_its_commit_and_stays_there(run_reader):
    hub = Hub()
    first = run_reader(hub.url, split="train")
    assert (first["rows"], first["kind"]) == ([1, 2], "FileSource")
    identity = first["identity"]
    assert identity["revision"] == FIRST
    assert [file["name"] for file in identity["files"]] == ["data/train-00000-of-00001.parquet"]
    assert run_reader(hub.url, split="train", streaming=True)["rows"] == [1, 2]
    # The dataset changes: a resume keeps the first run's commit, a new job takes the new one.
    hub.main = SECOND
    assert run_reader(hub.url, stored=identity, split="train") == first
    assert run_reader(hub.url, split="train")["rows"] == [8, 9]
    assert "the hub says" in run_reader(hub.url, split="train", revision="nowhere")["error"]
    assert "the hub says" in run_reader(hub.url, path="org/other")["error"]
    hub.server.shutdown()
    hub.server.server_close()
    # What was read before is in the cache.
    assert run_reader(hub.url, stored=identity, split="train") == first
    assert "the hub cannot be reached" in run_reader(hub.url, path="org/other")["error"]
