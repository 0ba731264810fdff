"""Settings of the whole suite: eight CPU devices, no accelerator, no network, no limit of time on an example, and few
collections of cycles.

What a test sets up of logging ends with it.
"""

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

pytest_plugins = [f"suite.{name}" for name in ("kept", "garbage", "order", "failures", "costs", "reach", "resumed")]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
_DEVICES = "--xla_force_host_platform_device_count=8"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

# JAX makes very many objects when it traces. With Python's own 700 the collector looks through them so often that it
# takes a third of the time.
gc.set_threshold(10_000, 10, 10)

# A machine may be busy with other things, and any example may be the one that waits for it.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--templates", help="a folder of published chat templates, NAME.jinja, to compare with transformers"
    )


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background of a shell; its children inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of long.txt, before any is chosen by its marks."""
    folder = Path(__file__).parent
    lines = (folder / "long.txt").read_text(encoding="utf-8").splitlines()
    beginnings = tuple(line for line in lines if not line.startswith("#"))
    for item in items:
        path, _, name = item.nodeid.partition("::")
        if f"{path.removeprefix('tests/')}::{name}".startswith(beginnings):
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What is imported and collected by now stays: no collection of cycles looks through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A program that a test ran in this process has pointed the handlers at a stderr that is gone afterwards."""
    logger, root = logging.getLogger("jaxserve"), logging.getLogger()
    handlers, level, propagate, roots = logger.handlers[:], logger.level, logger.propagate, root.handlers[:]
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    for handler in root.handlers[:]:  # pytest's own come and go with each phase of a test
        if handler not in roots and type(handler).__module__ == "logging":
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def machine_code_folder() -> Path:
    """Where the engines of this run keep Numba's machine code: from now on this process does, without one."""
    from jaxserve.kernels.cpu import machine_code

    folder = Path(os.environ["JAXSERVE_COMPILE_CACHE"])
    if machine_code.missing() is None:
        machine_code.keep_machine_code(folder)
    return folder


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """The path of a published checkpoint by its name; skips the test, saying what fetches it, where it is absent.

    For tests that are marked `real`.
    """
    from fetch_real_models import path_of

    def find(name: str) -> Path:
        if not (path := path_of(name)).exists():
            pytest.skip(f"{path} is absent: python scripts/fetch_real_models.py {name}")
        return path

    return find


@pytest.fixture(scope="module")
def compiled_once() -> Iterator[None]:
    """Processes that tests start keep what they compile where this one does."""
    from suite.kept import settings_of_jax

    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings_of_jax().items():
            patch.setenv(name.upper(), str(value))
        yield


@pytest.fixture(scope="module")
def store_alone() -> Iterator[None]:
    """JAX's own cache is off: for tests that say what the store of executables does without it, as for most users."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """XLA leaves out most optimisations, for tests that compare with a tolerance: compiling is most of their time.

    In JAX 0.10 it emits fusions as it did before it had MLIR for that, which takes half the time, and for which JAX has
    no setting. In 0.11 XLA has no such choice, and ends a process that asks for it.
    """
    import jax
    from jax._src import compiler

    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        # Of processes that tests start: they compute the same bits.
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        if jax.__version_info__ < (0, 11):
            options_of = compiler.get_compile_options

            def quick_options(*args: Any, **kwargs: Any) -> Any:
                options = options_of(*args, **kwargs)
                if kwargs["backend"].platform == "cpu":
                    options.env_option_overrides = [
                        *options.env_option_overrides,
                        ("xla_cpu_use_fusion_emitters", False),
                    ]
                return options

            patch.setattr(compiler, "get_compile_options", quick_options)
            patch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_cpu_use_fusion_emitters=false")
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # what comes next is compiled as usual
