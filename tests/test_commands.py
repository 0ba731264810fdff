"""Mistakes in options of commands: each is one line and exit code 2, before anything is asked, started or written."""

import pytest

from jaxserve.cli import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["health", ""], "the address is ''"),
        (["health", "127.0.0.1:9", "--timeout", "nan"], "'--timeout'"),
        (["health", "127.0.0.1:9", "--timeout", "-1"], "'--timeout'"),
        (["top", "127.0.0.1:9", "--every", "inf"], "'--every'"),
        (["top", "127.0.0.1:9", "--tls-ca", "x"], "--tls-ca is given, but http://127.0.0.1:9/metrics is not https"),
        (["top", "https://127.0.0.1:9", "--once", "--tls-ca", ""], "--tls-ca: cannot read ."),
        (["bench", "startup", "--timeout", "nan"], "'--timeout'"),
        (["bench", "startup", "--timeout", "inf"], "'--timeout'"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert not out and words in line
