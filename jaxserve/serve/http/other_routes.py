"""What a path is here that clients of other servers call, and that this server does not have.

Ollama, llama.cpp, SGLang, TGI and vLLM have routes of their own beside those of OpenAI's API, and a base URL is easily
written with too much or too little at its end. The 404 of such a call says where to go. Nothing is ever answered under
another name, since bodies and answers differ.
"""

import functools
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Row(NamedTuple):
    """Paths that mean the same, one after the other; each stands for all that lie below it, too.

    Attributes:
      paths: as other servers have them, or our own that only a setting turns on.
      here: method and path of the route here. It is told where the server has it, or `setting` would bring it.
      note: what differs; without `here`: why there is nothing like it.
      setting: the one without which there is no such route.
    """

    paths: str
    here: str = ""
    note: str = ""
    setting: str = ""


_CHAT = "POST /v1/chat/completions"
_PLAIN = "POST /v1/completions"
_EMBED = "POST /v1/embeddings"
_MODELS = "GET /v1/models"
_OPENAI = "in the form of OpenAI's API"
_FOR_OPERATORS, _TOKENS = "for operators", "serve.admin_tokens_file"
_NONE = "not implemented here: "

ROWS: tuple[Row, ...] = (
    # Ollama.
    Row("/api/chat", _CHAT, _OPENAI),
    Row("/api/generate", _PLAIN, _OPENAI),
    Row("/api/embed /api/embeddings", _EMBED, _OPENAI),
    Row("/api/tags /api/ps /api/show", _MODELS),
    Row("/api/version", "GET /version"),
    Row(
        "/api/pull /api/push /api/create /api/copy /api/delete /api/blobs",
        note="not needed here: jaxserve downloads nothing; `hf download NAME --local-dir DIRECTORY` does, and "
        "`jaxserve serve DIRECTORY` serves it",
    ),
    # llama.cpp, SGLang, TGI and vLLM's own.
    Row("/completion /generate /generate_stream", _PLAIN, f"{_OPENAI}; 'stream': true streams"),
    Row("/infill", _PLAIN, "the prompt has the model's own marks for what is to be filled in"),
    Row("/props /get_model_info /model_info /info", "GET /tokenizer_info", "and GET /v1/models"),
    Row("/slots /get_load", "GET /load", "and GET /metrics"),
    Row("/embedding /encode /pooling", _EMBED, _OPENAI),
    Row("/apply-template /chat_tokenize", "POST /tokenize", "with 'messages', which it renders"),
    Row("/lora-adapters", _MODELS, "a request names an adapter as its model"),
    Row("/reranking /v1/reranking", "POST /v1/rerank"),
    Row("/classify /v1/classify", "POST /v1/score", "P(yes) of a model that judges; there are no classifiers"),
    Row("/health_generate /healthz", "GET /health"),
    Row("/readyz", "GET /ready"),
    Row("/livez", "GET /live"),
    Row("/abort_request", note="not needed here: closing the connection ends its requests"),
    Row("/get_server_info /get_internal_state", "GET /server_info", _FOR_OPERATORS, _TOKENS),
    Row("/flush_cache", "POST /reset_prefix_cache", _FOR_OPERATORS, _TOKENS),
    Row(
        "/update_weights_from_disk /update_weights_from_tensor /update_weights_from_distributed",
        "POST /admin/weights",
        _FOR_OPERATORS,
        _TOKENS,
    ),
    Row("/release_memory_occupation", "POST /sleep", _FOR_OPERATORS, _TOKENS),
    Row("/resume_memory_occupation", "POST /wake_up", _FOR_OPERATORS, _TOKENS),
    Row("/invocations", _CHAT),
    Row("/docs /redoc", "GET /openapi.json"),
    # The rest of the APIs of OpenAI, Anthropic and Google.
    Row("/v1/engines", _PLAIN, "the body names the model"),
    Row("/v1/complete", "POST /v1/messages"),
    Row("/v1/messages/batches", "POST /v1/batches", _OPENAI, "serve.http.batch_dir"),
    Row("/v1/responses/input_tokens", "POST /tokenize", "its 'count'; or POST /v1/messages/count_tokens"),
    Row("/v1/responses/compact", note=f"{_NONE}a client shortens its own conversation"),
    Row("/v1/conversations /v1/threads /v1/assistants", "POST /v1/responses", "previous_response_id goes on with one"),
    Row("/v1beta/models", _CHAT, _OPENAI),
    Row("/v1/audio /v1/realtime", note=f"{_NONE}prompts are text and pictures, and answers are text"),
    Row("/v1/images /v1/videos", note=f"{_NONE}pictures may be in a message; none are made"),
    Row("/v1/moderations", note=f"{_NONE}there are no classifiers; a model can be asked with a 'choice'"),
    Row("/v1/fine_tuning", note=f"{_NONE}a trainer brings other weights (docs/live-weights.md)"),
    Row("/v1/vector_stores /v1/uploads /v1/containers /v1/evals", note=f"{_NONE}only models are served"),
    # Our own, where a setting has not turned them on.
    Row("/v1/files /v1/batches", note="batches", setting="serve.http.batch_dir"),
    Row("/admin /sleep /wake_up /is_sleeping /server_info", note=_FOR_OPERATORS, setting=_TOKENS),
    Row("/reset_prefix_cache /start_profile /stop_profile", note=_FOR_OPERATORS, setting=_TOKENS),
    Row("/debug/profile", note=_FOR_OPERATORS, setting=_TOKENS),
    Row(
        "/v1/load_lora_adapter /v1/unload_lora_adapter",
        note=_FOR_OPERATORS,
        setting=f"{_TOKENS} and adapters.slots",
    ),
)
_BASES = "the base URL of OpenAI's clients ends with /v1, that of Anthropic's with the port"
_MOST_PARTS = 12  # of a path, so that a long one costs nothing


def where_else(path: str, routes: Collection[str]) -> str | None:
    """What `path` is here, as the end of a sentence about it; None: nothing is known of it.

    `routes`: the paths that this server has.
    """
    parts = path.strip("/").split("/", _MOST_PARTS)
    for end in range(len(parts), 0, -1):
        known = "/" + "/".join(parts[:end])
        if (row := _table().get(known)) is not None and (said := _told(known, row, routes)):
            return said
    return None


def with_another_base(path: str, routes: Collection[str]) -> str | None:
    """The route that a client means whose base URL has too much, or too little, at its end. None as above."""
    parts = path.strip("/").split("/", _MOST_PARTS)
    for begin in range(len(parts)):
        tail = "/".join(parts[begin:])
        for found in (f"/{tail}", f"/v1/{tail}"):
            if tail and found in routes:
                return f"here it is {found} ({_BASES})" if found.startswith("/v1/") else f"here it is {found}"
    return _BASES if parts == ["v1"] else None


def _told(known: str, row: Row, routes: Collection[str]) -> str | None:
    """What `row` says of its path `known`; None: it is no news here, or leads to nothing that is here."""
    if known in routes or any(route.startswith(f"{known}/") for route in routes):
        return None
    if row.here:
        if not row.setting and row.here.split()[1] not in routes:
            return None
        said = f"here it is {row.here}" + (f", with {row.setting}" if row.setting else "")
    elif row.setting:
        said = f"it is there only with {row.setting}"
    else:
        return row.note
    return f"{said} ({row.note})" if row.note else said


@functools.cache
def _table() -> Mapping[str, Row]:
    return {path: row for row in ROWS for path in row.paths.split()}
