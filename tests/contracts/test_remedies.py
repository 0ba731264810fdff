"""The remedy where an optional library is missing: one wording, which is that of README.md."""

import re
import tomllib
from pathlib import Path

from jaxserve.errors import how_to_install

ROOT = Path(__file__).parents[2]
SOURCES = {path: path.read_text() for path in (ROOT / "jaxserve").rglob("*.py")}


def test_what_is_missing_is_installed_as_readme_installs() -> None:
    command = how_to_install("cpu,vision").partition(" in ")[0]
    assert command in (ROOT / "README.md").read_text().splitlines()


def test_messages_name_extras_that_there_are_and_word_them_in_one_place() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {found for text in SOURCES.values() for found in re.findall(r"how_to_install\([\"']([\w-]+)", text)}
    assert named and named <= set(extras)
    worded = [str(path) for path, text in SOURCES.items() if re.search(r"jaxserve\[\w|install jaxserve\b", text)]
    assert not worded, "an index has no package of that name: use how_to_install"
