"""The README promises only what is there."""

import re
from pathlib import Path

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


def test_every_name_on_the_way_of_a_request_exists() -> None:
    """Section "One request, end to end": each name in code style is found in the package."""
    section = README.split("## One request, end to end")[1].split("```")[0]
    sources = "\n".join(p.read_text() for p in (ROOT / "jaxserve").rglob("*.py"))
    for name in re.findall(r"`([A-Za-z_.]+)`", section):
        last = name.split("/")[-1].removesuffix(".py").split(".")[-1]
        assert re.search(rf"\b{last}\b", sources), name
