"""Writes docs/config.md and configs/schema.json from the config schema: python scripts/make_config_docs.py

The page has the schema's sentence about each field and adds none. A test fails when a file and the schema differ.
"""

import json
from pathlib import Path

import yaml

from jaxserve.config import ENVIRONMENT, FieldDoc, field_docs, section_docs
from jaxserve.config.json_schema import config_json_schema

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
SCHEMA = Path(__file__).parents[1] / "configs" / "schema.json"  # for editors

HEAD = """\
# Configuration

<!-- Written by scripts/make_config_docs.py from jaxserve/config/__init__.py; change it there. -->

The configuration is one YAML file with a section for each part of the engine. Every setting has a default, so an empty
file, or none, is enough. Terms such as page, row and bucket are in the [glossary](glossary.md).

    python -m jaxserve.run --config configs/demo.yaml --set cache.num_pages=64 --set 'model.name="7"'
    LLM.from_config("configs/demo.yaml", overrides={"cache.num_pages": 64})
    jaxserve config --config configs/demo.yaml     # prints every value and its source

A value can come from four places; a later one replaces an earlier one: default, file, environment variable, `--set`
(or `overrides`). The value after `--set KEY=` is YAML: `null`, `true`, `[64, 256]`, and quotes for text that looks like
a number.

A wrong key or value is an error before anything is loaded. The message has a line for each mistake, with the file and
line, the key, the given value and the values that are accepted. A key given twice is an error, too. Relative paths in a
file are relative to that file's directory, other relative paths to the working directory; `~` is the home directory.
The model path `demo` always means the model inside the package; a directory of that name is written as `./demo`.

Editors that know JSON Schema complete the settings, show their meanings and underline mistakes. `jaxserve config
schema` prints the schema of the installed version, for a file that the first line of a config names, as it is in
[configs](../configs):

    # yaml-language-server: $schema=schema.json
"""

ENVIRONMENT_HEAD = """\
## Environment variables

Every setting has a variable: `JAXSERVE_`, and the name of the setting in capitals with two underscores for each dot.

    JAXSERVE_SCHED__MAX_ROWS=4 JAXSERVE_SERVE__HTTP__PORT=8000 jaxserve run --config configs/demo.yaml

The value is YAML, as after `--set`: `null`, `[64, 256]`, `{one: /adapters/one}`. An empty variable counts as absent.
One that begins with `JAXSERVE_` and names no setting is an error, and so are two for one setting; those that Kubernetes
and Docker make of services beside a container (`JAXSERVE_SERVICE_HOST`) are left alone. At its start a server, a router
and a KV server log which settings came from the environment; `/server_info` and `jaxserve config` say it, too. Secrets
are never values of settings: they are in files, which settings name.

Commands, `LLM.from_config` and fleets on Ray read these variables. `LLM(...)`, `AsyncLLM(...)` and the points of a
study do not, since their arguments are to be all that decides; they read only those of this table, the shorter names:

"""


def render() -> str:
    """The whole page."""
    docs = field_docs()
    parts = [HEAD]
    for section, sentence in section_docs().items():
        fields = [doc for doc in docs if doc.name.rpartition(".")[0] == section]
        if fields:
            parts.append(f"## {section}\n\n{sentence}\n\n{_table(fields)}")
    rows = [f"| `{variable}` | `{name}` |" for variable, name in ENVIRONMENT.items()]
    parts.append(ENVIRONMENT_HEAD + "\n".join(["| variable | sets |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def render_schema() -> str:
    """The file for editors."""
    return json.dumps(config_json_schema(), indent=1, ensure_ascii=False) + "\n"


def _table(fields: list[FieldDoc]) -> str:
    rows = [f"| `{d.name}` | {d.wanted} | `{_yaml(d.default)}` | {d.description} |" for d in fields]
    return "\n".join(["| setting | values | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    SCHEMA.write_text(render_schema(), encoding="utf-8")
    print(f"wrote {PAGE} and {SCHEMA}")
