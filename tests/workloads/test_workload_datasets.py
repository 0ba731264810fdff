"""What datasets ask for: lengths, sharing, contents, and the files they are read from."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.requests import Trace
from jaxserve.lab.workloads.arrivals import ArrivalOptions
from jaxserve.lab.workloads.datasets import DatasetOptions, make_samples, make_shapes
from jaxserve.lab.workloads.prompts import IdPrompts, TextPrompts, WordPrompts
from jaxserve.lab.workloads.samples import Part
from jaxserve.testing import ByteTokenizer
from jaxserve.text import load_tokenizer

DEMO = Path(__file__).parents[2] / "jaxserve" / "demo_model"


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_lognormal_lengths_have_the_mean_and_the_spread_asked_for() -> None:
    options = DatasetOptions(name="lognormal", num_prompts=20_000, input_len=500, output_len=100, length_cv=0.5)
    for lengths, mean in (
        ([shape.prompt_len for shape in make_shapes(options)], 500),
        ([shape.output_len for shape in make_shapes(options)], 100),
    ):
        assert np.mean(lengths) == pytest.approx(mean, rel=0.02)
        assert np.std(lengths) / np.mean(lengths) == pytest.approx(0.5, rel=0.05)
        assert np.mean(np.log(lengths)) == pytest.approx(np.log(mean) - np.log(1.25) / 2, abs=0.02)
    with pytest.raises(ConfigError, match="--length-cv is 0"):
        make_shapes(dataclasses.replace(options, length_cv=0.0))


def test_random_lengths_stay_in_range() -> None:
    options = DatasetOptions(num_prompts=4000, input_len=100, output_len=10, range_ratio=0.2)
    samples = make_samples(options, IdPrompts(1000, 0))
    prompt_lens = np.array([s.prompt_len for s in samples])
    assert (prompt_lens.min(), prompt_lens.max()) == (80, 120)
    assert prompt_lens.mean() == pytest.approx(100, abs=1)
    assert {s.output_len for s in samples} == set(range(8, 13))
    assert all(len(s.prompt) == s.prompt_len for s in samples)


def test_equal_seeds_draw_equal_requests() -> None:
    options = DatasetOptions(num_prompts=5, input_len=50, range_ratio=0.5, seed=4)
    assert make_samples(options, IdPrompts(1000, 7)) == make_samples(options, IdPrompts(1000, 7))
    assert make_samples(options, IdPrompts(1000, 7)) != make_samples(options, IdPrompts(1000, 8))


def test_random_prompts_share_nothing() -> None:
    samples = make_samples(DatasetOptions(num_prompts=20, input_len=64), IdPrompts(50_000, 0))
    prompts = [s.prompt for s in samples]
    assert max(common_prefix(a, b) for a in prompts for b in prompts if a is not b) <= 1


def test_sharegpt_has_the_published_means_and_limits() -> None:
    shapes = make_shapes(DatasetOptions(name="sharegpt", num_prompts=30_000))
    prompt_lens = np.array([s.prompt_len for s in shapes])
    output_lens = np.array([s.output_len for s in shapes])
    assert prompt_lens.mean() == pytest.approx(161.31, rel=0.03)  # SOSP 2023, figure 11
    assert output_lens.mean() == pytest.approx(337.99, rel=0.03)
    assert (prompt_lens + output_lens).max() <= 2048
    assert min(prompt_lens.min(), output_lens.min()) == 4
    assert np.median(prompt_lens) < 0.7 * prompt_lens.mean()  # a long tail
    half = make_shapes(DatasetOptions(name="sharegpt", num_prompts=30_000, length_scale=0.5))
    assert np.mean([s.prompt_len for s in half]) == pytest.approx(161.31 / 2, rel=0.03)


def test_prefixes_repeat() -> None:
    options = DatasetOptions(
        name="prefix-repetition", num_prompts=30, num_prefixes=3, prefix_len=40, input_len=8, output_len=5
    )
    samples = make_samples(options, IdPrompts(50_000, 0))
    prefixes: dict[tuple[int, ...], int] = {}
    for sample in samples:
        assert sample.prompt_len == 48
        prefixes[sample.prompt[:40]] = prefixes.get(sample.prompt[:40], 0) + 1
    assert sorted(prefixes.values()) == [10, 10, 10]
    assert len({sample.prompt[40:] for sample in samples}) == 30


def test_parts_of_one_key_begin_alike() -> None:
    maker = IdPrompts(50_000, 0, frozenset({0, 5}))
    short, _ = maker.make([Part(3, 10)])
    long, length = maker.make([Part(3, 25), Part(4, 5)])
    assert long[:10] == short
    assert length == 30
    assert not {0, 5} & set(maker.make([Part(1, 5000)])[0])


@pytest.mark.parametrize("name", ["bytes", "demo"])
def test_text_has_the_length_asked_for(name: str) -> None:
    tokenizer = ByteTokenizer() if name == "bytes" else load_tokenizer(DEMO)
    maker = TextPrompts(tokenizer, 0)
    exact = 0
    for key in range(20):
        text, length = maker.make([Part(key, 30 + key), Part(100, 12)])
        assert length == len(tokenizer.encode(text, add_special_tokens=True))  # as a server counts
        exact += length == 42 + key
    assert exact >= 18


def test_words_need_no_vocabulary() -> None:
    text, length = WordPrompts(0).make([Part(0, 6), Part(1, 4)])
    assert length == len(text.split()) == 10
    assert WordPrompts(0).make([Part(0, 3)])[0] == " ".join(text.split()[:3])


def test_words_leave_room_for_what_the_server_adds() -> None:
    maker = WordPrompts(0, ("time", "day"), " ", 2)
    text, length = maker.make([Part(0, 6), Part(1, 4)])
    assert length == 10
    assert text.startswith(" ")
    assert len(text.split()) == 8
    assert set(text.split()) <= {"time", "day"}
    assert len(maker.make([Part(0, 1)])[0].split()) == 1  # a prompt is never empty


# ---- traces ----------------------------------------------------------------------------------------------------------

MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 500, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 3]},
    {"timestamp": 3000, "input_length": 100, "output_length": 1, "hash_ids": [9]},
]


def write_lines(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncake(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", MOONCAKE)
    options = DatasetOptions(name="mooncake", path=path, num_prompts=None, speed=2.0)
    samples = make_samples(options, IdPrompts(50_000, 0))
    assert [s.prompt_len for s in samples] == [1200, 1536, 100]
    assert [s.output_len for s in samples] == [50, 7, 1]
    assert [s.arrival_s for s in samples] == [0.0, 0.25, 1.5]
    assert common_prefix(samples[0].prompt, samples[1].prompt) == 1024  # two blocks
    assert common_prefix(samples[0].prompt, samples[2].prompt) == 0


def test_mooncake_scaled_down_still_shares_blocks(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", MOONCAKE)
    options = DatasetOptions(name="mooncake", path=path, num_prompts=2, length_scale=1 / 16)
    first, second = make_samples(options, IdPrompts(50_000, 0))
    assert (first.prompt_len, second.prompt_len) == (75, 96)
    assert common_prefix(first.prompt, second.prompt) == 64


def test_burstgpt_leaves_out_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,API log\n"
    )
    samples = make_samples(DatasetOptions(name="burstgpt", path=path, num_prompts=None), WordPrompts(0))
    assert [(s.prompt_len, s.output_len, s.arrival_s) for s in samples] == [(472, 18, 0.0), (417, 276, 113.0)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.0319600"),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00.061930+00:00"),
    ],
)
def test_azure(tmp_path: Path, first: str, second: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{first},374,44\n{second},396,109\n")
    samples = make_samples(DatasetOptions(name="azure", path=path, num_prompts=None), WordPrompts(0))
    assert [(s.prompt_len, s.output_len) for s in samples] == [(374, 44), (396, 109)]
    assert samples[1].arrival_s == pytest.approx(0.052, abs=1e-5)


def test_only_the_first_of_a_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", MOONCAKE)
    assert len(make_shapes(DatasetOptions(name="mooncake", path=path, num_prompts=2))) == 2


def test_custom(tmp_path: Path) -> None:
    rows = [
        {"prompt": "two words", "max_tokens": 3, "arrival_s": 0},
        {"prompt": [5, 6, 7]},
        {"messages": [{"role": "user", "content": "Hello you"}], "arrival_s": 1.5},
    ]
    path = write_lines(tmp_path / "mine.jsonl", rows)
    samples = make_samples(DatasetOptions(name="custom", path=path, num_prompts=None, output_len=9), WordPrompts(0))
    assert [s.output_len for s in samples] == [3, 9, 9]
    assert [s.prompt_len for s in samples] == [2, 3, 2]
    assert samples[1].prompt == (5, 6, 7)
    assert samples[2].prompt == ({"role": "user", "content": "Hello you"},)
    assert samples[2].arrival_s == 1.5


BAD_FILES = [
    ("mooncake", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', "not 1 blocks"),
    ("mooncake", '{"timestamp": 0, "input_length": 600}', "expected timestamp"),
    ("mooncake", "nonsense", "expected timestamp"),
    ("mooncake", '{"timestamp": NaN, "input_length": 6, "output_length": 1, "hash_ids": [1]}', "its time is nan"),
    ("burstgpt", "Timestamp,Request tokens,Response tokens\n9,2,3\ninf,2,3", ":3: its time is inf"),
    ("burstgpt", "Timestamp,Request tokens\n1,2", "no column Response tokens"),
    ("burstgpt", "Timestamp,Request tokens,Response tokens\n\n1,2,x", ":3: "),
    ("burstgpt", "Timestamp,Request tokens,Response tokens\n1,-2,3", ":2: -2 tokens of a prompt and 3"),
    ("burstgpt", f"Timestamp,Request tokens,Response tokens\n{'1' * 200_000},2,3", ":2: field larger than"),
    ("mooncake", '{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": ["a"]}', ":1: expected"),
    ("mooncake", '{"timestamp": 0, "input_length": Infinity, "output_length": 1, "hash_ids": [1]}', "cannot convert"),
    ("custom", '{"prompt": [-1]}', "token ids from 0"),
    ("custom", '{"prompt": [99999999999999999999]}', "token ids from 0"),
    ("custom", "[" * 100_000, "not JSON"),
    ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,2,3", ":2: "),
    ("burstgpt", "Timestamp,Request tokens,Response tokens\n9,2,3\n1,2,3", ":3: it is earlier"),
    ("custom", '{"prompt": "x", "max_token": 3}', "unknown field max_token"),
    ("custom", '{"max_tokens": 3}', "'prompt' or 'messages'"),
    ("custom", '{"prompt": "x", "max_tokens": 0}', "max_tokens is 0"),
    ("custom", '{"prompt": "x", "arrival_s": NaN}', "arrival_s is nan"),
    ("custom", '{"prompt": ""}', "not empty"),
    ("custom", '{"messages": ["x"]}', "role, content"),
    ("custom", "[1]", "expected an object"),
    ("sharegpt", "{", "not JSON"),
    ("sharegpt", "{}", "expected a list of conversations, got dict"),
    ("sharegpt", '[{"id": "a"}]', "entry 0 has no list of conversations"),
    ("sharegpt", '[{"conversations": [{"value": "a"}, {"from": "gpt"}]}]', "entry 0, turn 1 has no text"),
    ("sharegpt", "[]", "no requests"),
    ("custom", "", "no requests"),
]


@pytest.mark.parametrize(("name", "text", "words"), BAD_FILES)
def test_a_bad_file_is_told_by_its_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / "file"
    path.write_text(text + "\n")
    with pytest.raises(ConfigError, match=words):
        make_samples(DatasetOptions(name=name, path=path, num_prompts=None), WordPrompts(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "shakespeare"}, "there are random, lognormal, sharegpt"),
        ({"name": "mooncake"}, "--dataset-path"),
        ({"name": "random", "path": Path("x")}, "reads no file"),
        ({"num_prompts": None}, "no end"),
        ({"num_prompts": 0}, "--num-prompts is 0"),
        ({"input_len": 0}, "--input-len is 0"),
        ({"range_ratio": 1.0}, "--range-ratio"),
        ({"length_scale": 0.0}, "--length-scale"),
        ({"length_scale": float("inf")}, "--length-scale"),
        ({"speed": float("nan")}, "--speed"),
        ({"name": "sharegpt", "length_scale": 1e300}, "at most 1000"),
        ({"name": "lognormal", "length_cv": 1e200}, "at most 1000"),
        ({"name": "custom", "path": Path("/does/not/exist")}, "cannot read"),
    ],
)
def test_bad_options_are_told(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_samples(DatasetOptions(**options), WordPrompts(0))


def test_sharegpts_own_file_gives_its_lengths(tmp_path: Path) -> None:
    """As vLLM samples it: the first two turns, short and long ones and conversations of one turn left out."""
    lengths = [(10, 20), (3, 20), (10, 3), (1025, 5), (1000, 1049), (1000, 1048)]
    entries = [
        {"id": str(number), "conversations": [{"from": "human", "value": "w " * a}, {"from": "gpt", "value": "w " * b}]}
        for number, (a, b) in enumerate(lengths)
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "x", "conversations": []}, *entries]))
    options = DatasetOptions(name="sharegpt", path=path, num_prompts=None)
    assert [(one.prompt_len, one.output_len) for one in make_shapes(options)] == [(10, 20), (1000, 1048)]
    scaled = make_shapes(dataclasses.replace(options, num_prompts=1, length_scale=1.5))
    assert [(one.prompt_len, one.output_len) for one in scaled] == [(15, 30)]
    samples = make_samples(options, WordPrompts(0))
    assert [len(str(sample.prompt).split()) for sample in samples] == [10, 1000]
    trace = Trace(dataset=options, arrivals=ArrivalOptions(rate=2.0))
    assert [len(one.request.prompt_token_ids) for one in trace] == [10, 1000]
