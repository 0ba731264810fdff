"""The notebooks: stored as they should be, and each runs in what its extra installs, without a word on stderr.

Those of papers are stored with the outputs of a whole run, which docs/research.md quotes. Here they run with smaller
sizes, all in one process, and what they claim must hold already."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from store_notebooks import execute, stored

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
PAPERS = FOLDER / "papers"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
PAPER_NAMES = sorted(path.stem for path in PAPERS.glob("*.ipynb"))
TIMEOUT_S = 300


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read((PAPERS if name in PAPER_NAMES else FOLDER) / f"{name}.ipynb", as_version=4)


def hide_the_rest(folder: Path) -> Path:
    """A folder for PYTHONPATH, with which a process has the packages of the extra `notebook` alone."""
    hiding = folder / "hiding"
    hiding.mkdir()
    (hiding / "only_extra.py").write_text((Path(__file__).parent / "only_extra.py").read_text())
    call = f"import only_extra\nonly_extra.hide_all_but({str(ROOT / 'pyproject.toml')!r}, 'notebook')\n"
    (hiding / "sitecustomize.py").write_text(call)
    return hiding


def environment(folder: Path) -> dict[str, str]:
    """What `.[notebook]` installs and no more, all files in `folder`, and no variable that helps but the name of the
    folder where this run of the tests keeps what it compiles."""
    env = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return env | {
        "PYTHONPATH": os.pathsep.join(map(str, (hide_the_rest(folder), ROOT))),
        "IPYTHONDIR": str(folder / "ipython"),
        "MPLCONFIGDIR": str(folder / "matplotlib"),
        "TMPDIR": str(folder),
    }


def run(name: str, folder: Path, smaller: tuple[str, str] | None = None) -> dict[str, str]:
    """Executes a notebook as a newcomer would, in its folder; the text that each tagged cell put out, by tag.

    The kernel has what `.[notebook]` installs and no more, as after the command that the notebook names. `smaller`: a
    text of the notebook, and what is there in its place.
    """
    notebook = execute(FOLDER / f"{name}.ipynb", environment(folder), TIMEOUT_S, smaller)
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
    assert NAMES == [
        "capacity_planning",
        "reading_a_step_log",
        "reinforcement_learning",
        "study_a_policy",
        "swap_a_scheduler",
    ]
    assert PAPER_NAMES == ["distserve", "sarathi_serve", "vidur", "vtc"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_run_is_stored(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert text == stored(text), "run scripts/store_notebooks.py"
    for cell in notebook.cells:
        assert not cell.get("outputs"), cell.id
        assert cell.get("execution_count") is None, cell.id
    assert not re.search(r"/(home|root|Users|work|tmp)/|[A-Z]:\\\\", text), "a path of some machine"


def printed(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """The text that each tagged cell printed, by tag."""
    return {
        tag: "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
        for tag in cell.metadata.get("tags", ())
    }


@pytest.mark.parametrize("name", PAPER_NAMES)
def test_papers_are_stored_with_a_whole_run_that_the_docs_quote(name: str) -> None:
    path = PAPERS / f"{name}.ipynb"
    text = path.read_text(encoding="utf-8")
    assert text == stored(text, with_outputs=True), "run scripts/store_notebooks.py NAME"
    assert not re.search(r"/(home|root|Users|work|tmp)/", text), "a path of some machine"
    notebook = read(name)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        kinds = [kind for output in cell.get("outputs", ()) for kind in output.get("data", ())]
        assert ("plt.show()" in cell.source) == ("image/png" in kinds), cell.id
        assert all(output.get("name") != "stderr" for output in cell.get("outputs", ())), cell.id
    results = "\n".join(printed(notebook).values())
    docs = (ROOT / "docs" / "research.md").read_text(encoding="utf-8")
    [section] = re.findall(rf"papers/{name}\.ipynb\)\n(.*?)(?=\n## |\Z)", docs, re.DOTALL)
    [ours] = re.findall(r"^\*\*Here\*\*(.*?)\n\n", section, re.DOTALL | re.MULTILINE)
    for figure in re.findall(r"\d[\d,]*\.\d+|\d[\d,]{4,}", ours):
        plain = re.escape(figure.replace(",", ""))
        assert re.search(rf"(?<![\d.]){plain}(?!\d)", results), f"{figure} of docs/research.md"


SMALLER = {  # in the place of the cell with the tag `parameters`
    "sarathi_serve": "NUM_REQUESTS, WITHIN = 60, 0.5",
    "vtc": "MINUTES = 2",
    "distserve": "NUM_REQUESTS, RATES = 60, (1, 2, 4, 8)",
    "vidur": 'NUM_REQUESTS, WITHIN, DEVICES, PRICES = 60, 1.0, ("v5e:1", "v5e:2x2/2", "h100:1"), {"h100": 2.0}',
}

RUN_ALL = """
import contextlib, io, json, pathlib, sys, matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt
texts = {}
for name, cells in json.loads(pathlib.Path(sys.argv[1]).read_text()).items():
    scope, texts[name] = {"__name__": "__main__"}, {}
    for tags, source in cells:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(source, name, "exec"), scope)
        texts[name] |= dict.fromkeys(tags, out.getvalue())
        plt.close("all")
print(json.dumps(texts))
"""


@pytest.mark.slow
def test_papers_hold_in_an_environment_with_the_extra_alone(tmp_path: Path) -> None:
    """All in one process, since most of the time of a small one is its start."""
    cells = {
        name: [
            (
                cell.metadata.get("tags", []),
                SMALLER[name] if "parameters" in cell.metadata.get("tags", ()) else cell.source,
            )
            for cell in read(name).cells
            if cell.cell_type == "code"
        ]
        for name in PAPER_NAMES
    }
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_ALL, str(tmp_path / "cells.json")],
        capture_output=True, text=True, timeout=TIMEOUT_S, cwd=PAPERS, env=environment(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    texts = json.loads(done.stdout)
    # Sarathi-Serve: chunks serve more within a target of the time between tokens.
    gains = re.findall(r"serve (\S+) times", texts["sarathi_serve"]["result"])
    assert len(gains) == 2 and all(float(gain) > 1.2 for gain in gains), texts["sarathi_serve"]
    # VTC: the difference in service grows with FCFS, and is bounded with VTC.
    [(half, end)] = re.findall(r"FCFS: difference (\d+) .*?, (\d+) at its end", texts["vtc"]["result"])
    [most] = re.findall(r"VTC: .* at most (\d+)", texts["vtc"]["result"])
    assert int(end) > 1.7 * int(half) and int(most) < int(end) / 4, texts["vtc"]
    waits = re.findall(r"after (\S+) s \(median\)", texts["vtc"]["within-result"])
    assert float(waits[0]) > 3 * float(waits[1]), texts["vtc"]
    # DistServe: apart is better than whole prompts together where the target of TPOT is tight.
    tight = re.findall(r"over together, whole prompts: (\S+)", texts["distserve"]["result"])[0]
    assert float(tight) > 1.2, texts["distserve"]
    # Vidur: how much a chip is worth depends on the load.
    [worth] = re.findall(r"one h100 replaces (\S+) v5e for chats, (\S+) v5e for books", texts["vidur"]["result"])
    assert float(worth[1]) > 1.2 * float(worth[0]), texts["vidur"]
    assert "requests for a dollar: h100" in texts["vidur"]["prices"]


@pytest.mark.slow
def test_swap_a_scheduler(tmp_path: Path) -> None:
    texts = run("swap_a_scheduler", tmp_path)
    assert texts["same-answers"].strip().endswith(": 0")
    plans = re.findall(r"(\d+) of (\d+) plans are equal", texts["same-plans"])
    assert len(plans) == 2
    assert all(equal == total and int(total) > 100 for equal, total in plans), texts["same-plans"]
    assert {"fcfs", "express lane", "demo model", "simulator"} <= set(re.findall(r"\w+ \w+|\w+", texts["comparison"]))
    change = r"\d+% (?:sooner|later)"
    gains = re.findall(rf"(demo model|simulator): .* complete {change}, and all of them {change}", texts["gain"])
    assert set(gains) == {"demo model", "simulator"}
    assert re.search(r"Both worlds (do not )?name the same policy", texts["gain"])
    for policy in ("fcfs", "sjf", "BigExpressLane"):
        assert policy in texts["on-paper"]
        assert policy in texts["who-pays"]


@pytest.mark.slow
def test_study_a_policy(tmp_path: Path) -> None:
    texts = run("study_a_policy", tmp_path, ('"seeds": 5', '"seeds": 2'))
    said = texts["verdicts"]
    for policy in ("sjf", "LeastAttained", "LeastAttained?quantum=400"):
        assert f"  {policy}\n" in said
    verdicts = re.findall(r": (no difference that 2 seeds could show|better than|worse than)", said)
    assert len(verdicts) == 9, "three figures of each policy"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("smaller", "gained"),
    [(("ROUNDS, EVERY = 40, 10", "ROUNDS, EVERY = 4, 2"), -30), (None, 15)],
    ids=["few rounds", "all rounds"],
)
def test_reinforcement_learning(smaller: tuple[str, str] | None, gained: int, tmp_path: Path) -> None:
    texts = run("reinforcement_learning", tmp_path, smaller)
    [before, after] = re.findall(r"(\d+)%", texts["result"])
    assert int(before) < 60 and int(after) > int(before) + gained, texts["result"]
    assert float(re.findall(r"of a token: (\S+)", texts["result"])[0]) < 1e-3


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
