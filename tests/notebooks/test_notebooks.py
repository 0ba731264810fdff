"""The notebooks: stored without outputs, and each runs from a fresh kernel without an error or a word on stderr."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from strip_notebooks import strip

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
TIMEOUT_S = 300


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def hide_the_rest(folder: Path) -> Path:
    """A folder for PYTHONPATH, with which a process has the packages of the extra `notebook` alone."""
    hiding = folder / "hiding"
    hiding.mkdir()
    (hiding / "only_extra.py").write_text((Path(__file__).parent / "only_extra.py").read_text())
    call = f"import only_extra\nonly_extra.hide_all_but({str(ROOT / 'pyproject.toml')!r}, 'notebook')\n"
    (hiding / "sitecustomize.py").write_text(call)
    return hiding


def run(name: str, folder: Path) -> dict[str, str]:
    """Executes a notebook as a newcomer would, in its folder; the text that each tagged cell put out, by tag.

    The kernel has what `.[notebook]` installs and no more, and no variable that helps it: as after the command that
    the notebook names.
    """
    notebook = read(name)
    env = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    env |= {
        "PYTHONPATH": os.pathsep.join(map(str, (hide_the_rest(folder), ROOT))),
        "JAXSERVE_COMPILE_CACHE": str(folder / "compiled"),
        "IPYTHONDIR": str(folder / "ipython"),
        "TMPDIR": str(folder),
    }
    with tempfile.TemporaryDirectory(prefix="kernel") as sockets:  # the path of a socket must be short
        kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/kernel")
        client = NotebookClient(notebook, km=kernel, timeout=TIMEOUT_S, shutdown_kernel="immediate")
        client.resources = {"metadata": {"path": str(FOLDER)}}
        client.execute(env=env, cleanup_kc=True)
    texts: dict[str, str] = {}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        text = ""
        for output in cell.outputs:
            assert output.get("name") != "stderr", f"{cell.id} of {name}: {output.text}"
            assert output.output_type != "error", f"{cell.id} of {name}: {output}"
            text += output.text if output.output_type == "stream" else str(output.data.get("text/plain", ""))
        for tag in cell.metadata.get("tags", ()):
            texts[tag] = text
    return texts


def test_a_process_with_the_extra_alone_has_no_compilers(tmp_path: Path) -> None:
    code = """
import importlib.metadata as found, importlib.util
import jaxserve, matplotlib, pandas, ipykernel, jax, flax
for name in ("libtpu", "numba", "jax_plugins", "torch", "aiohttp", "ray"):
    print(name, importlib.util.find_spec(name) is not None)
for name in ("libtpu", "jax-cuda13-plugin", "numba"):
    try:
        print(name, found.version(name))
    except found.PackageNotFoundError:
        print(name, False)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (hide_the_rest(tmp_path), ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300, check=True
    )
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"False"}, done.stdout


def test_there_are_notebooks() -> None:
    assert NAMES == ["capacity_planning", "reading_a_step_log", "swap_a_scheduler"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_run_is_stored(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert text == strip(text), "run scripts/strip_notebooks.py"
    for cell in notebook.cells:
        assert not cell.get("outputs"), cell.id
        assert cell.get("execution_count") is None, cell.id
    assert not re.search(r"/(home|root|Users|work|tmp)/|[A-Z]:\\\\", text), "a path of some machine"


@pytest.mark.slow
def test_swap_a_scheduler(tmp_path: Path) -> None:
    texts = run("swap_a_scheduler", tmp_path)
    assert texts["same-answers"].strip().endswith(": 0")
    plans = re.findall(r"(\d+) of (\d+) plans are equal", texts["same-plans"])
    assert len(plans) == 2
    assert all(equal == total and int(total) > 100 for equal, total in plans), texts["same-plans"]
    assert {"fcfs", "express lane", "demo model", "simulator"} <= set(re.findall(r"\w+ \w+|\w+", texts["comparison"]))
    gains = dict(re.findall(r"(demo model|simulator): .* (-?\d+)% sooner", texts["gain"]))
    assert set(gains) == {"demo model", "simulator"}
    for policy in ("fcfs", "sjf", "BigExpressLane"):
        assert policy in texts["on-paper"]
        assert policy in texts["who-pays"]


@pytest.mark.slow
def test_capacity_planning(tmp_path: Path) -> None:
    texts = run("capacity_planning", tmp_path)
    assert "fits: False" in texts["does-not-fit"]
    assert "v5e:4x4" in texts["does-not-fit"]
    fits = dict(re.findall(r"^(v\d\w:\d+|h200:2) +(True|False)", texts["what-fits"], re.MULTILINE))
    assert fits == {
        "v5e:8": "False", "v5e:16": "True", "v6e:4": "False", "v6e:8": "True", "v5p:4": "True", "h200:2": "True"
    }  # fmt: skip
    assert "does not fit" in texts["answer"]
    assert re.search(r"12 requests a second on v6e:8: \d+ replicas", texts["answer"]), texts["answer"]


@pytest.mark.slow
def test_reading_a_step_log(tmp_path: Path) -> None:
    texts = run("reading_a_step_log", tmp_path)
    steps, tokens = map(int, re.findall(r"\d+", texts["replay"])[:2])
    assert steps > 100
    assert tokens > 1000
    assert "difference: None" in texts["replay"]
    assert re.search(r"equal for \d+ steps, then: step \d+, row \d+: request", texts["difference"])
    assert "predicted / real" in texts["errors"]
    assert re.search(r"^ *decode ", texts["summary"], re.MULTILINE)
