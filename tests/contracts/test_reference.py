"""The reference of the Python interface: public names have docstrings, and what these name is there."""

import subprocess
import sys
import textwrap
from pathlib import Path

import make_reference
import pdoc.doc
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_is_built_without_a_mistake(tmp_path: Path) -> None:
    """In a process of its own, which fills the modules with names that are imported when they are used."""
    command = [sys.executable, str(ROOT / "scripts/make_reference.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    front = (tmp_path / "jaxserve.html").read_text()
    for name in ("LLM.from_config", "LLM.generate", "AsyncLLM.generate", "SamplingParams.temperature"):
        assert f'id="{name}"' in front, name
    assert "jaxserve.html" in (tmp_path / "index.html").read_text()
    for module in make_reference.MODULES[1:]:
        parent = tmp_path / f"{make_reference.parent_of(module).replace('.', '/')}.html"
        assert f"{module.rpartition('.')[2]}.html" in parent.read_text(), f"{module} is linked from {parent}"


def test_mistakes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = '''
        """Uses `jaxserve.api.SamplingParams`, `jaxserve.nothing` and docs/nothing.md."""
        import dataclasses

        @dataclasses.dataclass
        class Silent:
            here: int  # a field says what it is behind its line

            @property
            def size(self): return 1

        class Told:
            """Like `Silent`, `Silent.here`, `ValueError` and `Engine.wake`, unlike `Silent.away` and `Nobody`."""
            def silent(self): ...
            def _private(self): ...

        def silent(): ...
    '''
    (tmp_path / "jaxserve_example.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    module = pdoc.doc.Module(make_reference.load_module("jaxserve_example"))
    make_reference.add_docstrings(module)
    assert module.members["Silent"].members["here"].docstring == "a field says what it is behind its line"  # pyright: ignore
    missing = {line.split()[0] for line in make_reference.without_docstring([module])}
    assert missing == {f"jaxserve_example.{name}" for name in ("Silent", "Silent.size", "Told.silent", "silent")}
    dead = {line.split(" names ")[1].split(",")[0] for line in make_reference.dead_names([module])}
    assert dead == {"jaxserve.nothing", "docs/nothing.md", "Silent.away", "Nobody"}


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#x"></a><a href="b.html#y"></a><a href="https://example.org"></a>')
    (tmp_path / "b.html").write_text('<p id="x"><a href="c.html">c</a><a href="#x">x</a></p>')
    assert [line.split(" links to ") for line in make_reference.dead_links(tmp_path)] == [
        ["a.html", "b.html#y, which is not there"],
        ["b.html", "c.html, which is not there"],
    ]
