"""The README promises only what is there."""

import json
import re
import subprocess
from pathlib import Path

import check_readme
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_no_placeholder_is_left() -> None:
    assert not re.findall(r"@[A-Z_]+@", README)
    assert "not measured yet" not in (ROOT / "jaxserve/demo_model/README.md").read_text()


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"\]\(([\w./-]+)\)|`((?:configs|docs|scripts|jaxserve|tests)/[\w./-]+)`", README)))
)
def test_every_file_it_names_exists(path: tuple[str, str]) -> None:
    assert (ROOT / (path[0] or path[1])).exists(), path


def test_the_front_page_is_short_and_the_index_has_every_page() -> None:
    assert len(README.splitlines()) <= 220
    index = (ROOT / "docs/README.md").read_text()
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f"]({page.name}" not in index]
    assert missing == ["README.md"], "each page has a line in docs/README.md, which does not name itself"


def figure(value: float) -> str:
    """As the tables have it: three digits, all of them before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def test_the_table_of_other_engines_is_the_record() -> None:
    record = json.loads((ROOT / "benchmarks/peers_cpu.json").read_text())["results"]["workloads"]
    rows = re.findall(r"^\| (decode, 1 stream|decode, 16 streams|prefill, .*?) \| (.*) \|$", README, re.MULTILINE)
    workloads = {"decode, 1 stream": "one", "decode, 16 streams": "streams", "prefill, one prompt of 512": "prefill"}
    assert [name for name, _ in rows] == list(workloads)
    for name, cells in rows:
        figures = record[workloads[name]]["figures"]
        [figured] = [figures[key] for key in figures if key.endswith("tokens/s")]
        medians, ratios = figured["medians"], figured["ratios"]
        others = [f"{figure(medians[peer])} ({ratios[peer]:.2f}x)" for peer in ("hf", "llamacpp", "vllm")]
        assert cells.split(" | ") == [figure(medians["jaxserve"]), *others]


def test_what_is_pasted_is_bash_and_python() -> None:
    """`scripts/check_readme.py` runs all of it, in minutes; here it is read as both languages read it."""
    blocks = check_readme.read_blocks(README)
    languages = re.findall(r"^```(\w*)\n.*?^```$", README, re.MULTILINE | re.DOTALL)
    assert set(languages) == {"bash", "python", "text"}, "each block says what it is"
    assert len(blocks) >= 8
    for block in blocks:
        if block.language == "python":
            compile(block.text, f"README.md:{block.line}", "exec")
        else:
            subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)
    text = "\n".join(block.text for block in blocks if block.language == "bash")
    assert text.index("activate") < text.index("jaxserve run"), "commands are found once the environment is active"
    assert ".venv/bin/" not in text.replace(". .venv/bin/activate", "")


def test_blocks_in_a_row_are_one_script_and_some_lines_are_left_out() -> None:
    text = "```bash\nmake demo  # a\nmake test  # b\n```\n```python\nx = 1\n```\nor\n"
    text += "```python\nprint(x)\n```\n```bash\nls\n```\n"
    first, script, last = check_readme.read_blocks(text)
    assert (first.text, first.line) == ("make demo  # a\n", 2)
    assert script.text.split() == ["x", "=", "1", "print(x)"] and script.line == 6
    assert last.text == "ls\n"
    assert [block.text for block in check_readme.without_installing([first, script, last])] == [script.text, "ls\n"]


def test_settings_are_counted_up_to_the_server(tmp_path: Path) -> None:
    folder = tmp_path / "xla" / "executables"
    folder.mkdir(parents=True)
    for name in ("decode-1x1-aa", "mixed-16x1-aa", "decode-1x1-bb", "program-cc"):
        (folder / name).touch()
    (tmp_path / "xla" / "machine_code").mkdir()
    names = sorted(check_readme.executables(tmp_path))
    assert names == ["decode-1x1-aa", "decode-1x1-bb", "mixed-16x1-aa"]
    texts = ("jaxserve run", "curl http://127.0.0.1:8000/v1/models", "jaxserve simulate")
    blocks = [check_readme.Block(language="bash", text=text, line=1) for text in texts]
    compiled = [names[:2], names[2:], ["decode-1x1-cc"]]
    facts = {"line": 1, "language": "bash", "begins": "", "status": 0, "seconds": 1.0, "silent_s": 0.0, "output": ""}
    outcomes = [check_readme.Outcome(compiled=found, **facts) for found in compiled]
    assert check_readme.settings_until_served(outcomes, blocks) == 2, "the simulation comes after the server"


def test_a_pasted_command_is_told_with_its_status_and_silence(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "TERM": "xterm"}
    shell = check_readme.Shell(tmp_path, environment)
    try:
        status, output, seconds, silent_s = shell.paste('echo "on $(tty | cut -c1-8)"\nsleep 0.3; (exit 7)\n')
        assert (status, output.strip()) == (7, "on /dev/pts")
        assert 0.1 <= silent_s <= seconds
        assert shell.paste("cd /; X=5\n")[0] == 0
        assert shell.paste("echo $X$PWD\n")[1].strip() == "5/"
        assert shell.paste("nosuchcommand\n")[0] == 127
    finally:
        shell.close()
