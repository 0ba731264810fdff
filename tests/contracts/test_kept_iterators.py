"""No test throws away the iterator of a stream that goes on: httpx then closes the connection, and the server aborts
the request, so that a test that looks for a live request finds it only on a quiet machine."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ITERATORS = {"iter_lines", "iter_text", "iter_bytes", "iter_raw"}


def thrown_away(text: str) -> list[int]:
    """Lines of `next(response.iter_lines())` and its like."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "next"
        and isinstance(node.args[0], ast.Call)
        and isinstance(node.args[0].func, ast.Attribute)
        and node.args[0].func.attr in ITERATORS
    ]


def test_iterators_of_streams_are_kept() -> None:
    paths = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("scripts/**/*.py")]
    texts = {path: text for path in paths if ".iter_" in (text := path.read_text())}
    assert texts
    assert [(path, lines) for path, text in texts.items() if (lines := thrown_away(text))] == []


def test_one_that_is_thrown_away_is_found() -> None:
    assert thrown_away("first = next(response.iter_lines())\n") == [1]
    assert thrown_away("lines = response.iter_lines()\nfirst = next(lines)\n") == []
