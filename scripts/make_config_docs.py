"""Writes docs/config.md from the config schema: python scripts/make_config_docs.py

Owns the layout of that page. Refuses to say anything of its own about a field: the schema's sentence is the only one.
A test fails when the page and the schema differ.
"""

from pathlib import Path

import yaml

from jaxserve.config import ENVIRONMENT, FieldDoc, field_docs, section_docs

PAGE = Path(__file__).parents[1] / "docs" / "config.md"

HEAD = """\
# Configuration

<!-- Written by scripts/make_config_docs.py from jaxserve/config.py; change it there. -->

One YAML file, one section for each part of the engine. Every setting has a default, so an empty file (or none) works.

    python -m jaxserve.run --config configs/demo.yaml --set cache.num_pages=64 --set 'model.name="7"'
    LLM.from_config("configs/demo.yaml", overrides={"cache.num_pages": 64})
    jaxserve config --config configs/demo.yaml     # every value, and where it came from

Values are taken in this order, the later wins: default, file, environment variable, `--set` (or `overrides`). The value
after `--set KEY=` is YAML: `null`, `true`, `[64, 256]`, and quotes for text that looks like a number.

A wrong key or value is an error before anything is loaded: it names the file and line, the key, what was given and
what is wanted. A key given twice is an error too. Relative paths in a file are relative to that file's directory,
elsewhere to the working directory; `~` is the home directory. The model path `demo` is the model inside the package,
never a file; a directory of that name is `./demo`.
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
    parts.append(
        "## Environment variables\n\nNo others are read by this package. An empty one counts as absent.\n\n"
        + "\n".join(["| variable | sets |", "|---|---|", *rows])
        + "\n"
    )
    return "\n".join(parts)


def _table(fields: list[FieldDoc]) -> str:
    rows = [f"| `{d.name}` | {d.wanted} | `{_yaml(d.default)}` | {d.description} |" for d in fields]
    return "\n".join(["| setting | values | default | meaning |", "|---|---|---|---|", *rows]) + "\n"


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")
