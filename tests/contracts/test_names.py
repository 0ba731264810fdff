"""No name is used that nobody defines. Ruff's rule for it is off, since the letters of array shapes look like names."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHAPE = re.compile(r"`([A-Z][A-Z0-9]?)`")  # letters of design


def undefined(*paths: str) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "F821",
        "--output-format",
        "json",
        *paths,
    ]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout)
    return [f"{f['filename']}:{f['location']['row']} {f['message']}" for f in found if not SHAPE.search(f["message"])]


def test_every_name_is_defined() -> None:
    assert undefined("jaxserve", "scripts", "tests") == []


def test_an_undefined_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f() -> None:\n    nobody(1)\n")
    assert len(undefined(str(tmp_path))) == 1
