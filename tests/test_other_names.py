"""Names of other engines: each door says what they are here, and nothing that it says is missing here."""

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxserve import AsyncLLM, SamplingParams
from jaxserve.cli import COMMANDS as OURS
from jaxserve.cli import load_command, main
from jaxserve.config import field_docs, load_config
from jaxserve.errors import ConfigError, InvalidRequest, JaxserveError, UnsupportedOption
from jaxserve.offline.llm import LLM
from jaxserve.serve.http.errors import invalid_body
from jaxserve.serve.http.requests import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    TokenizeRequest,
    field_names,
)
from jaxserve.values.other_names import ATTRIBUTES, COMMANDS, ROWS, SAME, Place, Row, answer, attribute_answer
from jaxserve.values.other_names import SAMPLING as FIELDS_OF_SAMPLING

SETTINGS = {doc.name for doc in field_docs()}
SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
ARGUMENTS = set(inspect.signature(LLM.__init__).parameters)
METHODS = (LLM.generate, LLM.chat, LLM.stream, LLM.embed, LLM.score, LLM.sleep, AsyncLLM.generate, AsyncLLM.chat)
CALLS = {name for method in METHODS for name in inspect.signature(method).parameters}
BODIES = (CompletionRequest, ChatRequest, EmbeddingRequest, TokenizeRequest, RerankRequest)
FIELDS = frozenset().union(*(field_names(body) for body in BODIES))
OTHER_ENGINES: dict[str, str] = yaml.safe_load((Path(__file__).parent / "fixtures/other_engines.yaml").read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names.split()[0])
def test_what_a_row_points_to_exists(row: Row) -> None:
    assert not row.setting or row.setting in SETTINGS
    assert not row.model or row.model in ARGUMENTS
    assert not row.call or row.call in CALLS
    assert not row.sampling or row.sampling in SAMPLING
    request = row.request or row.sampling
    assert not request or request in FIELDS
    assert row.note or row.setting or row.call or request, "it says nothing"
    words = f" {row.note} ".replace(";", " ").replace(",", " ").replace("`", " ").split()
    for word in words:
        section, dot, _ = word.rstrip(".").partition(".")
        if dot and section in {name.partition(".")[0] for name in SETTINGS}:
            assert word.rstrip(".") in SETTINGS, word


def test_names_that_work_are_arguments_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for name, setting in SAME.items():
        assert setting in SETTINGS and name in ARGUMENTS
        if name not in ("skip_tokenizer_init", "num_gpu_blocks_override") and not name.startswith("enable_"):
            assert f"--{name.replace('_', '-')} " in shown, name


def test_every_name_is_there_once_and_answered_everywhere() -> None:
    names = [name for row in ROWS for name in row.names.split()]
    assert len(names) == len(set(names))
    assert not set(names) & set(SAME)
    assert set(FIELDS_OF_SAMPLING.split()) == SAMPLING
    assert len(names) + len(SAME) >= 190
    for name in (*names, *SAME):
        for place in Place:
            said = answer(name, place)
            assert said and "leave it out" not in said, (name, place)
    assert answer("nonsense", Place.CALL) is None


def _here(group: str) -> tuple[Place, set[str]]:
    """Where the names of a group of the file are written, and those that work there."""
    if group.endswith("call"):
        return Place.CALL, CALLS
    if group.endswith(("sampling", "generation_config")):
        return Place.SAMPLING, SAMPLING
    if group.endswith("request"):
        return Place.REQUEST, set(FIELDS | CompletionRequest.marks | ChatRequest.marks)
    if group.endswith("tokenize"):
        return Place.REQUEST, set(field_names(TokenizeRequest))
    if group.endswith(("engine", "model")):
        return Place.MODEL, ARGUMENTS
    flags: Any = load_command("serve").params
    return Place.FLAG, {name for flag in flags for name in (flag.name, *flag.opts)}


@pytest.mark.parametrize("group", OTHER_ENGINES)
def test_every_name_of_another_engine_works_or_is_answered(group: str) -> None:
    names = OTHER_ENGINES[group].split()
    if group.endswith("methods"):
        silent = [name for name in names if not hasattr(LLM, name) and attribute_answer(name) is None]
    else:
        place, known = _here(group)
        silent = [name for name in names if name not in known and answer(name, place) is None]
    assert names and not silent


def test_a_name_itself_comes_before_a_pattern() -> None:
    assert answer("speculative_unheard_of", Place.MODEL) == answer("speculative_algorithm", Place.MODEL)
    assert answer("speculative_num_draft_tokens", Place.SETTING) is not None
    assert "speculation.width" in str(answer("speculative_num_draft_tokens", Place.SETTING))


def test_commands_of_others_are_none_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert not set(COMMANDS) & set(OURS)
    for name, here in COMMANDS.items():
        assert main([name, "x"]) == 2
        assert capsys.readouterr().err == f"error: No such command {name!r}; here it is {here}\n"


def _flag(flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["run", flag, "x"]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (
            "--max-model-len",
            "No such option: --max-model-len; here it is --set model.max_len=VALUE (see jaxserve run --h",
        ),
        ("--kv-cache-dtype", "--set cache.dtype=VALUE (keys and values alike)"),
        ("--port", "--set serve.http.port=VALUE (`jaxserve serve MODEL --port N`; of gRPC: serve.grpc.port)"),
        ("--api-key", "--set serve.http.api_keys_file=VALUE (a file, one key a line"),
        ("--trust-remote-code", "not needed here: no code of a checkpoint is ever run"),
        ("--no-enable-prefix-caching", "--set cache.prefix_caching=VALUE"),
        ("--n-gpu-layers", "not needed here: all layers are on JAX's devices"),
        ("--num-beams", "not implemented here: there is no beam search"),
        ("--min-p", "No such option: --min-p"),
        ("--max-new-tokens", "here it is --max-tokens VALUE"),
        ("-n", "No such option: -n; here it is --max-tokens VALUE"),
        ("-ngl", "No such option: -ngl; not needed here: all layers"),
        ("-hf", "No such option: -hf; not needed here: jaxserve downloads nothing"),
        ("-c", "No such option: -c; here it is --set model.max_len=VALUE"),
        ("-seed", "No such option: -seed; did you mean --seed?"),
        ("-y", "No such option: -y (see jaxserve run --help)"),
        ("--modle", "(Possible options: --model)"),
    ],
)
def test_flags(flag: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in _flag(flag, capsys)


def test_a_command_without_settings_has_nothing_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--max-model-len", "3"]) == 2
    assert "--set" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("sched.max_num_seqs", "unknown key 'sched.max_num_seqs'; here it is 'sched.max_rows'"),
        ("http.port", "here it is 'serve.http.port'"),
        ("model.enable_lora", "here it is 'adapters.slots'"),
        ("model.trust_remote_code", "not needed here"),
        ("max_new_tokens", "each request says it, as 'max_tokens'"),
        ("sched.max_row", "did you mean 'sched.max_rows'"),
    ],
)
def test_keys(key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"{key}=1"])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"enable_lora": True},
            "here it is the setting 'adapters.slots': from_config(None, overrides={'adapters.slots'",
        ),
        ({"speculative_config": {}}, "'speculation.method'"),
        ({"kv_cache_dtype": "fp8"}, "'cache.dtype'"),
        ({"enforce_eager": True}, "not needed here: every step is a compiled program"),
        ({"max_seq_len": 4}, "here it is 'max_model_len'"),
        ({"mem_fraction_static": 0.5}, "here it is 'gpu_memory_utilization'"),
        ({"schedule_policy": "lpm"}, "here it is 'scheduler'"),
        ({"max_num_seq": 4}, "did you mean 'max_num_seqs'"),
        ({"temp": 1}, "here it is SamplingParams(temperature=...)"),
        ({"lora_request": 1}, "here it is 'adapter', an argument of the call that asks"),
        ({"temperature": 0.0}, "here it is SamplingParams(temperature=...)"),
    ],
)
@pytest.mark.parametrize("door", [LLM, AsyncLLM])
def test_arguments(door: Callable[..., Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        door(model="demo", **options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_new_tokens", "sampling option 'max_new_tokens' is not supported; here it is 'max_tokens'"),
        ("structured_outputs", "here it is 'structured'"),
        ("guided_decoding", "here it is 'structured'"),
        ("logits_processors", "not implemented here: logit_bias"),
        ("best_of", "here it is 'n' (ask for n answers with logprobs"),
        ("lora_request", "here it is 'adapter', an argument of the call"),
        ("kv_cache_dtype", "the engine has it, not a request: the setting 'cache.dtype'"),
        ("stream", "over HTTP it is 'stream' (in Python: LLM.stream, or AsyncLLM)"),
        ("temprature", "Did you mean 'temperature'?"),
        ("qqq", "known: n, temperature,"),
    ],
)
def test_sampling(name: str, words: str) -> None:
    for make in (lambda: SamplingParams(**{name: 1}), lambda: SamplingParams.from_dict({"n": 2, name: 1})):
        with pytest.raises(UnsupportedOption) as caught:
            make()
        assert words in str(caught.value)
    params = SamplingParams(n=2, stop="a")
    assert pickle.loads(pickle.dumps(params)) == params == dataclasses.replace(params)


@pytest.mark.parametrize(
    ("method", "name", "words"),
    [
        (LLM.generate, "lora_request", "generate has no argument 'lora_request'; here it is 'adapter'"),
        (LLM.generate, "max_new_tokens", "here it is SamplingParams(max_tokens=...)"),
        (LLM.generate, "temperature", "here it is SamplingParams(temperature=...)"),
        (LLM.generate, "prompt_token_ids", "here it is 'prompts' (a list of ids is a prompt)"),
        (
            LLM.generate,
            "gpu_memory_utilization",
            "the engine has it, not a request: the setting 'cache.memory_fraction'",
        ),
        (LLM.generate, "num_beams", "not implemented here: there is no beam search"),
        (LLM.chat, "enable_thinking", "here it is 'chat_template_kwargs'"),
        (LLM.chat, "mesages", "did you mean 'messages'?"),
        (LLM.embed, "pooling_params", "here it is 'dimensions' (and normalize and truncate_prompt_tokens"),
        (LLM.sleep, "level", "here it is 'keep_weights' (of sleep: true is level 1, false is level 2)"),
        (LLM.score, "qqq", "it has queries, documents"),
        (LLM.score, "text_1", "here it is 'queries'"),
        (LLM.generate, "stopping_criteria", "here it is SamplingParams(stop=...) (and stop_token_ids and max_tokens"),
        (LLM.stream, "use_tqdm", "of LLM.generate, chat, embed and score; other calls show no bar"),
        (LLM.reset_prefix_cache, "reset_connector", "running requests and a store keep their pages"),
        (AsyncLLM.generate, "lora_request", "here it is 'adapter'"),
        (AsyncLLM.embed, "pooling_params", "here it is 'dimensions'"),
    ],
)
def test_calls(method: Callable[..., Any], name: str, words: str) -> None:
    door = (LLM if method.__qualname__.startswith("LLM") else AsyncLLM).__new__
    with pytest.raises(JaxserveError) as caught:
        method(door(LLM), "a", **{name: 1})
    assert words in str(caught.value)


@pytest.mark.parametrize("door", [LLM, AsyncLLM])
def test_attributes(door: type[LLM] | type[AsyncLLM]) -> None:
    model = door.__new__(door)
    for name, here in ATTRIBUTES.items():
        if hasattr(door, name):  # AsyncLLM has some of them
            continue
        for owner, words in ((model, f"{door.__name__!r} object"), (door, f"type object {door.__name__!r}")):
            with pytest.raises(AttributeError) as caught:
                getattr(owner, name)
            assert str(caught.value) == f"{words} has no attribute {name!r}; {attribute_answer(name)}"
        assert here.startswith("not ") or hasattr(LLM, here.partition("(")[0].split()[0].rstrip(",")), here
    with pytest.raises(AttributeError, match="'nonsense'$"):
        _ = model.nonsense  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue]


def test_sampling_params_as_a_dictionary() -> None:
    llm = LLM.__new__(LLM)
    with pytest.raises(UnsupportedOption, match="'max_new_tokens' is not supported; here it is 'max_tokens'"):
        llm._sampling({"max_new_tokens": 3})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidRequest, match=r"a dictionary; write SamplingParams.from_dict\(...\) around it"):
        llm._sampling({"temperature": 0.0})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_none_asks_for_nothing() -> None:
    with pytest.raises(UnsupportedOption, match="None is not needed, leave it out; with a value here it is 'adapter'"):
        LLM.generate(LLM.__new__(LLM), "a", lora_request=None)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("ours", "name", "words"),
    [
        (
            CompletionRequest,
            "guided_json",
            "guided_json is not a field that this server knows; here it is 'structured_o",
        ),
        (ChatRequest, "max_new_tokens", "; here it is 'max_tokens'"),
        (ChatRequest, "lora_path", "; here it is 'model'"),
        (ChatRequest, "enable_thinking", "; here it is 'chat_template_kwargs'"),
        (ChatRequest, "mirostat", "; not implemented here: temperature, top_k, top_p and min_p choose"),
        (ChatRequest, "max_model_len", "; the engine has it, not a request: the setting 'model.max_len'"),
        (TokenizeRequest, "content", "; here it is 'prompt'"),
        (TokenizeRequest, "with_pieces", "; here it is 'return_token_strs'"),
        (EmbeddingRequest, "guided_json", "; this route has nothing like it"),
        (CompletionRequest, "functions", "; this route has nothing like it"),
        (ChatRequest, "newest", "newest is not a field that this server knows"),
    ],
)
def test_fields(ours: Any, name: str, words: str) -> None:
    problem = {"type": "extra_forbidden", "loc": ("body", name), "msg": ""}
    error = invalid_body([problem], field_names(ours))
    assert words in str(error) and (name != "newest" or str(error) == words)
    nested = invalid_body([{**problem, "loc": ("body", "stream_options", name)}], field_names(ours))
    assert str(nested) == f"stream_options.{name} is not a field that this server knows"
