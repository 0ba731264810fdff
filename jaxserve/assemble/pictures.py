"""Pictures of a model: the processor that its checkpoint describes, and the tower that its devices get."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError, how_to_install
from jaxserve.models import configured_checkpoint
from jaxserve.models.tower_loading import plan_tower
from jaxserve.runtime.tower_building import TowerPlan
from jaxserve.values.content import PlacedPicture
from jaxserve.vision import (
    PictureLimits,
    PictureProcessor,
    find_processor,
    is_installed,
    read_preprocessor,
    takes_pictures,
)


def find_pictures(config: Config) -> PictureProcessor | None:
    """The processor of the pictures that requests have; None for a model that takes none.

    Raises CheckpointError for a checkpoint whose processor is not known, ConfigError where pictures cannot be served.
    """
    processor = _find_processor(config)
    if processor is not None and config.vision.max_pictures and not is_installed():
        raise ConfigError(
            f"{config.model.path} takes pictures, but Pillow, which reads them, is not installed: "
            f"{how_to_install('vision')}; or serve its text alone, with vision.max_pictures: 0"
        )
    return processor


def _find_processor(config: Config) -> PictureProcessor | None:
    checkpoint, vision = configured_checkpoint(config.model), config.vision
    if not takes_pictures(checkpoint.config):
        return None
    if config.hosts.num_processes > 1:
        raise ConfigError(
            f"hosts.num_processes is {config.hosts.num_processes}, but pictures are not sent to other processes; serve "
            f"{checkpoint.path} on one host"
        )
    limits = PictureLimits(
        max_pixels=vision.max_pixels,
        max_source_pixels=vision.max_source_pixels,
        max_scans=vision.max_scans,
        decode_s=vision.decode_s,
        decode_bytes=vision.decode_bytes,
        max_pictures=vision.max_pictures,
    )
    return find_processor(checkpoint.config, read_preprocessor(checkpoint.path), limits, str(checkpoint.path))


def plan_pictures(config: Config, mesh: Mesh | AbstractMesh, dtype: np.dtype) -> TowerPlan | None:
    """The tower of a model on the devices of `mesh`; None for a model that takes no pictures. `dtype`: the decoder's.

    Raises CheckpointError and ConfigError.
    """
    processor = _find_processor(config)
    if processor is None:
        return None
    planned = plan_tower(
        configured_checkpoint(config.model),
        mean=processor.mean,
        std=processor.std,
        dtype=dtype,
        mesh=mesh,
        random_weights=config.model.random_weights,
        seed=config.model.seed,
    )
    if planned is None:
        raise ConfigError(f"{config.model.path} has a processor of pictures, and no tower that reads them")

    def positions(num_tokens: int, placed: Sequence[PlacedPicture]) -> tuple[np.ndarray, int]:
        found = processor.positions(num_tokens, placed)
        assert found is not None, "the family has said that it has positions"
        return found.of_tokens, found.delta

    return TowerPlan(
        planned=planned,
        max_patches=processor.max_patches,
        max_tokens=processor.max_tokens,
        positions=None if processor.positions(1, ()) is None else positions,
    )
