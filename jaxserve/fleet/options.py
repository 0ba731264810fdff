"""The `args` of a fleet in a Ray Serve config file: what its operator may set beside the engine's own config.

Ports and the place of the proxies are settings of Ray's own file.
"""

from typing import Self

import pydantic

from jaxserve.config.schema import Section


class ReplicaOptions(Section):
    """How many replicas a deployment of engines has, and what each is given."""

    min_replicas: int = pydantic.Field(default=1, ge=1, description="Replicas that are always there.")
    max_replicas: int = pydantic.Field(default=1, ge=1, description="Replicas that load may call for.")
    target_ongoing_requests: float = pydantic.Field(
        default=16.0, gt=0, description="Live requests of a replica that autoscaling aims at."
    )
    upscale_delay_s: float = pydantic.Field(
        default=30.0, ge=0, description="Seconds that load must stay high before a replica is added."
    )
    downscale_delay_s: float = pydantic.Field(
        default=600.0, ge=0, description="Seconds that load must stay low before one goes; loading it again costs more."
    )
    cpus_per_replica: float = pydantic.Field(default=1.0, ge=0, description="CPU cores that Ray sets aside.")
    gpus_per_replica: float = pydantic.Field(default=0.0, ge=0, description="GPUs; Ray shows a replica only its own.")
    resources_per_replica: dict[str, float] = pydantic.Field(
        default={}, description="Other resources of Ray, such as TPU: 4."
    )
    health_check_period_s: float = pydantic.Field(
        default=2.0, gt=0, description="Seconds between looks at a replica; three bad ones replace it."
    )
    health_check_timeout_s: float = pydantic.Field(
        default=10.0, gt=0, description="Seconds after which a look that has found no answer is a bad one."
    )

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, below min_replicas, which is {self.min_replicas}")
        return self


class PrefillOptions(ReplicaOptions):
    """The replicas that compute prompts for the others: a deployment of their own, scaled by itself."""

    overrides: dict[str, object] = pydantic.Field(
        default={}, description="Settings of these replicas that win over those of all: dotted name -> value."
    )


class FleetOptions(ReplicaOptions):
    """The `args` of `jaxserve.fleet.ray_app:build_app`. The numbers are of the replicas that answer."""

    config: str = pydantic.Field(description="The engine's config file; read once, on the node that builds the app.")
    overrides: dict[str, object] = pydantic.Field(
        default={}, description="Settings that win over the file: dotted name -> value."
    )
    prefill: PrefillOptions | None = pydantic.Field(
        default=None, description="Replicas that compute prompts for those that answer. Null: each does both."
    )
    ingress_replicas: int = pydantic.Field(default=1, ge=1, description="Processes that route; they hold no model.")
