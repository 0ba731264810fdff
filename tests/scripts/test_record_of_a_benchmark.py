"""What every benchmark writes down beside its results."""

import json

import pytest
import record


def test_a_record_names_the_machine_its_rates_and_what_the_caller_adds(tmp_path, monkeypatch):
    rates = {"read_gb_per_s": {"1 thread": 8.0}}
    monkeypatch.setattr(record, "machine_rates", lambda: rates)  # measuring takes seconds: tests/bench/test_rates.py
    path = tmp_path / "folder" / "results.json"
    record.write_record(path, [1, 2], repeats=3)
    found = json.loads(path.read_text())
    assert found["results"] == [1, 2]
    assert found["about"]["rates"] == rates and found["about"]["repeats"] == 3
    assert {"command", "commit", "processor", "cores", "versions"} <= set(found["about"])


def test_a_record_that_cannot_be_written_is_printed(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="so the record is above"):
        record.write_record(tmp_path / "file" / "results.json", [1, 2], rates=None)
    assert json.loads(capsys.readouterr().out)["results"] == [1, 2]
