"""The blocking API in a real notebook, whose cells run inside a running event loop (case BG-37)."""

from pathlib import Path
from textwrap import dedent

import nbformat
import pytest
from nbclient import NotebookClient

from batchgen.tiny_models import tiny_model, write_folder

CELLS = [
    """
    import asyncio, warnings
    warnings.simplefilter("error", RuntimeWarning)  # a coroutine that was never awaited
    assert asyncio.get_running_loop().is_running()
    from batchgen import LLM, SamplingParams
    from batchgen.errors import ConfigError
    llm = LLM("FOLDER", dtype="float32", max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    def generate():
        return llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    """,
    "first = generate()",
    """
    try:
        llm.generate([None], params)
    except ConfigError as error:
        print(error)
    """,
    """
    ticks = asyncio.create_task(asyncio.sleep(0, "the loop goes on"))
    second = generate()
    third = await asyncio.to_thread(generate)
    print(len(first), first == second == third, await ticks)
    llm.shutdown()
    """,
]


@pytest.mark.slow
def test_calls_in_several_cells_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tiny_model(), tmp_path / "model")
    for name in ("RUNTIME", "DATA", "CONFIG"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    sources = [dedent(cell).strip().replace("FOLDER", str(folder)) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=90, kernel_name="python3").execute(cwd=str(tmp_path))
    said = [
        "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        for cell in notebook.cells
    ]
    assert "prompt 0 must be a text" in said[2]
    assert said[3] == "6 True the loop goes on\n"
