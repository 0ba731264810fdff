"""The routes for operators that vLLM has, under its paths: its tools, and scripts that were made for it, call them.

They exist only with `serve.admin_tokens_file`, as those below `/admin/`, and need one of its tokens. What a body says
is not read: vLLM's own tools send that of a completion to `/start_profile`. Nor is a content type asked for, since no
page of another site can send a token with a request.
"""

import asyncio
import platform
from importlib import metadata
from typing import Annotated, Any

import pydantic
from fastapi import APIRouter, Query

from jaxserve import __version__
from jaxserve.engine import AnyEngine
from jaxserve.errors import UnsupportedOption
from jaxserve.serve.http.admin import FlushReply
from jaxserve.serve.http.bodies import REFUSALS
from jaxserve.serve.http.errors import ErrorResponse
from jaxserve.serve.http.keys import RESET_PREFIX_CACHE, SERVER_INFO, START_PROFILE, STOP_PROFILE
from jaxserve.serve.http.profile import ProfileCapture
from jaxserve.serve.orders import Orders

_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


class ServedModel(pydantic.BaseModel):
    name: str
    max_model_len: int
    vocab_size: int
    drafter: str


class ServerInfo(pydantic.BaseModel):
    """`config` is the tree that `jaxserve config` prints; secrets are in files, which it only names. `environment`: the
    settings that came from there, each with its variable."""

    version: str
    versions: dict[str, str]
    model: ServedModel
    replicas: int
    config: dict[str, Any]
    environment: dict[str, str]


class ProfileDirectory(pydantic.BaseModel):
    """On the server."""

    directory: str


def vllm_admin_router(engine: AnyEngine, orders: Orders, profiles: ProfileCapture) -> APIRouter:
    routes = APIRouter(responses=REFUSALS, tags=["Operators"])
    failures: dict[int | str, dict[str, Any]] = {500: {"model": ErrorResponse}}

    @routes.get(SERVER_INFO)
    async def server_info() -> ServerInfo:
        """Versions, the model, and every setting."""
        model = engine.model
        return ServerInfo(
            version=__version__,
            versions={"python": platform.python_version(), **_installed()},
            model=ServedModel(
                name=model.name, max_model_len=model.max_model_len, vocab_size=model.vocab_size, drafter=model.drafter
            ),
            replicas=len(engine.replicas),
            config=dict(orders.settings.tree),
            environment=dict(orders.settings.environment),
        )

    @routes.post(RESET_PREFIX_CACHE)
    async def reset_prefix_cache(
        reset_running_requests: Annotated[bool, Query(description="Only false: those keep their pages.")] = False,
        reset_external: Annotated[bool, Query(description="Pages of a store, too (`store.kind`).")] = False,
    ) -> FlushReply:
        """Forgets all pages of the device and of host memory, so that no later request finds one."""
        if reset_running_requests:
            raise UnsupportedOption(
                "reset_running_requests is true, but running requests keep their pages here, which later ones do not "
                "find; leave it out"
            )
        flushed = await asyncio.to_thread(orders.cache.flush, None, store=reset_external)
        return FlushReply(**flushed._asdict())

    @routes.post(START_PROFILE, responses=failures)
    async def start_profile() -> ProfileDirectory:
        """Records a JAX profile until `/stop_profile`. Off unless serve.http.profile_dir names a directory."""
        return ProfileDirectory(directory=str(await profiles.begin()))

    @routes.post(STOP_PROFILE, responses=failures)
    async def stop_profile() -> ProfileDirectory:
        """Ends the profile, and answers when its files are written."""
        return ProfileDirectory(directory=str(await profiles.end()))

    return routes


def _installed() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # such as JAX beside an engine of another kind
            continue
    return found
