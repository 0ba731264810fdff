"""`Tower`, a vision tower that is compiled and loaded: pictures in, embeddings on the devices out.

One picture a launch, padded to a bucket of patches: so the bits of its embeddings depend on the picture alone, whatever
else the engine does. A tower is the same on all devices of a mesh, and each of them computes all of it: the embeddings
are where the decoder looks them up, without a transfer.

`runtime.build` makes it; the runner calls `encode` for each picture that a plan encodes, before the step that reads it,
and writes the lines into its pool.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxserve.values.content import Picture

# Of a grid and a bucket, the arrays beside the pixels: `models.vision_tower.VisionTower.inputs`.
TowerInputs = Callable[[tuple[int, int, int], int], Mapping[str, np.ndarray]]


class Tower:
    """The executables of a tower, one for each bucket of patches."""

    def __init__(
        self,
        *,
        executables: Mapping[int, Callable[..., Float[Array, "M D"]]],
        weights: Any,
        inputs: TowerInputs,
        num_values: int,
        sharding: jax.sharding.Sharding,
        tokens_of: Callable[[int], int],
    ) -> None:
        """Args:
        executables: by bucket, encode(weights, patches uint8 [P, V], arrays) -> embeddings [M, D].
        weights: on the devices.
        inputs: see `TowerInputs`.
        num_values: V, bytes of a patch.
        sharding: of what comes from the host: replicated.
        tokens_of: M, tokens of a bucket of patches.
        """
        self.buckets = tuple(sorted(executables))
        self._executables = executables
        self.weights = weights
        self._inputs = inputs
        self._num_values = num_values
        self._sharding = sharding
        self._tokens_of = tokens_of

    def bucket_of(self, num_patches: int) -> int:
        """The smallest bucket with room for so many patches; there is one for every picture of the processor."""
        return next(bucket for bucket in self.buckets if bucket >= num_patches)

    def num_lines(self, bucket: int) -> int:
        """Lines of what `encode` returns for pictures of a bucket."""
        return self._tokens_of(bucket)

    def place(self, embeddings: np.ndarray) -> Float[Array, "M D"]:
        """Embeddings of a picture from host memory [tokens, D], as `encode` returns them; on their way."""
        count = next(lines for lines in map(self._tokens_of, self.buckets) if lines >= len(embeddings))
        padded = np.zeros((count, embeddings.shape[1]), embeddings.dtype)
        padded[: len(embeddings)] = embeddings
        return jax.device_put(padded, self._sharding)

    def encode(self, picture: Picture) -> Float[Array, "M D"]:
        """Embeddings of a picture in the dtype of activations, on all devices of the mesh; on their way when it
        returns.

        The first `picture.num_tokens` lines are those of its tokens in order. The others are finite and mean nothing.
        """
        bucket = self.bucket_of(picture.num_patches)
        patches = np.zeros((bucket, self._num_values), np.uint8)
        patches[: picture.num_patches] = np.frombuffer(picture.pixels, np.uint8).reshape(-1, self._num_values)
        arrays = self._inputs(picture.grid, bucket)
        placed = jax.device_put((patches, dict(arrays)), self._sharding)
        return self._executables[bucket](self.weights, *placed)


class HostEmbeddings:
    """Embeddings in host memory, by the numbers that the scheduler gave them (`sched.plan.Encode`).

    Mutated by the thread that dispatches. A picture is copied behind its back: it waits for none that the tower may
    still work at, unless it is loaded in the next step.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, np.ndarray] = {}
        self._coming: dict[int, tuple[jax.Array, int]] = {}  # of this step, and of the one before
        self._num_before = 0  # of `_coming`, those of the step before

    def begin_step(self) -> None:
        """A step with pictures begins. Those of the step before the last are done: its result was read."""
        for host_id in [*self._coming][: self._num_before]:
            self._settle(host_id)
        self._num_before = len(self._coming)

    def keep(self, host_id: int, embeddings: Float[Array, "M D"], num_tokens: int) -> None:
        """Keeps the first `num_tokens` lines under a new number."""
        assert host_id not in self._arrays and host_id not in self._coming, host_id
        embeddings.copy_to_host_async()
        self._coming[host_id] = (embeddings, num_tokens)

    def load(self, host_id: int) -> np.ndarray:
        """The lines that are kept under a number, [tokens, D]; not to be written."""
        if host_id in self._coming:
            self._num_before -= [*self._coming].index(host_id) < self._num_before
            self._settle(host_id)
        return self._arrays[host_id]

    def drop(self, host_ids: Iterable[int]) -> None:
        """Forgets these."""
        for host_id in host_ids:
            if host_id in self._coming:
                self._num_before -= [*self._coming].index(host_id) < self._num_before
                del self._coming[host_id]
            else:
                del self._arrays[host_id]

    def _settle(self, host_id: int) -> None:
        """Copies a picture that has come, so that the array of the device is freed."""
        embeddings, num_tokens = self._coming.pop(host_id)
        self._arrays[host_id] = np.asarray(embeddings)[:num_tokens].copy()
