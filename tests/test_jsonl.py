"""Lines of results are JSON that every reader takes, whatever the numbers are."""

import io
import json
import math
from typing import Any

import pytest

from jaxserve.offline import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxserve.offline.jsonl import Entry, JsonWriter, read_entries


def strict(line: str) -> Any:
    def refuse(text: str) -> float:
        raise AssertionError(f"{text} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_logprobs_without_end_stay_json() -> None:
    completion = CompletionOutput(
        index=0, text="a", token_ids=[97], cumulative_logprob=-math.inf, finish_reason="length", stop_reason=None,
        logprobs=[{97: Logprob(-math.inf, 9), 98: Logprob(-0.5, 1), 99: Logprob(math.nan, 2)}],
    )  # fmt: skip
    output = RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[1, 2], prompt_logprobs=[None, {2: Logprob(-math.inf, 9)}],
        outputs=[completion], finished=True, num_cached_tokens=0,
        metrics=RequestMetrics(arrival_s=0.0, first_token_s=0.0, finished_s=0.0),
    )  # fmt: skip
    file = io.BytesIO()
    JsonWriter(file).write(Entry(line=1), output)
    result = strict(file.getvalue().decode())
    [position] = result["logprobs"]
    assert [position[i]["logprob"] for i in ("97", "98", "99")] == [-3.4028234663852886e38, -0.5, None]
    assert result["cumulative_logprob"] == -3.4028234663852886e38
    assert result["prompt_logprobs"] == [None, {"2": {**position["97"]}}]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", '[1, {"a": NaN}]'])
def test_an_id_that_could_not_be_given_back_is_refused_where_it_stands(number: str) -> None:
    text = f'{{"prompt": "a", "id": {number}}}\n{{"prompt": "b", "id": 1.5}}\n'
    [(_, problem), (entry, none)] = read_entries(io.BytesIO(text.encode()))
    assert "id has a number that is no JSON" in str(problem)
    assert none is None
    assert entry.id == 1.5
