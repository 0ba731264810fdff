"""The reader of the small JSON files beside a tokenizer, and of chat templates.

These are `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`, `config.json` and the template files.
Which of the named tokens exist is known to the tokenizers. Checkpoints repeat themselves across these files and
disagree; the order of precedence is written here once.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError

REMEDY = "replace the file, point model.tokenizer at another directory, or set model.skip_tokenizer to serve ids only"
ADDED_TOKENS_NAME = "added_tokens.json"  # written by transformers before 4.34
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULT = "default"  # the name of the template of a model that has several
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """One token that is cut out of the text before the vocabulary is asked. `lstrip` and `rstrip` swallow the
    white space before and after it; `single_word` wants no word character beside it. `file`: the name of the one that
    has it."""

    content: str
    token_id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False
    file: str = "tokenizer_config.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """Content of the small files of one directory; every field is empty when its file is absent.

    Attributes:
      options: tokenizer_config.json as it is.
      named: role ("bos_token", …) to token text.
      special_texts: texts of all tokens that some file calls special.
      added_tokens: tokens with an explicit id.
      bos_id, eos_id: of config.json, which comes last in precedence. Of a list of ids, the first.
      chat_template: Jinja source; of several with names, the one called "default".
      named_chat_templates: the others, by name.
    """

    directory: Path
    options: Mapping[str, Any]
    named: Mapping[str, str]
    special_texts: tuple[str, ...]
    added_tokens: tuple[AddedToken, ...]
    bos_id: int | None
    eos_id: int | None
    chat_template: str | None
    named_chat_templates: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_tokenizer_files(directory: Path) -> TokenizerFiles:
    """Reads the files that exist. Raises CheckpointError naming the file that is no JSON object or has a wrong type."""
    options = _read_json(directory / "tokenizer_config.json")
    special_map = _read_json(directory / "special_tokens_map.json")
    model = _read_json(directory / "config.json")
    named = {role: text for source in (special_map, options) for role in _NAMED if (text := _text(source.get(role)))}
    special = [*named.values()]
    for source in (options, special_map):
        for key in _LISTS:
            special += [text for entry in _values(source.get(key)) if (text := _text(entry))]
    added = _added_tokens(directory, options)
    special += [token.content for token in added if token.special]
    added = tuple(dataclasses.replace(token, special=token.content in special) for token in added)
    templates = _chat_templates(directory, options)
    return TokenizerFiles(
        directory=directory,
        options=options,
        named=named,
        special_texts=tuple(dict.fromkeys(special)),
        added_tokens=added,
        bos_id=_first_id(model.get("bos_token_id")),
        eos_id=_first_id(model.get("eos_token_id")),
        chat_template=templates.pop(_DEFAULT, None),
        named_chat_templates=templates,
    )


def read_failure(path: Path, error: Exception) -> CheckpointError:
    """The one message for a file that exists and cannot be used."""
    return CheckpointError(f"cannot read {path}: {error}; {REMEDY}")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise read_failure(path, error) from error
    if not isinstance(content, dict):
        raise read_failure(path, ValueError(f"expected a JSON object, found a {type(content).__name__}"))
    return content


def _text(entry: Any) -> str | None:
    """A token is written as its text, or as an object with `content`."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) and entry else None


def _values(entries: Any) -> list[Any]:
    """extra_special_tokens is a list in some checkpoints and a name-to-token object in others."""
    if isinstance(entries, dict):
        return list(entries.values())
    return entries if isinstance(entries, list) else []


def _first_id(value: Any) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _added_tokens(directory: Path, options: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """By their ids. The old file counts where tokenizer_config.json has no list, as in transformers."""
    path = directory / ("tokenizer_config.json" if "added_tokens_decoder" in options else ADDED_TOKENS_NAME)
    tokens: dict[int, AddedToken] = {}
    try:
        if path.name == ADDED_TOKENS_NAME:
            for content, token_id in _read_json(path).items():
                token = AddedToken(content=content, token_id=int(token_id), special=False, file=path.name)
                tokens[token.token_id] = token
        for key, entry in (options.get("added_tokens_decoder") or {}).items():
            names = ("special", "lstrip", "rstrip", "single_word", "normalized")
            flags: dict[str, Any] = {name: bool(entry.get(name, False)) for name in names}
            tokens[int(key)] = AddedToken(content=entry["content"], token_id=int(key), **flags)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise read_failure(path, ValueError(f"bad added token: {error!r}")) from error
    return tuple(tokens[token_id] for token_id in sorted(tokens) if tokens[token_id].content)


def _chat_templates(directory: Path, options: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Template files win over tokenizer_config.json, as in transformers 5; that of models with
    pictures may be an older one, chat_template.json."""
    files = {_DEFAULT: directory / "chat_template.jinja"} if (directory / "chat_template.jinja").is_file() else {}
    files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    found = {name: _read_text(path) for name, path in files.items()}
    if _DEFAULT in found:
        return found
    path = directory / "chat_template.json"
    if path.is_file():
        entry = _read_json(path).get("chat_template")
    else:
        path, entry = directory / "tokenizer_config.json", options.get("chat_template")
    if entry is None:
        return found
    if isinstance(entry, str):
        return {_DEFAULT: entry, **found}
    try:
        named = {item["name"]: item["template"] for item in entry}
        if not all(isinstance(text, str) for text in (*named, *named.values())):
            raise TypeError("a name or a template is no text")
    except (KeyError, TypeError) as error:
        cause = ValueError("chat_template must be a string or a list of {name, template}")
        raise read_failure(path, cause) from error
    return {**named, **found}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise read_failure(path, error) from error
