"""Notebooks in the form in which they are stored, so that a change of one is a change of its text.

    python scripts/store_notebooks.py                   takes the outputs out of notebooks/*.ipynb
    python scripts/store_notebooks.py sarathi_serve     runs notebooks/papers/sarathi_serve.ipynb and stores its outputs

A stored notebook holds its cells, their tags and the name of the language. Those of notebooks/papers repeat figures of
papers and are stored with the outputs of one run from the first cell to the last; all others have none. The tests call
`stored`, and fail when it was forgotten.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
PAPERS = FOLDER / "papers"
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def stored(text: str, with_outputs: bool = False) -> str:
    """The JSON of a notebook, without what editors and kernels write down of themselves, and without outputs unless
    `with_outputs`."""
    notebook = nbformat.reads(text, as_version=4)
    number = 0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        number += 1
        outputs = cell.outputs if with_outputs else []
        cell.execution_count = number if with_outputs else None
        for output in outputs:
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            if output.output_type == "execute_result":
                output.execution_count = number
        cell.outputs = outputs
    notebook.metadata = nbformat.from_dict({"kernelspec": _KERNEL, "language_info": {"name": "python"}})
    return nbformat.writes(notebook) + "\n"


def execute(
    path: Path,
    env: Mapping[str, str] = os.environ,
    timeout_s: int = 600,
    changed: tuple[str, str] | None = None,
) -> nbformat.NotebookNode:
    """The notebook after a run in its folder, in this environment.

    `changed`: a text that is in one of its cells, and what is run in its place. Raises nbclient's CellExecutionError.
    """
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    if changed is not None:
        [cell] = [cell for cell in notebook.cells if changed[0] in cell.source]
        cell.source = cell.source.replace(*changed)
    with tempfile.TemporaryDirectory(prefix="kernel") as sockets:  # the path of a socket must be short
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        client = NotebookClient(notebook, km=kernel, timeout=timeout_s, shutdown_kernel="immediate")
        client.resources = {"metadata": {"path": str(path.parent)}}
        client.execute(env=dict(env), cleanup_kc=True)
    return notebook


def main() -> None:
    for name in sys.argv[1:]:
        path = PAPERS / f"{name}.ipynb"
        path.write_text(stored(nbformat.writes(execute(path)), with_outputs=True), encoding="utf-8")
        print(f"stored a run of {path.name}")
    if sys.argv[1:]:
        return
    for path in sorted(FOLDER.glob("*.ipynb")):
        old = path.read_text(encoding="utf-8")
        new = stored(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"took the outputs out of {path.name}")


if __name__ == "__main__":
    main()
