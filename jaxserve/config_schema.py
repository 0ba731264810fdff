"""The schema of the configuration: one frozen tree, every field with its unit and a sentence.

Owns names, defaults, bounds and descriptions. Refuses to read anything: files, overrides and the environment are
`config`'s. Refuses derived values too: what follows from a config and a checkpoint is computed where it is needed.
"""

from typing import Literal

import pydantic


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


class ModelConfig(Section):
    """What is loaded."""

    path: str = pydantic.Field(default="demo", description="Hugging Face style directory, Orbax directory, or 'demo'.")
    tokenizer: str | None = pydantic.Field(default=None, description="Directory of the tokenizer; default: model.path.")
    encode_cache_bytes: int = pydantic.Field(
        default=2**25, ge=0, description="Bytes of encodings of recent texts that are kept for their next use; 0: none."
    )
    skip_tokenizer: bool = pydantic.Field(default=False, description="Serve token ids only; no tokenizer is loaded.")
    name: str | None = pydantic.Field(
        default=None, description="Name in the log, for clients and of LLM.model_name; default: the directory's."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = pydantic.Field(
        default="auto", description="Weights and activations; auto: float32 on CPU, else the checkpoint's."
    )
    max_len: int | None = pydantic.Field(
        default=None, ge=1, description="Tokens of a sequence, prompt and output; default: the checkpoint's."
    )
    seed: int = pydantic.Field(default=0, ge=0, description="Seed of requests that bring none, and of random weights.")
    random_weights: bool = pydantic.Field(
        default=False, description="Fill weights at random from config.json alone (benchmarks)."
    )


class CacheConfig(Section):
    """The KV cache."""

    page_size: int | None = pydantic.Field(
        default=None, ge=1, description="Tokens of a page; default: chosen by backend."
    )
    num_pages: int | None = pydantic.Field(default=None, ge=1, description="Pages; overrides memory_bytes.")
    memory_bytes: int | None = pydantic.Field(default=None, ge=1, description="Bytes for pages on each device.")
    memory_fraction: float = pydantic.Field(
        default=0.9,
        gt=0,
        le=1,
        description="Share of the device's memory that weights and pages may use, when neither is set.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"] = pydantic.Field(
        default="auto", description="Of keys and values; the last two halve bfloat16 pages and are stored unscaled."
    )
    prefix_caching: bool = pydantic.Field(default=True, description="Share pages of equal prompt beginnings.")


class SchedConfig(Section):
    """Who runs, and how much in a step."""

    policy: str = pydantic.Field(default="fcfs", description="Name, entry point, or 'package.module:Class'.")
    max_rows: int | None = pydantic.Field(
        default=None, ge=1, description="Sequences running at once; default by backend."
    )
    max_step_tokens: int | None = pydantic.Field(
        default=None, ge=1, description="Tokens of a step; default by backend."
    )
    max_mixed_tokens: int | None = pydantic.Field(
        default=None,
        ge=0,
        description="Tokens of a step in which prompts stand beside sequences that decode; fewer keep the pace even, "
        "more finish prompts sooner. 0: no limit, the default of `LLM` and batches; else by backend.",
    )
    chunked_prefill: bool = pydantic.Field(
        default=True, description="Cut prompts to fill steps; false: a prompt runs whole."
    )
    max_waiting: int = pydantic.Field(
        default=4096, ge=1, description="Requests that may wait before new ones are refused."
    )
    max_waiting_tokens: int = pydantic.Field(
        default=2**22, ge=1, description="Tokens of prompts that may wait before new requests are refused."
    )
    burst: int = pydantic.Field(
        default=1,
        ge=1,
        le=64,
        description="Decode steps that one launch may hold, where nobody waits for a row; 1: none, see docs/burst.md.",
    )
    ageing_s: float = pydantic.Field(
        default=10.0,
        gt=0,
        description="priority, preemptive: seconds of waiting worth one level; sjf: worth 256 tokens of work.",
    )
    watermark: float = pydantic.Field(
        default=0.03, ge=0, lt=1, description="Share of all pages that an admission leaves free."
    )
    growth: float = pydantic.Field(
        default=0.5,
        ge=0,
        le=1,
        description="How much of the expected growth of running sequences an admission leaves room for; 0: none.",
    )
    lengths: str = pydantic.Field(
        default="learned",
        description="Who expects how long outputs are: learned, asked (max_tokens), or 'package.module:Class'.",
    )
    input_weight: float = pydantic.Field(default=1.0, gt=0, description="fair: what a token of a prompt is charged.")
    output_weight: float = pydantic.Field(default=2.0, gt=0, description="fair: what a generated token is charged.")
    ttft_target_s: float = pydantic.Field(default=1.0, gt=0, description="slo: seconds to the first token.")
    tpot_target_s: float = pydantic.Field(default=0.1, gt=0, description="slo: seconds for each token after it.")


class KernelsConfig(Section):
    """Which bodies run."""

    paged_attention: str = pydantic.Field(default="auto", description="Body by name; auto: best of the backend.")
    matmul: Literal["auto", "xla", "numba_cpu"] = pydantic.Field(
        default="auto",
        description="Products with weights: XLA's, or on a CPU those of weights packed at load; auto: packed where "
        "Numba is installed and a device has all of a layer.",
    )
    self_check: bool = pydantic.Field(
        default=True, description="Check a body other than xla on this device at start, against float64 (a second)."
    )


class ParallelConfig(Section):
    """How a model is spread over devices, and how often."""

    tensor: int = pydantic.Field(
        default=1, ge=1, description="Devices that share every layer: heads, ffn columns and vocabulary are cut."
    )
    pipeline: int = pydantic.Field(default=1, ge=1, description="Groups of devices that each hold some of the layers.")
    data: int = pydantic.Field(
        default=1, ge=1, description="Replicas in this process, each with devices and a scheduler of its own."
    )
    expert: int = pydantic.Field(default=1, ge=1, description="Devices that share experts; no model here has any yet.")
    sequence: int = pydantic.Field(
        default=1, ge=1, description="Devices that share one long context; must be 1 in this version."
    )
    microbatches: int | None = pydantic.Field(
        default=None, ge=1, description="Parts of a step in flight through the pipeline; default: parallel.pipeline."
    )


class HostsConfig(Section):
    """Several processes, one per host, that run one model together."""

    coordinator: str | None = pydantic.Field(
        default=None, description="HOST:PORT of process 0, where all meet; null: this process is alone."
    )
    num_processes: int = pydantic.Field(default=1, ge=1, description="Processes that run the model together.")
    process_id: int = pydantic.Field(default=0, ge=0, description="Number of this process; 0 schedules and serves.")
    plan_port: int = pydantic.Field(
        default=8476, ge=1, le=65535, description="Port on process 0's host where it hands out plans."
    )
    heartbeat_s: float = pydantic.Field(
        default=5.0, gt=0, description="Seconds of silence after which a process counts as dead."
    )
    check_every: int = pydantic.Field(
        default=16, ge=1, description="Steps between comparisons of what the processes have computed."
    )
    join_s: float = pydantic.Field(
        default=300.0, gt=0, description="Seconds that the processes wait for each other at their start."
    )
    stall_s: float = pydantic.Field(
        default=120.0,
        gt=0,
        description="Seconds that a step may take, while every process answers, before the device counts as stuck.",
    )


class RuntimeConfig(Section):
    """The compiled step, and the process around it."""

    token_buckets: list[pydantic.PositiveInt] | None = pydantic.Field(
        default=None, description="Tokens of mixed steps; default by backend."
    )
    row_buckets: list[pydantic.PositiveInt] | None = pydantic.Field(
        default=None, description="Rows of decode steps; default by backend."
    )
    compile_cache: str | None = pydantic.Field(
        default="~/.cache/jaxserve/xla",
        description="Directory of compiled executables that outlives the process; null: none.",
    )
    compile_threads: int | None = pydantic.Field(
        default=None, ge=1, description="Buckets compiled at once; default: cores."
    )
    background_buckets: bool | None = pydantic.Field(
        default=None,
        description="Answer once the largest step shapes are compiled, and compile the others meanwhile; default: on a "
        "CPU. Pipelines and several hosts compile all of them first, and refuse true.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = pydantic.Field(
        default="info", description="Least severity of the lines logged on stderr."
    )
    log_format: Literal["text", "json"] = pydantic.Field(
        default="text", description="Lines for people, or one JSON object a line for collectors of logs."
    )
    log_requests: bool = pydantic.Field(
        default=False, description="Log a line for each request that ends: its id, counts and times."
    )
    log_prompts: bool = pydantic.Field(
        default=False, description="Add the ids of the prompt to that line. Prompts are never logged otherwise."
    )
    step_log: str | None = pydantic.Field(
        default=None,
        description="File for a record of each step, prompts included: see `jaxserve steps` and `replay`; null: none.",
    )
    trace_endpoint: str | None = pydantic.Field(
        default=None,
        description="URL of an OpenTelemetry collector (OTLP over gRPC) that gets a span for each request; extra otel.",
    )
    trace_service: str = pydantic.Field(default="jaxserve", description="service.name of those spans.")
    trace_ratio: float = pydantic.Field(
        default=1.0, ge=0, le=1, description="Share of requests that are traced, of those whose caller does not say."
    )


class GrpcConfig(Section):
    """The gRPC service."""

    port: int | None = pydantic.Field(
        default=None, ge=0, le=65535, description="0 takes a free port; null: no gRPC service."
    )
    tls_cert: str | None = pydantic.Field(
        default=None,
        description="PEM file of the server's certificate and those between it and its root; null: no TLS.",
    )
    tls_key: str | None = pydantic.Field(default=None, description="PEM file of its key, without a password.")
    tls_client_ca: str | None = pydantic.Field(
        default=None, description="PEM file of authorities; clients must show a certificate that one has signed."
    )
    tokens_file: str | None = pydantic.Field(
        default=None, description="File of bearer tokens, one a line; every method but health needs one. Null: open."
    )
    max_message_bytes: int = pydantic.Field(
        default=4 * 2**20, ge=1024, le=2**31 - 1, description="Bytes of a message that a client may send."
    )
    keepalive_s: float = pydantic.Field(
        default=20.0, gt=0, description="Seconds of silence after which a client is asked whether it is there."
    )
    keepalive_timeout_s: float = pydantic.Field(
        default=10.0, gt=0, description="Seconds that it may take to answer; then its requests end."
    )
    min_ping_interval_s: float = pydantic.Field(
        default=5.0, gt=0, description="Seconds between pings of a client; one that asks more often is sent away."
    )


class HttpConfig(Section):
    """The HTTP service: the API of OpenAI, and what operators ask."""

    port: int | None = pydantic.Field(
        default=None, ge=0, le=65535, description="0 takes a free port; null: no HTTP service."
    )
    tls_cert: str | None = pydantic.Field(
        default=None,
        description="PEM file of the server's certificate and those between it and its root; null: no TLS.",
    )
    tls_key: str | None = pydantic.Field(default=None, description="PEM file of its key, without a password.")
    tls_client_ca: str | None = pydantic.Field(
        default=None, description="PEM file of authorities; clients must show a certificate that one has signed."
    )
    api_keys_file: str | None = pydantic.Field(
        default=None, description="File of keys, one a line; every route but health then needs one. Null: open to all."
    )
    cors_origins: list[str] = pydantic.Field(
        default=[], description="Origins of web pages that may call from a browser; '*' is all, [] is none."
    )
    max_body_bytes: int = pydantic.Field(default=4 * 2**20, ge=1, description="Bytes of a request's body.")
    header_timeout_s: float = pydantic.Field(
        default=10.0,
        gt=0,
        description="Seconds in which the headers of a request must arrive, and before them the handshake of TLS.",
    )
    body_timeout_s: float = pydantic.Field(
        default=30.0, gt=0, description="Seconds in which the body of a request must arrive."
    )
    request_timeout_s: float = pydantic.Field(
        default=600.0, gt=0, description="Seconds in which an answer must be complete; then it ends with an error."
    )
    tool_parser: Literal["auto", "hermes", "llama3"] = pydantic.Field(
        default="auto", description="How the model writes tool calls; auto: judged by its chat template."
    )
    refuse_special_text: bool = pydantic.Field(
        default=True, description="Refuse chat messages that spell a special token, with which turns can be forged."
    )
    web_page: bool = pydantic.Field(default=True, description="Serve the page at / and its live view of the engine.")
    profile_dir: str | None = pydantic.Field(
        default=None, description="Directory for profiles of POST /debug/profile; null: profiling is off."
    )


class ServeConfig(Section):
    """Front doors."""

    host: str = pydantic.Field(default="127.0.0.1", description="Address to listen on.")
    encode_threads: int = pydantic.Field(
        default=2, ge=1, description="Threads that encode prompts, so that long ones do not hold up streams."
    )
    drain_s: float = pydantic.Field(default=30.0, ge=0, description="Seconds that running requests get after SIGTERM.")
    stall_s: float = pydantic.Field(
        default=60.0,
        gt=0,
        description="Seconds that a step may take; then health turns red and running requests end with an error.",
    )
    grpc: GrpcConfig = GrpcConfig()
    http: HttpConfig = HttpConfig()


class RouteConfig(Section):
    """How requests are spread over replicas: those of parallel.data, and those behind `jaxserve route`."""

    replicas: list[str] | None = pydantic.Field(
        default=None,
        description="`jaxserve route`: HOST:PORT of each server; dns:///NAME:PORT stands for every address of NAME.",
    )
    policy: str = pydantic.Field(
        default="prefix", description="Name, entry point, or 'package.module:Class'; see `jaxserve.routing`."
    )
    slack: int = pydantic.Field(
        default=8, ge=0, description="prefix policy: requests above the least load that a replica with a hit may have."
    )
    table_blocks: int = pydantic.Field(
        default=65536, ge=1, description="prefix policy: blocks of 16 tokens remembered for each replica."
    )
    seed: int = pydantic.Field(default=0, ge=0, description="power_of_two policy: seed of its lots.")
    retries: int = pydantic.Field(
        default=2, ge=0, description="Times that a request which has streamed nothing moves on from a dead replica."
    )
    health_interval_s: float = pydantic.Field(
        default=1.0, gt=0, description="`jaxserve route`: seconds between looks at a replica's health."
    )
    health_timeout_s: float = pydantic.Field(
        default=5.0, gt=0, description="`jaxserve route`: seconds after which a replica that does not answer is red."
    )
    dns_interval_s: float = pydantic.Field(
        default=5.0, gt=0, description="`jaxserve route`: seconds between looks at the addresses of a dns:/// name."
    )
    tls_ca: str | None = pydantic.Field(
        default=None, description="`jaxserve route`: PEM file of the servers' authorities; null: they have no TLS."
    )
    tls_cert: str | None = pydantic.Field(
        default=None, description="`jaxserve route`: PEM file of the certificate shown to servers that ask for one."
    )
    tls_key: str | None = pydantic.Field(default=None, description="`jaxserve route`: PEM file of its key.")
    tls_name: str | None = pydantic.Field(
        default=None, description="`jaxserve route`: name in the servers' certificates; default: that of the address."
    )
    token_file: str | None = pydantic.Field(
        default=None, description="`jaxserve route`: file whose first line is the bearer token for the servers."
    )


class Config(Section):
    """All of it."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    sched: SchedConfig = SchedConfig()
    kernels: KernelsConfig = KernelsConfig()
    parallel: ParallelConfig = ParallelConfig()
    hosts: HostsConfig = HostsConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    serve: ServeConfig = ServeConfig()
    route: RouteConfig = RouteConfig()
