"""Which devices JAX looks for: compilers for chips that are not here stay silent, and chips that are here are found."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxserve.assemble import devices
from jaxserve.config import find_accelerators, gpu_memory_reserved
from jaxserve.config.schema import CacheConfig, Config

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere JAX looks")
@pytest.mark.parametrize(
    ("file", "found"),
    [
        (None, False),
        ("dev/nvidia0", True),
        ("dev/nvidiactl", True),
        ("proc/driver/nvidia/gpus/0000:01:00.0", True),
        ("dev/dxg", True),
        ("dev/kfd", True),
        ("dev/accel0", True),
        ("dev/vfio/0", True),
        ("dev/vfio/vfio", False),  # the control file of the kernel's module, devices or not
        ("dev/nvram", False),
    ],
)
def test_what_drivers_leave_in_dev_tells_of_devices(tmp_path: Path, file: str | None, found: bool) -> None:
    if file is not None:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert bool(find_accelerators(tmp_path)) is found


@pytest.mark.parametrize(
    ("named", "found", "platforms"),
    [
        (None, [], "cpu"),
        (None, [Path("/dev/nvidia0")], None),  # JAX looks, and finds the GPU
        ("tpu,cpu", [], "tpu,cpu"),
        ("", [], ""),  # JAX's own word for: look at all
    ],
)
def test_the_platform_is_settled_where_nothing_but_a_cpu_is(
    monkeypatch: pytest.MonkeyPatch, named: str | None, found: list[Path], platforms: str | None
) -> None:
    before = jax.config.jax_platforms  # type: ignore[attr-defined]
    monkeypatch.setattr(devices, "find_accelerators", lambda: found)
    try:
        jax.config.update("jax_platforms", named)
        devices.settle_platform()
        assert jax.config.jax_platforms == platforms  # type: ignore[attr-defined]
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(("fraction", "reserved"), [(None, "0.9000"), (0.6, "0.6000")])
def test_jax_reserves_of_a_gpu_what_the_cache_asks_for(
    monkeypatch: pytest.MonkeyPatch, fraction: float | None, reserved: str
) -> None:
    monkeypatch.delenv(FRACTION, raising=False)
    seen: list[str | None] = []
    monkeypatch.setattr(jax, "devices", lambda: seen.append(os.environ.get(FRACTION)) or [])
    devices.find_devices(Config(cache=CacheConfig(memory_fraction=fraction)))
    assert seen == [reserved]
    assert FRACTION not in os.environ, "another process has settings of its own"
    monkeypatch.setenv(FRACTION, "0.3")
    devices.find_devices(Config(cache=CacheConfig(memory_fraction=fraction)))
    assert seen[1:] == ["0.3"], "what the user has set stays"
    with gpu_memory_reserved(0.5):
        pass
    assert os.environ[FRACTION] == "0.3"


_ALL_DOORS = """
from jaxserve.assemble import plan_stages
from jaxserve.assemble.devices import find_devices
from jaxserve.config import load_config
from jaxserve.lab import world_of_device
from jaxserve.lab.planner.make import PlanOptions, make_plan
from jaxserve.runtime.mesh import make_meshes

demo = load_config(None).config
world_of_device(demo, "cpu:1", None)
make_plan(demo, "cpu:1", PlanOptions(compile=False))
[stages] = make_meshes(demo.parallel, find_devices(demo))
assert plan_stages(demo, stages)[0].shapes.mesh.devices.flat[0].platform == "cpu"
"""


@pytest.mark.skipif(bool(find_accelerators()), reason="there are devices to be found")
def test_compilers_for_absent_devices_stay_silent() -> None:
    """As after `pip install -e .[aot]`, with no variable set: not a line on stderr."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TPU_"))}
    done = subprocess.run(
        [sys.executable, "-c", _ALL_DOORS], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


_CPU_DEVICES = """
from jaxserve.config import load_config
from jaxserve.assemble.devices import find_devices
from jaxserve.errors import ConfigError
from jaxserve.runtime.mesh import make_meshes

config = load_config(None, {"runtime.cpu_devices": 3, "parallel.data": 3}).config
print(len(find_devices(config)), len(make_meshes(config.parallel, find_devices(config))))
for more in ({"runtime.cpu_devices": 4}, {"parallel.data": 5}):
    config = load_config(None, {"runtime.cpu_devices": 3, **more}).config
    try:
        make_meshes(config.parallel, find_devices(config))
    except ConfigError as error:
        print(error)
"""


def test_one_cpu_stands_for_as_many_devices_as_the_config_says() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", _CPU_DEVICES], env=environment, capture_output=True, text=True, check=True
    )
    counted, started, few = done.stdout.splitlines()
    assert counted == "3 3"
    assert started == ("runtime.cpu_devices is 4, but JAX has started in this process with 3; begin in a new process")
    assert few.endswith(
        "needs 5 devices, but there are 3; lower one of them, or let this CPU stand for 5: runtime.cpu_devices"
    )
