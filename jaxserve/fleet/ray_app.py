"""The application that a Ray Serve config file names: `import_path: jaxserve.fleet.ray_app:build_app`.

It turns the options of a fleet into deployments; Ray starts them, on whichever machines it likes.
"""

from collections.abc import Mapping

from ray import serve
from ray.serve import Application, Deployment
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from jaxserve.assemble.handoff import check_handoff
from jaxserve.config import ResolvedConfig, load_config
from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError
from jaxserve.fleet.options import FleetOptions, ReplicaOptions
from jaxserve.fleet.ray_engine import EngineReplica
from jaxserve.fleet.ray_ingress import Ingress
from jaxserve.serve.route_apart import Apart

ENGINE = "Engine"  # names that Ray shows, and that a Serve config file may refer to
PREFILL = "Prefill"
INGRESS = "Ingress"

_STOP_S = 15.0  # beyond drain and export: for the last step, and for last messages to leave
_MANY = 100_000  # streams cost an ingress little; the engine refuses what is too much


def build_app(options: FleetOptions) -> Application:
    """Reads the engine's config, once for all replicas. Raises ConfigError, also for a model over several hosts."""
    resolved = load_config(options.config, options.overrides)
    config = resolved.config
    if config.hosts.num_processes > 1:
        raise ConfigError(
            f"hosts.num_processes is {config.hosts.num_processes}, but a replica of a fleet is one process; "
            "set it to 1, or run the hosts without Ray (deploy/k8s/tpu-multi-host.yaml)"
        )
    _refuse_access(config)
    if options.prefill is None:
        if config.handoff.secret_file is not None:
            raise ConfigError(
                "handoff.secret_file is set, but no replica computes prompts for others; set `prefill` in the args of "
                "the fleet, or leave it out"
            )
        engines, prompts = build_engine_deployment(options, resolved, ENGINE, config.route.policy).bind(resolved), None
    else:
        _check_roles(config)
        answering = _with_role(options, {}, "decode")
        computing = _with_role(options, options.prefill.overrides, "prefill")
        # As a router does it: the policy knows which prompts the replicas that compute them have seen.
        engines = build_engine_deployment(options, answering, ENGINE, "least_load").bind(answering)
        prompts = build_engine_deployment(options.prefill, computing, PREFILL, config.route.policy).bind(computing)
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=options.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=_leaving_s(config),
    )(Ingress)
    return ingress.bind(engines, 1 + config.route.retries, Apart.of(config.route), prompts)


def _refuse_access(config: Config) -> None:
    """Callers come to Ray's proxy, which checks nothing of the config: what should close a door would leave it open."""
    grpc, http = config.serve.grpc, config.serve.http
    for setting, value in (
        ("serve.grpc.tokens_file", grpc.tokens_file),
        ("serve.grpc.tls_cert", grpc.tls_cert),
        ("serve.grpc.tls_client_ca", grpc.tls_client_ca),
        ("serve.http.api_keys_file", http.api_keys_file),
        ("serve.http.tls_client_ca", http.tls_client_ca),
        ("serve.admin_tokens_file", config.serve.admin_tokens_file),
    ):
        if value is not None:
            raise ConfigError(
                f"{setting} is set, but callers of a fleet come to Ray's proxy, which asks them for no key and no "
                "certificate; leave it out, and let a gateway that does be all that reaches the proxy"
            )


def build_engine_deployment(options: ReplicaOptions, resolved: ResolvedConfig, name: str, policy: str) -> Deployment:
    """A deployment of engines: their number, resources, router and shutdown. `policy`: of `jaxserve.routing`."""
    route = resolved.config.route
    return serve.deployment(
        name=name,
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
                "request_router_kwargs": {
                    "policy": policy,
                    **route.model_dump(include={"slack", "table_blocks", "seed"}),
                },
            }
        ),
        graceful_shutdown_timeout_s=_leaving_s(resolved.config),
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=options.health_check_period_s,
        health_check_timeout_s=options.health_check_timeout_s,
    )(EngineReplica)


def _check_roles(config: Config) -> None:
    """Raises ConfigError for settings that only a server by itself can have."""
    for setting, value, reason in (
        ("role", config.handoff.role != "both", "the fleet gives each replica its role"),
        ("port", config.handoff.port, "replicas on one machine need ports of their own, so each takes a free one"),
        ("address", config.handoff.address, "each replica has an address of its own"),
    ):
        if value:
            raise ConfigError(f"handoff.{setting} is set, but {reason}; leave it out")
    if config.handoff.secret_file is None:
        raise ConfigError(
            "some replicas are to compute prompts for others (`prefill`), but handoff.secret_file is not set, by which "
            "they know each other; set it, or leave `prefill` out"
        )


def _with_role(options: FleetOptions, overrides: Mapping[str, object], role: str) -> ResolvedConfig:
    resolved = load_config(options.config, {**options.overrides, **overrides, "handoff.role": role})
    check_handoff(resolved.config)
    return resolved


def _leaving_s(config: Config) -> float:
    """Seconds that Ray gives a replica to end."""
    return config.serve.drain_s + config.serve.export_s + _STOP_S


def _most_requests(config: Config) -> int:
    """More requests than the engine takes, so that a client reads the engine's own refusal, which names the setting."""
    return config.sched.max_waiting + 2 * (config.sched.max_rows or 1024)
