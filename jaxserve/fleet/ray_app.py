"""The application that a Ray Serve config file names: `import_path: jaxserve.fleet.ray_app:build_app`.

It turns the options of a fleet into deployments; Ray starts them, on whichever machines it likes.
"""

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from jaxserve.config import ResolvedConfig, load_config
from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError
from jaxserve.fleet.options import FleetOptions
from jaxserve.fleet.ray_engine import EngineReplica
from jaxserve.fleet.ray_ingress import Ingress

ENGINE = "Engine"  # names that Ray shows, and that a Serve config file may refer to
INGRESS = "Ingress"

_STOP_S = 15.0  # beyond drain and export: for the last step, and for last messages to leave
_MANY = 100_000  # streams cost an ingress little; the engine refuses what is too much


def build_app(options: FleetOptions) -> Application:
    """Reads the engine's config, once for all replicas. Raises ConfigError, also for a model over several hosts."""
    resolved = load_config(options.config, options.overrides)
    if resolved.config.hosts.num_processes > 1:
        raise ConfigError(
            f"hosts.num_processes is {resolved.config.hosts.num_processes}, but a replica of a fleet is one process; "
            "set it to 1, or run the hosts without Ray (deploy/k8s/tpu-multi-host.yaml)"
        )
    if resolved.config.handoff.secret_file is not None:
        raise ConfigError(
            "handoff.secret_file is set, but the ingress of a fleet pairs no replicas; leave it out, or start the "
            "servers without Ray, behind jaxserve route"
        )
    engine = build_engine_deployment(options, resolved)
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=options.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=_leaving_s(resolved.config),
    )(Ingress)
    return ingress.bind(engine.bind(resolved), 1 + resolved.config.route.retries)


def build_engine_deployment(options: FleetOptions, resolved: ResolvedConfig) -> Deployment:
    """The deployment of the engines: their number, resources, router and shutdown."""
    route = resolved.config.route
    return serve.deployment(
        name=ENGINE,
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            initial_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests,
            upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s,
        ),
        ray_actor_options={
            "num_cpus": options.cpus_per_replica,
            "num_gpus": options.gpus_per_replica,
            "resources": options.resources_per_replica,
        },
        max_ongoing_requests=_most_requests(resolved.config),
        request_router_config=RequestRouterConfig.model_validate(
            {
                "request_router_class": "jaxserve.fleet.ray_router:FleetRouter",
                "request_router_kwargs": route.model_dump(include={"policy", "slack", "table_blocks", "seed"}),
            }
        ),
        graceful_shutdown_timeout_s=_leaving_s(resolved.config),
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=options.health_check_period_s,
    )(EngineReplica)


def _leaving_s(config: Config) -> float:
    """Seconds that Ray gives a replica to end."""
    return config.serve.drain_s + config.serve.export_s + _STOP_S


def _most_requests(config: Config) -> int:
    """More requests than the engine takes, so that a client reads the engine's own refusal, which names the setting."""
    return config.sched.max_waiting + 2 * (config.sched.max_rows or 1024)
