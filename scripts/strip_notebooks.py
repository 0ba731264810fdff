"""Takes out of notebooks what a run left in them, so that a change of one is a change of its text.

    python scripts/strip_notebooks.py            strips notebooks/*.ipynb in place, and names those that it changed

A stored notebook holds its cells, their tags and the name of the language. The tests call `strip`, and fail when it was
forgotten.
"""

from pathlib import Path

import nbformat

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def strip(text: str) -> str:
    """The JSON of a notebook, without outputs, counts and what editors write down of themselves."""
    notebook = nbformat.reads(text, as_version=4)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata = nbformat.from_dict({"kernelspec": _KERNEL, "language_info": {"name": "python"}})
    return nbformat.writes(notebook) + "\n"


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        old = path.read_text(encoding="utf-8")
        new = strip(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"stripped {path.name}")


if __name__ == "__main__":
    main()
