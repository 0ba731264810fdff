"""The schema of the configuration: one frozen tree, every field with its unit and a sentence.

Files, overrides and the environment are read in `config`. Values that follow from a config and a checkpoint are no
fields: they are computed where they are needed.
"""

from typing import Annotated, Literal

import pydantic

from jaxserve.config.addresses import listening_host

# A host to listen on, without the brackets that an IPv6 address has in a URL.
Host = Annotated[str, pydantic.AfterValidator(listening_host)]


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False
    )


class ModelConfig(Section):
    """The model to load."""

    path: str = pydantic.Field(
        default="demo",
        description="Hugging Face style directory, Orbax directory, GGUF file, or 'demo' or 'demo-vision', which are "
        "packaged.",
    )
    tokenizer: str | None = pydantic.Field(
        default=None, description="Directory or GGUF file of the tokenizer; default: model.path."
    )
    encode_cache_bytes: int = pydantic.Field(
        default=2**25,
        ge=0,
        description="Bytes of recent texts with their token ids, kept in case they come again; 0: none.",
    )
    skip_tokenizer: bool = pydantic.Field(default=False, description="Serve token ids only; no tokenizer is loaded.")
    name: str | None = pydantic.Field(
        default=None,
        description="Name for logs, clients and LLM.model_name; default: that of the directory or file; of a packaged "
        "model, model.path.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = pydantic.Field(
        default="auto",
        description="Type of weights and activations; auto: float32 on CPU, else the checkpoint's; float16 becomes "
        "bfloat16, with a warning.",
    )
    quantization: Literal["auto", "none", "int8", "int8-a8", "int4", "int4-a8", "fp8"] = pydantic.Field(
        default="auto",
        description="What weights are kept as; auto: as the checkpoint has them, codes or floats, and on CPUs products "
        "with the codes of a GGUF file round activations to eight bits; none: codes are "
        "widened to floats. The others round a float checkpoint at load: int8 and fp8 with a scale for each row, int4 "
        "with one for each 128 inputs; int8-a8 and int4-a8 round activations, too, and int8-a8 can be had of a "
        "checkpoint of integer codes. Embeddings of a float checkpoint, norms and routers stay floats.",
    )
    quantization_rules: dict[str, str] = pydantic.Field(
        default={},
        description="Other schemes for some weights: regular expressions of whole names of modules, such as "
        r"model\.layers\.0\..*, with none or a scheme of model.quantization; the first that matches counts.",
    )
    max_len: int | None = pydantic.Field(
        default=None,
        ge=1,
        description="Most tokens of a sequence, prompt and output together; default: the checkpoint's.",
    )
    seed: int = pydantic.Field(default=0, ge=0, description="Seed of requests without one, and of random weights.")
    family: str | None = pydantic.Field(
        default=None,
        description="The reader of the checkpoint: name, entry point (jaxserve.models) or 'package.module:FAMILY'; "
        "default: that of the first name in architectures, or of model_type where there is none.",
    )
    overrides: dict[str, pydantic.JsonValue] = pydantic.Field(
        default={},
        description="Fields of config.json that have other values here; null: as if the field were not there.",
    )
    random_weights: bool = pydantic.Field(
        default=False, description="Fill weights at random from config.json alone (benchmarks)."
    )
    pooling: Literal["auto", "mean", "last", "first"] = pydantic.Field(
        default="auto",
        description="Tokens of a prompt whose final hidden states are averaged to its embedding; auto: as the files of "
        "sentence-transformers say (modules.json, 1_Pooling/config.json), or a GGUF file's pooling_type; a mean of all "
        "without these.",
    )


MEMORY_FRACTION = 0.9  # where cache.memory_fraction is null


class CacheConfig(Section):
    """The KV cache."""

    page_size: int | None = pydantic.Field(default=None, ge=1, description="Tokens of a page; default by backend.")
    num_pages: int | None = pydantic.Field(default=None, ge=1, description="Number of pages; overrides memory_bytes.")
    memory_bytes: int | None = pydantic.Field(default=None, ge=1, description="Bytes for pages on each device.")
    memory_fraction: float | None = pydantic.Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the device's memory that weights and pages may use, when neither is set; on a GPU, what "
        "JAX reserves of the card. Default: 0.9; on a CPU, pages take at most a quarter of the free memory instead.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"] = pydantic.Field(
        default="auto",
        description="Type of keys and values. The last three take half of bfloat16's bytes, with a scale for each "
        "key/value head: of cache.scales, of cache_scales.json in the checkpoint's directory, or of its tensors; "
        "without any, float8 has 1, and int8 is refused.",
    )
    scales: str | None = pydantic.Field(
        default=None, description="File of ranges for a cache of eight bits, as `jaxserve calibrate-cache` writes it."
    )
    prefix_caching: bool = pydantic.Field(default=True, description="Share the pages of prompts that begin alike.")
    page_shares: dict[str, float] = pydantic.Field(
        default={},
        description="Share of the pages of each replica, and of its slots of host memory, by tenant, that requests of "
        "others cannot take from it; their sum is less than 1. Not for models with windows.",
    )
    host_bytes: int = pydantic.Field(
        default=0,
        ge=0,
        description="Bytes of host memory, on each host, for pages that the device gives up; replicas share them "
        "evenly. 0: such pages are lost, and computed again when they are needed.",
    )
    host_policy: str = pydantic.Field(
        default="lru",
        description="Which pages stay in host memory: lru, lfu, arc, s3-fifo, entry point, or 'package.module:Class'.",
    )
    host_admission: Literal["second_sight", "always"] = pydantic.Field(
        default="second_sight",
        description="second_sight: while host memory turns over faster than pages come back, a page is taken in the "
        "second time only; always: at once.",
    )
    load_bytes_per_step: int | None = pydantic.Field(
        default=None,
        ge=1,
        description="Bytes of pages that a step loads from host memory beside other work, one page at least; default: "
        "one launch of 16 pages, fewer where pages are large.",
    )


class SchedConfig(Section):
    """Scheduling: the policy, and the size of steps."""

    policy: str | None = pydantic.Field(
        default=None,
        description="Name of a policy or scheduler, entry point, 'package.module:Class' or './file.py:Class', with "
        "parameters of a policy as 'module:Class?quantum=32'. Null: fair where the "
        "server has keys (serve.http.api_keys_file or serve.grpc.tokens_file), so that each key gets its share; else "
        "fcfs.",
    )
    max_rows: int | None = pydantic.Field(
        default=None, ge=1, description="Sequences that run at once; default by backend."
    )
    max_step_tokens: int | None = pydantic.Field(
        default=None, ge=1, description="Most tokens of a step; default by backend."
    )
    max_mixed_tokens: int | None = pydantic.Field(
        default=None,
        ge=0,
        description="Most tokens of a step with both prompts and decode rows; a small number keeps the gaps between "
        "tokens even, a large one finishes prompts sooner. 0: no limit, the default of `LLM` and batches; else by "
        "backend.",
    )
    chunked_prefill: bool = pydantic.Field(
        default=True, description="Cut prompts into chunks that fill steps; false: a prompt runs in one step."
    )
    max_waiting: int = pydantic.Field(
        default=4096,
        ge=1,
        description="Sequences (n for each prompt) that may wait for a first token; beyond it, requests are refused, "
        "but for a quarter more, which callers that have few of them share.",
    )
    max_waiting_tokens: int = pydantic.Field(
        default=2**22,
        ge=1,
        description="Prompt tokens of these sequences, counted for each sequence; refused and shared as the sequences.",
    )
    ageing_s: float = pydantic.Field(
        default=10.0,
        gt=0,
        description="priority, preemptive, fair: seconds of waiting that count as one level; sjf: as 256 tokens of "
        "work.",
    )
    watermark: float = pydantic.Field(
        default=0.03, ge=0, lt=1, description="Share of all pages that an admission leaves free."
    )
    growth: float = pydantic.Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the expected growth of running sequences for which an admission leaves pages free.",
    )
    lengths: str = pydantic.Field(
        default="learned",
        description="Predictor of output lengths: learned, asked (max_tokens), or 'package.module:Class'.",
    )
    input_weight: float = pydantic.Field(default=1.0, gt=0, description="fair: charge for a token of a prompt.")
    output_weight: float = pydantic.Field(default=2.0, gt=0, description="fair: charge for a generated token.")
    preempt_lag: float = pydantic.Field(
        default=1024.0,
        gt=0,
        description="fair: how far the charges of an owner may fall behind those of another that has more rows, before "
        "a row of the other gives way. Smaller: served sooner; larger: less is computed again.",
    )
    preempt_after: int = pydantic.Field(
        default=16,
        ge=1,
        description="fair: tokens that a sequence generates, after it got a row, before it can give way to another "
        "owner.",
    )
    ttft_target_s: float = pydantic.Field(
        default=1.0, gt=0, description="slo: target for the seconds to the first token."
    )
    tpot_target_s: float = pydantic.Field(
        default=0.1, gt=0, description="slo: target for the seconds of each later token."
    )


class SpeculationConfig(Section):
    """Several tokens of a sequence in one step: drafts that the model checks, and rounds without the host."""

    method: str = pydantic.Field(
        default="none",
        description="Source of drafts: none, ngram (what followed the same tokens before in the same sequence), suffix "
        "(that, or in past answers of the same tenant and cache salt), eagle, medusa or mtp (a draft head), auto (the "
        "head of speculation.model, or the one that came with the model; ngram where there is none), draft (a small "
        "model of the same vocabulary), grammar (none but for rows with a grammar, which have drafts with any method "
        "but none), replay (a recording, for benchmarks), an entry point (jaxserve.drafters) or "
        "'package.module:function'. Drafts change times, never tokens.",
    )
    width: int = pydantic.Field(
        default=4, ge=2, le=16, description="Most tokens of a sequence in a round: its last one and drafts."
    )
    rounds: int = pydantic.Field(
        default=1,
        ge=1,
        le=64,
        description="Most rounds of a step. More save the host's time between them, which counts for small models; "
        "their tokens arrive together, and new requests wait for the end of the step.",
    )
    adaptive: bool = pydantic.Field(
        default=True,
        description="Choose width and rounds of each step, one token included, by the times of the shapes and by how "
        "many drafts were right so far; false: the shape that would draw most, were all drafts right.",
    )
    window: int = pydantic.Field(
        default=4096, ge=1, description="Latest tokens of each sequence that are kept to look drafts up."
    )
    ngram_min: int = pydantic.Field(
        default=2, ge=1, description="ngram, suffix, grammars: fewest last tokens that must be the same."
    )
    ngram_max: int = pydantic.Field(default=4, ge=1, description="ngram, suffix, grammars: most last tokens compared.")
    num_answers: int = pydantic.Field(default=64, ge=1, le=4096, description="suffix: past answers that are kept.")
    answer_len: int = pydantic.Field(default=256, ge=2, description="suffix: tokens that are kept of each.")
    model: str | None = pydantic.Field(
        default=None,
        description="eagle, medusa, mtp, auto: directory of the head; default: the folder 'draft' of the model's "
        "directory, which the demo model has. draft: directory of the small model. replay: the recording, a JSONL "
        "file.",
    )
    replay_errors: float = pydantic.Field(
        default=0.0, ge=0, le=1, description="replay: share of positions at which the draft is wrong."
    )


class KernelsConfig(Section):
    """Which implementation of each op runs: one setting per op, by the op's name."""

    paged_attention: str = pydantic.Field(
        default="auto",
        description="Name of an implementation: mosaic_gpu, mosaic_tpu, xla_batched (GPUs and TPUs), numba_cpu, xla "
        "(anything, slowly). auto: the first of the device's that runs the model; never xla on a GPU or TPU.",
    )
    matmul: str = pydantic.Field(
        default="auto",
        description="Products with weights: XLA's; numba_cpu, with weights packed at load; mosaic_tpu and mosaic_gpu "
        "(Hopper), with kernels for codes. auto: numba_cpu on a CPU where Numba is installed and a device has all of a "
        "layer, the device's own on a GPU or TPU if it runs the model, else XLA's.",
    )
    grouped_matmul: str = pydantic.Field(
        default="auto",
        description="Products of mixture-of-experts layers: ragged_tpu, mosaic_gpu (Hopper), numba_cpu, with experts "
        "packed at load, or xla (anything: a loop over the experts hit). auto: the device's own if it runs the model, "
        "else xla.",
    )
    self_check: bool = pydantic.Field(
        default=True,
        description="Compare kernels with float64 on the device at the start (a second), on a CPU once for each "
        "version of the source; not those of xla.",
    )


class AttentionConfig(Section):
    """Sparse attention: generated tokens read some pages of their context, and so are not those of the whole model."""

    select: str = pydantic.Field(
        default="none",
        description="What chooses the pages that decode steps read: none (all), quest, entry point, or "
        "'package.module:Name'. Anything but none is lossy: tokens differ from those of all pages.",
    )
    pages: int | None = pydantic.Field(
        default=None,
        ge=1,
        description="Pages of cache.page_size tokens that a key/value head reads for a token, the newest included; "
        "quest needs it.",
    )


class ParallelConfig(Section):
    """The cut of a model over devices, and its replicas."""

    tensor: int = pydantic.Field(
        default=1, ge=1, description="Devices that share every layer: heads, ffn columns and vocabulary are divided."
    )
    pipeline: int = pydantic.Field(default=1, ge=1, description="Groups of devices that each hold some of the layers.")
    data: int = pydantic.Field(
        default=1, ge=1, description="Replicas in this process, each with devices and a scheduler of its own."
    )
    expert: int = pydantic.Field(
        default=1,
        ge=1,
        description="Parts of the parallel.tensor devices over which experts are dealt; it divides their number.",
    )
    microbatches: int | None = pydantic.Field(
        default=None, ge=1, description="Parts of a step in flight through the pipeline; default: parallel.pipeline."
    )


class HostsConfig(Section):
    """Several processes, one per host, that run one model together."""

    coordinator: str | None = pydantic.Field(
        default=None, description="HOST:PORT of process 0, to which the others connect; null: this process is alone."
    )
    num_processes: int = pydantic.Field(default=1, ge=1, description="Processes that run the model together.")
    process_id: int = pydantic.Field(default=0, ge=0, description="Number of this process; 0 schedules and serves.")
    plan_port: int = pydantic.Field(
        default=8476, ge=1, le=65535, description="Port on which process 0 sends plans to the others."
    )
    secret_file: str | None = pydantic.Field(
        default=None,
        description="File with the secret by which the processes recognise each other, 16 bytes or more, the same on "
        "all; may be null only if the coordinator is a loopback address.",
    )
    tls_cert: str | None = pydantic.Field(
        default=None,
        description="PEM file of this process's certificate; that of process 0 names its host in `coordinator`. Null: "
        "plans are not encrypted.",
    )
    tls_key: str | None = pydantic.Field(default=None, description="PEM file of its key, without a password.")
    tls_ca: str | None = pydantic.Field(
        default=None, description="PEM file of the authorities that have signed the certificates of all processes."
    )
    max_plan_bytes: int = pydantic.Field(
        default=2**28, ge=2**16, le=2**31 - 1, description="Most bytes of a step's plan; a longer one ends the service."
    )
    heartbeat_s: float = pydantic.Field(
        default=5.0, gt=0, description="Seconds of silence after which a process counts as dead."
    )
    check_every: int = pydantic.Field(
        default=16, ge=1, description="Steps between comparisons of the processes' results."
    )
    join_s: float = pydantic.Field(
        default=300.0, gt=0, description="Seconds that the processes wait for each other at their start."
    )
    stall_s: float = pydantic.Field(
        default=120.0,
        gt=0,
        description="Seconds that a step may take while every process answers; then the device counts as stuck.",
    )


class RuntimeConfig(Section):
    """The compiled step, and the process around it."""

    token_buckets: list[pydantic.PositiveInt] | None = pydantic.Field(
        default=None, description="Numbers of tokens of the compiled mixed steps; default by backend."
    )
    row_buckets: list[pydantic.PositiveInt] | None = pydantic.Field(
        default=None, description="Numbers of rows of the compiled decode steps; default by backend."
    )
    compile_cache: str | None = pydantic.Field(
        default="~/.cache/jaxserve/xla",
        description="Directory where compiled executables are kept for later starts; null: none.",
    )
    compile_cache_bytes: int = pydantic.Field(
        default=2**31,
        ge=0,
        description="Bytes of executables kept there; beyond it, those that no start has read for longest are removed.",
    )
    kept_weights_bytes: int = pydantic.Field(
        default=2**33,
        ge=0,
        description="On a CPU: bytes of weights in their packed form that are kept in runtime.compile_cache, for later "
        "starts; beyond it, those that no start has read for longest are removed. 0: each start packs them anew.",
    )
    compile_threads: int | None = pydantic.Field(
        default=None, ge=1, description="Buckets compiled at once; default: cores, on a TPU 1."
    )
    background_buckets: bool | None = pydantic.Field(
        default=None,
        description="Answer once three step shapes are compiled, and compile the others meanwhile, on a CPU in a "
        "process of low priority; default: on a CPU. Pipelines and several hosts compile all of them first, and refuse "
        "true.",
    )
    batch_invariant: bool = pydantic.Field(
        default=False,
        description="Start only where the bits of tokens and log-probabilities cannot depend on other requests: on a "
        "CPU with Numba's kernels. Elsewhere a start fails, and names what breaks it.",
    )
    cpu_devices: int | None = pydantic.Field(
        default=None,
        ge=1,
        description="Devices as which one CPU appears, to try replicas and layouts without an accelerator; null: "
        "1, or the number in XLA_FLAGS.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = pydantic.Field(
        default="info", description="Least severity of the lines logged on stderr."
    )
    log_format: Literal["text", "json"] = pydantic.Field(
        default="text", description="text: lines for people; json: one JSON object per line."
    )
    log_requests: bool = pydantic.Field(
        default=False,
        description="Log a line for each request that ends: its id, counts and times; and one for each "
        "refused call, of which some a second have their own: its id, door, route, status and reason.",
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
        default=1.0, ge=0, le=1, description="Share of requests that are traced, where the caller does not decide it."
    )


class VisionConfig(Section):
    """Pictures in prompts, for models that take them."""

    max_pixels: int | None = pydantic.Field(
        default=None,
        ge=1,
        description="Pixels of a picture once it is resized; a larger one is scaled down. Default: the checkpoint's.",
    )
    max_source_pixels: int = pydantic.Field(
        default=25_000_000, ge=1, description="Pixels of a picture that is decoded; a file that says more is refused."
    )
    max_scans: int = pydantic.Field(
        default=100,
        ge=1,
        description="Scans of a JPEG that is decoded, each of which may pass over all pixels; a file with more is "
        "refused. Programs write ten or so.",
    )
    decode_s: float = pydantic.Field(
        default=5.0,
        gt=0,
        description="Seconds of processor time for decoding all pictures of a request; what takes more is ended, and "
        "refused. A clock ends it, too, after 12 times as long, and 60 s at least.",
    )
    decode_bytes: int = pydantic.Field(
        default=2**31,
        ge=2**28,
        description="Bytes of memory for decoding a picture, as address space of the process that does it; what takes "
        "more is refused. Linux alone has such a limit.",
    )
    max_pictures: int = pydantic.Field(
        default=16, ge=0, description="Pictures of a request. 0: none, and Pillow need not be installed."
    )
    max_waiting_bytes: int = pydantic.Field(
        default=2**30,
        ge=1,
        description="Bytes of resized pictures of requests without a first token; refused and shared as "
        "sched.max_waiting.",
    )
    pool_tokens: int | None = pydantic.Field(
        default=None,
        ge=1,
        description="Embeddings of pictures that the device keeps, for so many tokens, in case a picture comes "
        "again: at least those of the largest picture that is allowed; default: twice these.",
    )
    host_bytes: int = pydantic.Field(
        default=0,
        ge=0,
        description="Bytes of host memory, on each host, for embeddings of pictures that the device's pool gave up; "
        "replicas share them evenly. 0: such a picture is encoded again.",
    )
    max_step_patches: int = pydantic.Field(
        default=4096,
        ge=1,
        description="Patches that are encoded before a step, so that rows that decode do not wait long; a picture that "
        "has more is encoded alone.",
    )


class RerankConfig(Section):
    """Scores of documents for a query, by the model's answer of yes or no."""

    template: str = pydantic.Field(
        default="auto",
        description="Prompt with {query}, {document} and, if wanted, {instruction}, special tokens written out; or "
        "qwen3: Qwen3-Reranker's; none: no scores; auto: qwen3 for a Qwen3 checkpoint that is a reranker by the "
        "name of its directory or its modules.json, else none.",
    )
    positive: str = pydantic.Field(
        default="yes", description="Answer that counts for a document; one token after the template."
    )
    negative: str = pydantic.Field(
        default="no", description="Answer that counts against a document; one token after the template."
    )
    instruction: str = pydantic.Field(
        default="Given a web search query, retrieve relevant passages that answer the query",
        description="Text at {instruction}, where a call does not bring its own.",
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
        default=None,
        description="File of bearer tokens, one a line, as api_keys_file of serve.http; every method but health needs "
        "one. The token of a router has role=router behind it. Null: open.",
    )
    max_message_bytes: int = pydantic.Field(
        default=4 * 2**20, ge=1024, le=2**31 - 1, description="Most bytes of a message from a client."
    )
    max_messages_bytes: int = pydantic.Field(
        default=2**28,
        ge=1024,
        description="Most bytes of the messages of all calls that have not ended; one more is told to try again later.",
    )
    message_timeout_s: float = pydantic.Field(
        default=30.0, gt=0, description="Seconds in which the message of a call must arrive."
    )
    keepalive_s: float = pydantic.Field(
        default=20.0, gt=0, description="Seconds of silence after which a client gets a ping."
    )
    keepalive_timeout_s: float = pydantic.Field(
        default=10.0, gt=0, description="Seconds that the client may take to answer; then its requests end."
    )
    min_ping_interval_s: float = pydantic.Field(
        default=5.0,
        gt=0,
        description="Least seconds between pings of a client; one that pings more often is disconnected.",
    )
    refuse_special_text: bool = pydantic.Field(
        default=False,
        description="Refuse chat messages that spell a special token of the model; else it is plain text there, and "
        "never becomes the token.",
    )


class HttpConfig(Section):
    """The HTTP service: the API of OpenAI, and routes for operators."""

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
        default=None,
        description="File of keys, one a line; every route but health then needs one. weight=4 behind a key gives it "
        "four parts of what callers share where others have one. Null: open to all.",
    )
    open_metrics: bool = pydantic.Field(
        default=False,
        description="/metrics needs no key where the other routes need one, for a Prometheus that cannot send any.",
    )
    cors_origins: list[str] = pydantic.Field(
        default=[], description="Origins of web pages that may call from a browser; '*' is all, [] is none."
    )
    allowed_hosts: list[str] = pydantic.Field(
        default=[],
        description="Names by which clients reach this server ('.x.example': all with that ending; '*': any); "
        "addresses are always accepted. []: on the loopback without keys or TLS the machine's own names, else any.",
    )
    max_body_bytes: int = pydantic.Field(default=4 * 2**20, ge=1, description="Most bytes of a request's body.")
    max_json_parts: int = pydantic.Field(
        default=2**19,
        ge=100,
        description="Most objects, lists and named fields of a body or of a line of a batch: in memory each is many "
        "times as large as in the body.",
    )
    max_bodies_bytes: int = pydantic.Field(
        default=2**28,
        ge=1,
        description="Most bytes of the bodies of all requests that are being read or answered, shared as "
        "sched.max_waiting; one more is told to try again later.",
    )
    max_answers_bytes: int = pydantic.Field(
        default=2**29,
        ge=1,
        description="Most bytes of large answers that have been made and that their clients have not read; for one "
        "more, the client is told to try again later.",
    )
    max_connections: int | None = pydantic.Field(
        default=None,
        ge=1,
        description="Connections at once; beyond it, idle ones are closed for new ones. Default: three quarters of the "
        "files that the process may open, after 64 are set aside, at most 16384; gRPC has the others.",
    )
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
    tool_parser: str = pydantic.Field(
        default="auto",
        description="Format in which the model writes tool calls: hermes, llama3, qwen3_coder, mistral, gpt_oss, "
        "gemma, pythonic, or one of an installed package; auto: found from its chat template.",
    )
    bare_tool_calls: bool = pydantic.Field(
        default=False,
        description="Read a JSON object that is exactly a call of an offered tool as a call where the model left out "
        "the marks of its format, as Qwen2.5-Coder does.",
    )
    reasoning_parser: str = pydantic.Field(
        default="auto",
        description="Format in which the model writes its thoughts before an answer: qwen3, deepseek_r1, mistral, or "
        "one of an installed package; none: they are part of the answer; auto: found from its chat template.",
    )
    refuse_special_text: bool = pydantic.Field(
        default=False,
        description="Refuse chat messages, queries and documents that spell a special token of the model; else it is "
        "plain text there, and never becomes the token.",
    )
    stored_responses: int = pydantic.Field(
        default=1024,
        ge=0,
        description="Answers of /v1/responses that are kept in memory, for previous_response_id; 0: none are.",
    )
    stored_responses_bytes: int = pydantic.Field(
        default=64 * 2**20, ge=0, description="Most bytes of them, with their conversations, as JSON."
    )
    stored_responses_s: float = pydantic.Field(
        default=3600.0, gt=0, description="Seconds that such an answer is kept after its last use."
    )
    batch_dir: str | None = pydantic.Field(
        default=None, description="Directory of /v1/files and /v1/batches; null: there are no batches."
    )
    batch_dir_bytes: int = pydantic.Field(
        default=16 * 2**30,
        ge=1,
        description="Most bytes in it, which keys share; beyond it each key with little has a part of a quarter more.",
    )
    batch_file_bytes: int = pydantic.Field(default=64 * 2**20, ge=1, description="Most bytes of a file of requests.")
    batch_ended: int = pydantic.Field(
        default=1000,
        ge=1,
        description="Ended batches of a key whose descriptions are kept; of more, the oldest go. Their files stay.",
    )
    batch_lines: int = pydantic.Field(default=32, ge=1, description="Lines of a batch that run at a time.")
    weights_dir: str | None = pydantic.Field(
        default=None,
        description="Directory of the checkpoints that POST /admin/weights may name; null: it may name none.",
    )
    web_page: bool = pydantic.Field(default=True, description="Serve the page at / and its live view of the engine.")
    vllm_metrics: bool = pydantic.Field(
        default=False, description="/metrics has the figures that vLLM has, too, under vLLM's names as well."
    )
    profile_dir: str | None = pydantic.Field(
        default=None,
        description="Directory for profiles that operators record (POST /debug/profile, /start_profile); null: "
        "profiling is off.",
    )


class TenantConfig(Section):
    """What one tenant may take of this process. A caller names its own: `tenant` over gRPC, `user` over HTTP."""

    requests_per_s: float | None = pydantic.Field(
        default=None, gt=0, description="Prompts a second; null: no limit, as for the next two."
    )
    tokens_per_s: float | None = pydantic.Field(
        default=None, gt=0, description="Tokens a second, of prompts and answers together."
    )
    burst_s: float = pydantic.Field(default=10.0, gt=0, description="Seconds of both rates that may be saved up.")
    concurrent_tokens: int | None = pydantic.Field(
        default=None,
        ge=1,
        description="Tokens of all live requests: prompts, and as many as answers may have, for each of n sequences.",
    )


class TenantsConfig(Section):
    """Limits of tenants."""

    default: TenantConfig = TenantConfig()
    named: dict[str, TenantConfig] = pydantic.Field(
        default={},
        description="Tenants by name, each with all of its limits: what a line of this table leaves out has no limit, "
        "whatever `default` says.",
    )


class ServeConfig(Section):
    """Settings of gRPC and HTTP together."""

    host: Host = pydantic.Field(default="127.0.0.1", description="Address to listen on.")
    encode_threads: int = pydantic.Field(
        default=2,
        ge=1,
        description="Threads that encode prompts, so that long prompts do not delay streams. One more is for callers "
        "of whose prompts none is being encoded.",
    )
    max_prompts: int = pydantic.Field(
        default=2048, ge=1, description="Prompts, inputs to embed, or documents to score, of one call."
    )
    max_n: int = pydantic.Field(default=128, ge=1, le=1024, description="n of one call: sequences for each prompt.")
    max_stops: int = pydantic.Field(
        default=4, ge=1, le=1024, description="Stop strings of a request; each costs every step of all requests."
    )
    max_text_chars: int = pydantic.Field(
        default=2**20,
        ge=1,
        description="Characters that are encoded at once whatever number of tokens they have: of /tokenize and "
        "count_tokens, and of prompts and documents that are cut. Others are refused once they have too many tokens.",
    )
    max_answer_bytes: int = pydantic.Field(
        default=2**28,
        ge=2**10,
        description="Most bytes that the answer to a call can come to, reckoned from its prompts, max_tokens, n and "
        "log-probabilities before it is queued.",
    )
    admin_tokens_file: str | None = pydantic.Field(
        default=None,
        description="File of tokens, one a line, of which calls of operators need one (flush, size of the page pool, "
        "tiers off and on, weights, sleep, drain, profiles, settings; of a router: quarantine). Null: there are none.",
    )
    salt_by_key: bool = pydantic.Field(
        default=True,
        description="Requests of different keys (serve.http.api_keys_file, serve.grpc.tokens_file) share no cached "
        "pages, so that nobody can find out by its speed whether another has sent a prompt; callers without a key "
        "share theirs. False: all share all.",
    )
    open_doors: list[Literal["grpc", "http"]] = pydantic.Field(
        default=[],
        description="Doors that anyone may call although callers of the other need a key, on addresses that other "
        "machines reach: grpc, http. Without this such a server does not start.",
    )
    drain_s: float = pydantic.Field(default=30.0, ge=0, description="Seconds that running requests get after SIGTERM.")
    degraded_below: float = pydantic.Field(
        default=1.0,
        ge=0,
        le=1,
        description="Probes say `degraded`, with 200 and the reason, while a smaller share of the replicas is well (of "
        "a router: of its servers). 0: never for that reason.",
    )
    export_s: float = pydantic.Field(
        default=5.0,
        ge=0,
        description="Seconds after the drain in which pages of the device that the store lacks are written to it "
        "(store.kind, store.connector); requests that have not ended stand still meanwhile.",
    )
    tenants: TenantsConfig = TenantsConfig()
    grpc: GrpcConfig = GrpcConfig()
    http: HttpConfig = HttpConfig()


class WatchdogConfig(Section):
    """Replicas whose steps do not end or fail: deadlines of steps, and restarts of the replicas of parallel.data."""

    floor_s: float = pydantic.Field(
        default=20.0,
        gt=0,
        description="Least deadline of a step, in seconds. A step that is over its deadline turns its replica red; at "
        "twice the deadline the replica is given up, and its requests go on elsewhere.",
    )
    factor: float = pydantic.Field(
        default=10.0,
        ge=1,
        description="Deadline of a step in multiples of its predicted time, where that is more than floor_s.",
    )
    restarts: int = pydantic.Field(
        default=3,
        ge=0,
        description="Times within window_s that a dead replica of parallel.data is built again; then it stays down.",
    )
    window_s: float = pydantic.Field(default=600.0, gt=0, description="Seconds for which a restart counts.")
    backoff_s: float = pydantic.Field(
        default=1.0, ge=0, description="Seconds before the first restart; twice as many before each further one."
    )
    wait_s: float = pydantic.Field(
        default=30.0,
        ge=0,
        description="Seconds that accepted requests wait for a replica that is built again, if none of parallel.data "
        "is left. 0: they end at once, for a router that has other servers.",
    )


class RouteConfig(Section):
    """The routing of requests to replicas: those of parallel.data, and those behind `jaxserve route`."""

    replicas: list[str] | None = pydantic.Field(
        default=None,
        description="`jaxserve route`: HOST:PORT of each server; dns:///NAME:PORT means every address of NAME.",
    )
    tokenizer: str | None = pydantic.Field(
        default=None,
        description="`jaxserve route`: directory or GGUF file of the servers' tokenizer, with which serve.http.port "
        "answers requests as a server does; null: it has probes and metrics alone.",
    )
    policy: str = pydantic.Field(
        default="prefix", description="Name, entry point, or 'package.module:Class'; see `jaxserve.routing`."
    )
    slack: int = pydantic.Field(
        default=8,
        ge=0,
        description="prefix policy: requests that a replica with a hit may have above the least loaded one.",
    )
    table_blocks: int = pydantic.Field(
        default=65536, ge=1, description="prefix policy: blocks of 16 tokens remembered for each replica."
    )
    seed: int = pydantic.Field(default=0, ge=0, description="power_of_two policy: seed of its random choices.")
    retries: int = pydantic.Field(
        default=3,
        ge=0,
        description="Times that a request is moved from a dead replica to another without a new token between. With "
        "fewer than 3, `jaxserve route` gives up before it is proved that the request is the cause.",
    )
    quarantine_s: float = pydantic.Field(
        default=600.0,
        gt=0,
        description="`jaxserve route`: seconds for which a request that ends the servers that run it is refused.",
    )
    wait_s: float = pydantic.Field(
        default=30.0,
        ge=0,
        description="`jaxserve route`: seconds that a request of a dead replica waits for one that is well.",
    )
    prefill_above: int = pydantic.Field(
        default=512,
        ge=0,
        description="`jaxserve route`: prompts of more tokens (of text: a quarter of its bytes) are computed on a "
        "server with handoff.role prefill, if there is one.",
    )
    prefill_timeout_s: float = pydantic.Field(
        default=120.0, gt=0, description="`jaxserve route`: seconds that such a server may take, its queue included."
    )
    destination_header: bool = pydantic.Field(
        default=False,
        description="`jaxserve route`: the replicas that the metadata x-gateway-destination-endpoint names, by a "
        "gateway's endpoint picker, come first, in its order; others by the policy.",
    )
    health_interval_s: float = pydantic.Field(
        default=1.0, gt=0, description="`jaxserve route`: seconds between health checks of a replica."
    )
    health_timeout_s: float = pydantic.Field(
        default=5.0, gt=0, description="`jaxserve route`: seconds without an answer after which a replica is unhealthy."
    )
    dns_interval_s: float = pydantic.Field(
        default=5.0, gt=0, description="`jaxserve route`: seconds between look-ups of a dns:/// name."
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


class StoreConfig(Section):
    """Where pages of host memory are kept beyond the process; needs cache.host_bytes."""

    kind: str | None = pydantic.Field(
        default=None, description="memory, file, remote, object, entry point, or 'package.module:Class'; null: nowhere."
    )
    connector: str | None = pydantic.Field(
        default=None,
        description="In the place of kind: memory, entry point, or 'package.module:Class' of a connector, which moves "
        "pages by itself.",
    )
    connector_options: dict[str, str | int | float | bool] = pydantic.Field(
        default={}, description="What the connector is told, by names of its own."
    )
    location: str | None = pydantic.Field(
        default=None,
        description="file: a directory; remote: HOST:PORT of a kv-server; object: the URL of a bucket. Each of several "
        "hosts may have its own.",
    )
    max_bytes: int | None = pydantic.Field(
        default=None, ge=1, description="Bytes of all pages, where the store counts."
    )
    pages: Literal["native", "canonical"] = pydantic.Field(
        default="native",
        description="native: pages as this engine lays them out, for engines with the same kernels, devices and "
        "versions. canonical: for all engines of the model with its cache.dtype and cache.page_size; the last bits of "
        "an answer may then depend on which of them computed a page.",
    )
    policy: str | None = pydantic.Field(
        default=None, description="Which pages go beyond max_bytes; see cache.host_policy. Default: the store's."
    )
    admission: Literal["always", "second_sight"] | None = pydantic.Field(
        default=None, description="See cache.host_admission. Default: the store's."
    )
    secret_file: str | None = pydantic.Field(
        default=None,
        description="File of the secret by which pages are named and sealed, the same for all servers that share a "
        "store; a directory makes one by default.",
    )
    compression: Literal["none", "zstd", "auto"] | None = pydantic.Field(
        default=None, description="auto: while the link is slower than the codec. Default: the store's."
    )
    wait_s: float = pydantic.Field(
        default=2.0,
        gt=0,
        description="Seconds that a request waits for its pages at most; less where computing them takes less.",
    )
    tls_ca: str | None = pydantic.Field(default=None, description="remote: PEM file of the server's authorities.")
    tls_cert: str | None = pydantic.Field(default=None, description="remote: PEM file of this client's certificate.")
    tls_key: str | None = pydantic.Field(default=None, description="remote: PEM file of its key.")
    tls_name: str | None = pydantic.Field(
        default=None, description="remote: the name in the server's certificate, if it is not its address."
    )


class HandoffConfig(Section):
    """Prompts computed on one server and answered on another: `docs/apart.md`. Needs cache.host_bytes."""

    role: Literal["both", "prefill", "decode"] = pydantic.Field(
        default="both",
        description="What routers ask of this server: prefill: to compute prompts; decode: to answer; both: either.",
    )
    secret_file: str | None = pydantic.Field(
        default=None,
        description="File of the secret by which servers know the pages and tickets of each other, the same for all. "
        "Null: there are no handoffs.",
    )
    host: Host = pydantic.Field(
        default="127.0.0.1",
        description="Address on which other servers fetch pages; any but a loopback one needs all of tls_*.",
    )
    port: int = pydantic.Field(default=0, ge=0, le=65535, description="Port for that; 0 takes a free one.")
    address: str | None = pydantic.Field(
        default=None, description="HOST:PORT by which other servers reach it. Default: host and port."
    )
    lease_s: float = pydantic.Field(
        default=30.0, gt=0, le=600, description="Seconds for which pages wait for the server that answers."
    )
    max_leases: int = pydantic.Field(
        default=256, ge=1, description="Prompts whose pages wait at once; beyond it, no prompt is computed for others."
    )
    max_pulls: int = pydantic.Field(
        default=8, ge=1, description="Prompts whose pages are sent, and fetched, at once; half of them for one peer."
    )
    max_offers: int = pydantic.Field(
        default=256, ge=1, description="Requests that may be on their way here from servers that compute their prompts."
    )
    wait_s: float = pydantic.Field(
        default=10.0, gt=0, description="Seconds that a request waits for its pages at most; then it computes the rest."
    )
    least_wait_s: float = pydantic.Field(
        default=1.0,
        gt=0,
        description="Seconds that it waits where computing would take less; else it waits as long as computing takes.",
    )
    frame_bytes: int = pydantic.Field(
        default=64 * 2**20,
        ge=2**10,
        le=2**30,
        description="Most bytes of pages in one message: whole pages of both servers must fit.",
    )
    tls_cert: str | None = pydantic.Field(
        default=None, description="PEM file of the certificate that this server shows to the others, both ways."
    )
    tls_key: str | None = pydantic.Field(default=None, description="PEM file of its key, without a password.")
    tls_ca: str | None = pydantic.Field(
        default=None, description="PEM file of the authorities that sign the certificates of the others."
    )
    tls_name: str | None = pydantic.Field(
        default=None, description="The name in the certificates of the others, if it is not their address."
    )


class EventsConfig(Section):
    """Events of pages for endpoint pickers, over ZeroMQ in vLLM's format; needs the extra kv-events."""

    port: int | None = pydantic.Field(
        default=None,
        ge=1,
        le=65535,
        description="Port of the first replica; the next has the next. null: no events.",
    )
    host: Host = pydantic.Field(
        default="127.0.0.1", description="Address to listen on. Anyone who connects reads all events."
    )
    topic: str = pydantic.Field(
        default="", description="Before each message; llm-d reads kv@HOST:PORT@MODEL, of the pod's HTTP port."
    )
    token_ids: bool = pydantic.Field(
        default=False, description="Send the tokens of each page: the prompts and answers, to anyone who connects."
    )
    max_queued: int = pydantic.Field(
        default=100_000, ge=1, description="Events that wait to be sent; those beyond are lost, and counted."
    )


class KVServerConfig(Section):
    """`jaxserve kv-server`: a machine that keeps pages of keys and values for servers."""

    host: Host = pydantic.Field(
        default="127.0.0.1", description="Address to listen on; any but a loopback one needs all of tls_*."
    )
    port: int = pydantic.Field(default=0, ge=0, le=65535, description="0 takes a free port.")
    directory: str | None = pydantic.Field(
        default=None, description="Directory of the pages, which must be this user's alone; null: they are in memory."
    )
    max_bytes: int = pydantic.Field(default=4 * 2**30, ge=1, description="Bytes of all pages; beyond it, some go.")
    policy: str = pydantic.Field(
        default="lru", description="Which pages go: lru, lfu, arc, s3-fifo, entry point, or 'package.module:Class'."
    )
    admission: Literal["always", "second_sight"] = pydantic.Field(
        default="second_sight",
        description="always: every page is kept; second_sight: while pages go sooner than they come back, a page is "
        "kept from the second time on that it is sent.",
    )
    max_page_bytes: int = pydantic.Field(
        default=64 * 2**20, ge=1024, le=2**30, description="Most bytes of a page, as it is sent."
    )
    threads: int = pydantic.Field(
        default=8, ge=1, description="Calls that are worked on at once; eight times as many may wait."
    )
    tls_cert: str | None = pydantic.Field(
        default=None,
        description="PEM file of the server's certificate and those between it and its root; null: no TLS.",
    )
    tls_key: str | None = pydantic.Field(default=None, description="PEM file of its key, without a password.")
    tls_client_ca: str | None = pydantic.Field(
        default=None, description="PEM file of authorities; clients must show a certificate that one has signed."
    )


class AdaptersConfig(Section):
    """LoRA adapters beside the model (docs/lora.md)."""

    slots: int = pydantic.Field(
        default=0,
        ge=0,
        le=64,
        description="Adapters that one step can have; each takes memory of the device. 0: requests name no adapters.",
    )
    max_rank: Literal[8, 16, 32, 64] = pydantic.Field(
        default=16, description="Largest rank of an adapter; smaller ones take the same memory and time."
    )
    host_bytes: int = pydantic.Field(
        default=2**30,
        ge=1,
        description="Bytes of the host's memory for weights of adapters. Those that no request has give way, and are "
        "read again when one needs them.",
    )
    load: dict[str, str] = pydantic.Field(
        default={}, description="Adapters to load at the start: the name of each, and its directory."
    )
    directory: str | None = pydantic.Field(
        default=None,
        description="Directory of the adapters that operators may load into a running server; null: none.",
    )


class DegradeConfig(Section):
    """What the engine does without under pressure, one rung after the other (docs/degradation.md)."""

    highest: Literal[
        "none", "no_prefetch", "no_saves", "no_store", "no_speculation", "small_chunks", "refuse", "drain"
    ] = pydantic.Field(default="none", description="The last rung that may be taken; none: there are no looks at all.")
    queue_s: float = pydantic.Field(
        default=10.0, gt=0, description="Seconds that a request may wait for its first token; more is pressure."
    )
    step_ms: float = pydantic.Field(
        default=1000.0, gt=0, description="Milliseconds that a step may take on average; more is pressure."
    )
    up_s: float = pydantic.Field(default=5.0, ge=0, description="Seconds of pressure before each rung.")
    down_s: float = pydantic.Field(default=30.0, ge=0, description="Seconds of calm before a rung is given back.")
    calm: float = pydantic.Field(
        default=0.5, gt=0, lt=1, description="Share of queue_s and step_ms below which it is calm."
    )


class Config(Section):
    """The whole configuration."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    sched: SchedConfig = SchedConfig()
    degrade: DegradeConfig = DegradeConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    adapters: AdaptersConfig = AdaptersConfig()
    kernels: KernelsConfig = KernelsConfig()
    attention: AttentionConfig = AttentionConfig()
    parallel: ParallelConfig = ParallelConfig()
    hosts: HostsConfig = HostsConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    vision: VisionConfig = VisionConfig()
    rerank: RerankConfig = RerankConfig()
    serve: ServeConfig = ServeConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    route: RouteConfig = RouteConfig()
    store: StoreConfig = StoreConfig()
    handoff: HandoffConfig = HandoffConfig()
    events: EventsConfig = EventsConfig()
    kv_server: KVServerConfig = KVServerConfig()
