"""The platform and the devices that JAX may use. Both are settled here, before JAX first looks for devices.

Compilers for TPUs and GPUs may be installed where there is no such device, to plan or to test. JAX would ask them for
devices all the same, and they answer with tracebacks and errors. Environment variables are read and set by `config`.
"""

import logging

import jax

from jaxserve.config import find_accelerators, gpu_memory_reserved
from jaxserve.config.schema import MEMORY_FRACTION, Config
from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)


def settle_platform() -> None:
    """Lets JAX look at the CPU alone where there is no other device and no platform was named.

    To be called before the first use of a device; later it changes nothing.
    """
    if jax.config.jax_platforms is None and not find_accelerators():  # pyright: ignore[reportAttributeAccessIssue]
        logger.info("no GPU or TPU is here, so JAX is not to look for one; JAX_PLATFORMS overrides that")
        jax.config.update("jax_platforms", "cpu")


def find_devices(config: Config) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """The devices of all processes. The first call settles the platform, what JAX reserves of a GPU, and for how many
    devices a CPU stands.

    Raises ConfigError when JAX has started with another number of these.
    """
    settle_platform()
    wanted = config.runtime.cpu_devices
    if wanted is not None and wanted != jax.config.jax_num_cpu_devices:  # pyright: ignore[reportAttributeAccessIssue]
        try:
            jax.config.update("jax_num_cpu_devices", wanted)
        except RuntimeError as error:
            raise ConfigError(
                f"runtime.cpu_devices is {wanted}, but JAX has started in this process with "
                f"{len(jax.devices('cpu'))}; begin in a new process"
            ) from error
    with gpu_memory_reserved(config.cache.memory_fraction or MEMORY_FRACTION):
        return jax.devices()
