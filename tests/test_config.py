"""Loading a config: sources, precedence, and that every mistake is one line which says what to change."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import jsonschema
import make_config_docs
import pytest
import yaml

from jaxserve.cli import main
from jaxserve.config import (
    ENVIRONMENT,
    field_docs,
    for_batches,
    for_one_user,
    format_config,
    get_value,
    load_config,
    policy_of,
    section_docs,
    settings_from_environment,
)
from jaxserve.config.json_schema import config_json_schema
from jaxserve.config.schema import Config
from jaxserve.config.yaml_lines import parse_yaml, read_yaml
from jaxserve.errors import ConfigError, SeveralMistakes

ROOT = Path(__file__).parents[1]


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "some.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def failure(*arguments, **keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments, environ={}, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    return message


def test_defaults_come_from_the_schema() -> None:
    resolved = load_config(environ={})
    assert set(resolved.sources.values()) == {"default"}
    assert list(resolved.sources) == [doc.name for doc in field_docs()]
    assert resolved.config.model.path == "demo"
    assert resolved.config.runtime.compile_cache == os.path.expanduser("~/.cache/jaxserve/xla")


def test_each_value_knows_its_source(tmp_path: Path) -> None:
    path = write(tmp_path, "cache:\n  num_pages: 7\n  page_size: 16\nserve:\n  grpc:\n    port: 8500\n")
    resolved = load_config(path, ["cache.num_pages=9"], environ={"JAXSERVE_LOG_LEVEL": "debug"})
    assert resolved.config.cache.num_pages == 9
    assert resolved.sources["cache.num_pages"] == "--set"
    assert resolved.sources["cache.page_size"] == f"{path}:3"
    assert resolved.sources["serve.grpc.port"] == f"{path}:6"
    assert resolved.sources["runtime.log_level"] == "environment JAXSERVE_LOG_LEVEL"
    assert resolved.sources["serve.host"] == "default"


def test_later_sources_win(tmp_path: Path) -> None:
    path = write(tmp_path, "runtime: {log_level: error}")
    environ = {"JAXSERVE_LOG_LEVEL": "warning"}
    assert load_config(path, environ={}).config.runtime.log_level == "error"
    assert load_config(path, environ=environ).config.runtime.log_level == "warning"
    assert load_config(path, ["runtime.log_level=debug"], environ=environ).config.runtime.log_level == "debug"
    assert load_config(None, ["cache.num_pages=1", "cache.num_pages=2"], environ={}).config.cache.num_pages == 2


def test_overrides_take_dotted_names_sections_and_mappings() -> None:
    wanted = load_config(None, ["serve.grpc.port=1", "serve.host=h"], environ={}).config
    for overrides in (
        {"serve.grpc.port": 1, "serve.host": "h"},
        {"serve": {"grpc": {"port": 1}, "host": "h"}},
        {"serve.grpc": {"port": 1}, "serve.host": "h"},
        ["serve={grpc: {port: 1}, host: h}"],
    ):
        assert load_config(None, overrides, environ={}).config == wanted
    assert load_config(None, {"serve.host": "h"}, environ={}).sources["serve.host"] == "override"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-1", 0.1), ("1", 1.0), ("5E-1", 0.5), (".5", 0.5)],
)
def test_numbers_may_be_written_as_people_do(text: str, value: float) -> None:
    assert load_config(None, [f"cache.memory_fraction={text}"], environ={}).config.cache.memory_fraction == value


def test_null_and_lists_and_values_with_equal_signs() -> None:
    set_ = ["runtime.compile_cache=null", "runtime.token_buckets=[64, 128]", "model.name=a=b"]
    config = load_config(None, set_, environ={}).config
    assert config.runtime.compile_cache is None
    assert config.runtime.token_buckets == [64, 128]
    assert config.model.name == "a=b"


def test_paths_in_a_file_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    path = write(tmp_path / "inner", "model: {path: ../weights, tokenizer: demo}")
    monkeypatch.chdir(tmp_path)
    config = load_config("inner/some.yaml", environ={}).config
    assert config.model.path == str(tmp_path / "weights")
    assert config.model.tokenizer == "demo"
    assert load_config(path, ["model.path=weights"], environ={}).config.model.path == str(tmp_path / "weights")
    assert load_config(None, ["model.path=./demo"], environ={}).config.model.path == str(tmp_path / "demo")
    home = load_config(None, ["model.path=~/w"], environ={}).config.model.path
    assert home == os.path.expanduser("~/w")


def test_paths_in_a_table_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    path = write(tmp_path / "inner", "adapters: {slots: 1, directory: more, load: {a: ../a, b: ~/b, c: /c}}")
    monkeypatch.chdir(tmp_path)
    adapters = load_config(path, environ={}).config.adapters
    assert adapters.load == {"a": str(tmp_path / "a"), "b": os.path.expanduser("~/b"), "c": "/c"}
    assert adapters.directory == str(tmp_path / "inner" / "more")
    given = load_config(path, ["adapters.load={a: a}"], environ={}).config.adapters.load
    assert given == {"a": str(tmp_path / "a")}, "of the working directory, and in the place of those of the file"
    with pytest.raises(ConfigError, match=r"adapters\.load is \{'a': 3\}"):
        load_config(path, {"adapters.load": {"a": 3}}, environ={})


def test_the_location_of_a_store_is_a_path_where_the_store_is_a_directory(tmp_path: Path) -> None:
    files = {name: f"{name}.pem" for name in ("secret_file", "tls_ca", "tls_cert", "tls_key")}
    path = write(
        tmp_path, f"store: {{kind: file, location: pages, {', '.join(f'{n}: {f}' for n, f in files.items())}}}"
    )
    store = load_config(path, environ={}).config.store
    assert store.location == str(tmp_path / "pages")
    assert {name: getattr(store, name) for name in files} == {n: str(tmp_path / file) for n, file in files.items()}
    home = load_config(path, ["store.location=~/pages", "store.secret_file=~/secret"], environ={}).config.store
    assert [home.location, home.secret_file] == [os.path.expanduser(f"~/{name}") for name in ("pages", "secret")]
    for kind, location in (("remote", "~host:7070"), ("object", "s3://bucket/pages"), ("my.stores:Mine", "here")):
        settings = {"store.kind": kind, "store.location": location}
        assert load_config(None, settings, environ={}).config.store.location == location


def test_some_settings_have_short_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_config(environ={"JAXSERVE_COMPILE_CACHE": "null"}).config.runtime.compile_cache is None
    assert load_config(environ={"JAXSERVE_COMPILE_CACHE": ""}).sources["runtime.compile_cache"] == "default"
    with pytest.raises(ConfigError, match="environment JAXSERVE_LOG_LEVEL: runtime.log_level is 'loud'.*one of debug"):
        load_config(environ={"JAXSERVE_LOG_LEVEL": "loud"})
    values = {
        "JAXSERVE_LOG_LEVEL": "error",
        "JAXSERVE_NUM_PROCESSES": "2",
        "JAXSERVE_PROCESS_ID": "1",
        "OTEL_SERVICE_NAME": "x",
    }
    for variable, name in ENVIRONMENT.items():
        monkeypatch.setenv(variable, values.get(variable, "null"))
        assert load_config().sources[name] == f"environment {variable}"


def test_every_setting_has_a_variable() -> None:
    for doc in field_docs():
        variable = f"JAXSERVE_{doc.name.upper().replace('.', '__')}"
        resolved = load_config(environ={variable: yaml.safe_dump(doc.default)})
        assert resolved.sources[doc.name] == f"environment {variable}"
        assert settings_from_environment(resolved) == {doc.name: variable}
        assert resolved.config == load_config(environ={}).config


def test_the_environment_comes_between_the_file_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "sched: {max_rows: 1}\nruntime: {token_buckets: [8]}")
    environ = {"JAXSERVE_SCHED__MAX_ROWS": "4", "JAXSERVE_RUNTIME__TOKEN_BUCKETS": "null"}
    config = load_config(path, environ=environ).config
    assert (config.sched.max_rows, config.runtime.token_buckets) == (4, None)
    assert load_config(path, ["sched.max_rows=5"], environ=environ).config.sched.max_rows == 5
    lists = {
        "JAXSERVE_RUNTIME__TOKEN_BUCKETS": "[64, 128]",
        "JAXSERVE_ADAPTERS__LOAD": "{a: a}",
        "JAXSERVE_MODEL__NAME": "'7'",
        "JAXSERVE_SCHED__MAX_ROWS": "",
    }
    config = load_config(path, environ=lists).config
    assert (config.runtime.token_buckets, config.model.name, config.sched.max_rows) == ([64, 128], "7", 1)
    assert config.adapters.load == {"a": os.path.abspath("a")}, "relative to the working directory"


@pytest.mark.parametrize(
    ("variable", "fragment"),
    [
        ("JAXSERVE_SCHED__MAX_ROW", "did you mean 'JAXSERVE_SCHED__MAX_ROWS'?"),
        ("JAXSERVE_CACHE_NUM_PAGES", "did you mean 'JAXSERVE_CACHE__NUM_PAGES'?"),
        ("JAXSERVE_NUM_PAGES", "did you mean 'JAXSERVE_CACHE__NUM_PAGES'?"),
        ("JAXSERVE_SERVE__HTTP__API_KEY", "here it is 'serve.http.api_keys_file'"),
        ("JAXSERVE_LOG_LEVELS", "did you mean 'JAXSERVE_LOG_LEVEL'?"),
        ("JAXSERVE_MAX_MODEL_LEN", "model.max_len"),
        ("JAXSERVE_QUITE_DIFFERENT", "settings are 'JAXSERVE_SCHED__MAX_ROWS' and so on"),
        ("JAXSERVE_PORT", "JAXSERVE_"),
        ("JAXSERVE_SERVICE__PORT", "did you mean"),
    ],
)
def test_a_variable_that_sets_nothing_is_refused_and_its_value_is_not_told(variable: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={variable: "sk-secret"})
    message = str(caught.value)
    assert message.startswith(f"environment {variable}: there is no such setting; ") and fragment in message
    assert "sk-secret" not in message
    assert load_config(environ={variable: "sk-secret"}, every_variable=False).config == load_config(environ={}).config


def test_variables_of_others_are_left_alone() -> None:
    others = {
        "JAXSERVE_SERVICE_HOST": "10.0.0.1",
        "JAXSERVE_SERVICE_PORT": "8500",
        "JAXSERVE_SERVICE_PORT_GRPC": "8500",
        "JAXSERVE_PORT": "tcp://10.0.0.1:8500",
        "JAXSERVE_PORT_8500_TCP": "tcp://10.0.0.1:8500",
        "JAXSERVE_PORT_8500_TCP_PROTO": "tcp",
        "JAXSERVE_CPU_REPLICAS_SERVICE_PORT_HTTP": "8000",
        "JAXSERVE_CPU_REPLICAS_PORT": "tcp://10.0.0.1:8500",
        "JAXSERVE_TEST_CACHE": "off",
        "JAXSERVER_X": "1",
    }
    assert set(load_config(environ=others).sources.values()) == {"default"}


def test_programs_have_the_short_variables_alone() -> None:
    environ = {"JAXSERVE_SCHED__MAX_ROWS": "4", "JAXSERVE_LOG_LEVEL": "error"}
    resolved = load_config(environ=environ, every_variable=False)
    assert settings_from_environment(resolved) == {"runtime.log_level": "JAXSERVE_LOG_LEVEL"}


def test_two_variables_of_one_setting_are_a_mistake() -> None:
    environ = {"JAXSERVE_LOG_LEVEL": "error", "JAXSERVE_RUNTIME__LOG_LEVEL": "error"}
    with pytest.raises(ConfigError, match="LOG_LEVEL: runtime.log_level is set by environment JAXSERVE_LOG_LEVEL, too"):
        load_config(environ=environ)


def test_what_may_be_a_secret_is_not_told() -> None:
    for name in ("serve.http.api_keys_file", "serve.grpc.tokens_file", "store.secret_file", "serve.http.tls_key"):
        for source in (
            {"overrides": {name: 12345}},
            {"environ": {f"JAXSERVE_{name.upper().replace('.', '__')}": "12345"}},
        ):
            with pytest.raises(ConfigError, match=f"{name} is a value that is not shown, but must be text") as caught:
                load_config(None, **{"environ": {}, **source})
            assert "12345" not in str(caught.value)


def test_format_loads_again(tmp_path: Path) -> None:
    set_ = ["model.name='7'", "runtime.token_buckets=[1, 2]", "cache.memory_fraction=5e-1", "serve.http.port=0"]
    first = load_config(None, [*set_, 'serve.http.batch_dir="a: #b"'], environ={})
    text = format_config(first)
    assert all(source in text for source in ("# default", "# --set"))
    again = load_config(write(tmp_path, text), environ={})
    assert again.config == first.config
    assert yaml.safe_load(text) == first.config.model_dump()


def test_the_config_is_frozen() -> None:
    config = load_config(environ={}).config
    with pytest.raises(ValueError, match="frozen"):
        config.cache.num_pages = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ("cache.num_page=1", ["--set", "'cache.num_page'", "did you mean 'cache.num_pages'"]),
        ("num_pages=1", ["'num_pages'", "'cache.num_pages'"]),
        ("cahe.num_pages=1", ["'cahe.num_pages'", "'cache.num_pages'"]),
        ("serve.grpc.prot=1", ["did you mean 'serve.grpc.port'"]),
        ("quite.different=1", ["known here: model, cache, sched"]),
        ("sched.policy.x=1", ["unknown key 'sched.policy.x'"]),
        ("cache.num_pages=many", ["cache.num_pages is 'many'", "an integer of at least 1, or null"]),
        ("cache.num_pages=0", ["is 0", "at least 1"]),
        ("cache.num_pages=1.5", ["is 1.5", "an integer"]),
        ("cache.num_pages=true", ["is True", "an integer"]),
        ("cache.prefix_caching=1", ["is 1", "true or false"]),
        ("cache.memory_fraction=1.5", ["a number of more than 0 and at most 1"]),
        ("sched.ageing_s=.nan", ["is nan", "a number of more than 0"]),
        ("sched.ageing_s=.inf", ["is inf"]),
        ("model.dtype=float16", ["'float16'", "one of auto, float32, bfloat16"]),
        ("model.name=12", ["is 12", "text, or null", "quote it"]),
        ("model.path=", ["model.path is None", "text"]),
        ("runtime.token_buckets=[8, 0]", ["a list, each item an integer of more than 0, or null"]),
        ("runtime.token_buckets=8", ["is 8", "a list"]),
        ("serve.grpc.port=65536", ["at most 65535"]),
        ("cache=3", ["cache is 3", "a section of settings"]),
        ("cache={num_pages: 1, num_pages: 2}", ["num_pages is given twice"]),
        ("model.path=[1", ["--set model.path", "not valid YAML"]),
        ("model.path=\x00", ["--set model.path", "not valid YAML"]),
        ("model.path=2020-99-99", ["--set model.path", "not valid YAML"]),
        ("model.path=" + "[" * 5000, ["--set model.path", "not valid YAML"]),
        ("nothing", ["KEY=VALUE", "'nothing'"]),
        ("=1", ["KEY=VALUE"]),
    ],
)
def test_a_wrong_override_is_one_line(given: str, fragments: list[str]) -> None:
    message = failure(None, [given])
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize(
    ("text", "line", "fragments"),
    [
        ("cache:\n  page_size: 16\n  num_page: 7\n", 3, ["unknown key 'cache.num_page'", "'cache.num_pages'"]),
        ("kernel: {}\n", 1, ["unknown key 'kernel'", "did you mean 'kernels'"]),
        ("cache.num_pages: 7\n", 1, ["unknown key 'cache.num_pages'", "nested"]),
        ("model:\n\n  dtype: 7\n", 3, ["model.dtype is 7", "one of auto"]),
        ("cache:\n  num_pages: 7\n\n  num_pages: 8\n", 4, ["cache.num_pages is given twice"]),
        ("cache: {}\ncache: {}\n", 2, ["cache is given twice"]),
        ("cache:\n  num_pages: [1\n", 3, ["not valid YAML"]),
        ("a: 1\n b: 2\n", 2, ["not valid YAML"]),
        ("cache: !!python/object:os.system {}\n", 1, ["not valid YAML"]),
        ("? [a]\n: 1\n", 1, ["a key must be a plain name"]),
        ("cache: 7\n", 1, ["cache is 7", "section"]),
        (b"cache:\n  num_pages: \xff\n", 2, ["not valid UTF-8"]),
        ("model:\n  name: \x07\n", 2, ["not valid YAML"]),
        ("a: 1\n---\nb: 2\n", 2, ["not valid YAML"]),
    ],
)
def test_a_wrong_file_is_one_line_with_the_place(
    tmp_path: Path, text: str | bytes, line: int, fragments: list[str]
) -> None:
    path = write(tmp_path, text)
    message = failure(path)
    assert message.startswith(f"{path}:{line}: "), message
    assert all(fragment in message for fragment in fragments), message


def test_all_mistakes_are_told_at_once_by_their_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "cache:\n  num_pages: 0\n  page_sise: 16\nmodel:\n  dtype: 7\nkernels: 3\nsched: {a.b: 1}\n")
    given = ["cache.dtype=int7", "quite.different=1", "nothing", "model.path=[", "runtime.token_buckets=[0, x]"]
    with pytest.raises(SeveralMistakes) as caught:
        load_config(path, given, environ={"JAXSERVE_LOG_LEVEL": "loud"})
    lines = str(caught.value).splitlines()
    wanted = [
        f"{path}:2: cache.num_pages is 0, but must be an integer of at least 1, or null",
        f"{path}:3: unknown key 'cache.page_sise'; did you mean 'cache.page_size'?",
        f"{path}:5: model.dtype is 7, but must be one of auto",
        f"{path}:6: kernels is 3, but must be a section",
        f"{path}:7: unknown key 'sched.a.b'; in a mapping",
        "environment JAXSERVE_LOG_LEVEL: runtime.log_level is 'loud'",
        "--set: cache.dtype is 'int7'",
        "--set: unknown key 'quite.different'",
        "--set wants KEY=VALUE",
        "--set model.path: not valid YAML",
        "--set: runtime.token_buckets is [0, 'x']",
    ]
    assert len(lines) == len(wanted)
    assert all(line.startswith(beginning) for line, beginning in zip(lines, wanted, strict=True)), lines
    flags = [word for one in given[:3] for word in ("--set", one)]
    assert main(["config", "--config", str(path), *flags]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[:5] == [f"error: {line}" for line in lines[:5]]
    assert len(told.err.splitlines()) == 8


def test_a_file_that_cannot_be_read_hides_no_other_mistake(tmp_path: Path) -> None:
    with pytest.raises(SeveralMistakes) as caught:
        load_config(tmp_path / "none.yaml", {"cache.num_pages": 0, "kernel": 1}, environ={})
    assert [line.partition(" ")[0] for line in str(caught.value).splitlines()] == ["cannot", "override:", "override:"]


def test_a_mistake_that_a_later_source_replaces_is_none(tmp_path: Path) -> None:
    path = write(tmp_path, "cache: {num_pages: 0}")
    assert load_config(path, ["cache.num_pages=1"], environ={}).config.cache.num_pages == 1


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "7\n"])
def test_a_file_must_hold_sections(tmp_path: Path, text: str) -> None:
    assert "a config file holds sections (model, cache" in failure(write(tmp_path, text))


@pytest.mark.parametrize("text", ["", "# nothing\n", "cache:\n", "cache: {}\nserve:\n  grpc:\n"])
def test_empty_sections_are_fine(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path, text), environ={}).config == load_config(environ={}).config


def test_an_unreadable_file(tmp_path: Path) -> None:
    assert (
        failure(tmp_path / "none.yaml")
        == f"cannot read the config file {tmp_path}/none.yaml: No such file or directory"
    )
    assert "Is a directory" in failure(tmp_path)


@pytest.mark.parametrize("doc", field_docs(), ids=lambda doc: doc.name)
def test_every_field_refuses_a_wrong_type_by_name(doc) -> None:
    message = failure(None, {doc.name: object})
    assert message.startswith(f"override: {doc.name} is ")
    assert message.endswith(f"but must be {doc.wanted}")


@pytest.mark.parametrize("doc", field_docs(), ids=lambda doc: doc.name)
def test_every_field_has_a_sentence_and_a_working_default(doc) -> None:
    assert doc.description.endswith(".")
    resolved = load_config(None, {doc.name: doc.default}, environ={})
    assert resolved.config == load_config(environ={}).config
    assert resolved.sources[doc.name] == "override"
    assert get_value(Config(), doc.name) == doc.default


def test_every_section_has_a_sentence() -> None:
    assert all(text.endswith(".") for text in section_docs().values()), section_docs()


def test_the_page_of_the_docs_is_up_to_date() -> None:
    """When this fails: python scripts/make_config_docs.py"""
    assert make_config_docs.PAGE.read_text(encoding="utf-8") == make_config_docs.render()


def test_the_schema_for_editors_is_up_to_date_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """When this fails: python scripts/make_config_docs.py"""
    kept = make_config_docs.SCHEMA.read_text(encoding="utf-8")
    assert kept == make_config_docs.render_schema()
    assert main(["config", "schema"]) == 0
    assert capsys.readouterr().out == kept
    assert main(["config", "schema", "--set", "cache.num_pages=1"]) == 2
    assert "leave out --config and --set" in capsys.readouterr().err
    jsonschema.Draft202012Validator.check_schema(json.loads(kept))


def _is_valid(tree: Any) -> bool:
    return jsonschema.Draft202012Validator(config_json_schema()).is_valid(tree)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_name_the_schema_and_follow_it(path: Path) -> None:
    first, _, _ = path.read_text(encoding="utf-8").partition("\n")
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert named != first and (path.parent / named).samefile(make_config_docs.SCHEMA)
    tree, _ = read_yaml(path)
    assert _is_valid(tree)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("cache:\nserve: {grpc: }", True),
        ("cache: {num_pages: null}", True),
        ("cache: {num_pages: 0}", False),
        ("cache: {num_page: 1}", False),
        ("kernel: {}", False),
        ("cache: 7", False),
        ("model: {dtype: float16}", False),
        ("model: {name: 7}", False),
        ("runtime: {token_buckets: [8, 0]}", False),
        ("serve: {tenants: {named: {a: {burst: 1}}}}", False),
    ],
)
def test_the_schema_accepts_what_the_loader_accepts(text: str, valid: bool, tmp_path: Path) -> None:
    assert _is_valid(parse_yaml(text, "here")) == valid
    if valid:
        load_config(write(tmp_path, text), environ={})
    else:
        failure(write(tmp_path, text))


@pytest.mark.parametrize("doc", field_docs(), ids=lambda doc: doc.name)
def test_the_schema_describes_each_setting(doc) -> None:
    place = config_json_schema()
    sections = place["$defs"]
    *folders, last = doc.name.split(".")
    for name in folders:
        reference, _ = place["properties"][name]["anyOf"]
        place = sections[reference["$ref"].rpartition("/")[2]]
    assert place["additionalProperties"] is False
    assert place["properties"][last]["description"] == doc.description
    assert jsonschema.Draft202012Validator({**place["properties"][last], "$defs": sections}).is_valid(doc.default)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path: Path) -> None:
    config = load_config(path, environ={}).config
    assert config.serve.grpc.port is not None
    assert sys.modules["yaml"] is yaml  # loading must not replace PyYAML's own loader
    assert yaml.safe_load("1e-3") == "1e-3"


@pytest.mark.parametrize(
    ("overrides", "policy"),
    [
        ({}, "fcfs"),
        ({"serve.http.api_keys_file": "keys"}, "fair"),
        ({"serve.grpc.tokens_file": "tokens"}, "fair"),
        ({"serve.admin_tokens_file": "tokens"}, "fcfs"),
        ({"serve.http.api_keys_file": "keys", "sched.policy": "fcfs"}, "fcfs"),
        ({"sched.policy": "sjf"}, "sjf"),
    ],
)
def test_a_server_with_keys_shares_between_them_unless_told_otherwise(overrides: dict[str, object], policy: str):
    resolved = load_config(None, overrides, environ={})
    assert policy_of(resolved.config) == policy
    asked = overrides.get("sched.policy", "fcfs")
    for config in (for_one_user(resolved).config, for_batches(resolved).config):
        assert policy_of(config) == config.sched.policy == asked


def test_a_policy_in_a_file_is_looked_for_beside_the_config_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("sched: {policy: './my.py:Mine?quantum=3', lengths: 'my_module:Mine'}\ncache: {host_policy: lru}\n")
    config = load_config(file).config
    assert config.sched.policy == f"{tmp_path / 'my.py'}:Mine?quantum=3"
    assert (config.sched.lengths, config.cache.host_policy) == ("my_module:Mine", "lru")
    assert load_config(None, {"sched.policy": "./my.py:Mine"}).config.sched.policy == "./my.py:Mine"
