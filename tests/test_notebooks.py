"""The example notebooks run from top to bottom in a kernel of Jupyter, and are stored without outputs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import nbformat
import pytest
from conftest import REPOSITORY
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from tiers import tiered
from waiting import TIMEOUT

NOTEBOOKS = REPOSITORY / "examples" / "notebooks"
SHOWN = {
    "own_loop": "Layers, largest change first",
    "hf_trainer": "Layers, largest change first",
    "features_and_probe": "accuracy of the digit",
    "find_a_nan": "NaN: 0",
    "patching": "background-color",
}
"""A text that each notebook displays."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelManager]:
    manager = KernelManager()
    manager.start_kernel(
        cwd=str(tmp_path_factory.mktemp("notebooks")), env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    yield manager
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiered(SHOWN, ["find_a_nan"]))
def test_notebook_runs_and_shows_its_result(name: str, kernel: KernelManager) -> None:
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    book.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    client = NotebookClient(book, km=kernel, startup_timeout=TIMEOUT, coalesce_streams=True)
    client.execute()
    client.kc.stop_channels()  # an open client logs when it is collected, in the middle of any later test
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert SHOWN[name] in "".join(str(output) for output in outputs)


@pytest.mark.slow
def test_notebooks_are_stored_without_outputs() -> None:
    books = {file.stem: nbformat.read(file, as_version=4) for file in NOTEBOOKS.glob("*.ipynb")}
    assert books.keys() == SHOWN.keys()
    for book in books.values():
        nbformat.validate(book)
        cells = [cell for cell in book.cells if cell.cell_type == "code"]
        assert all(not cell.outputs and cell.execution_count is None for cell in cells)
