"""What users of vLLM, SGLang, llama.cpp and transformers type, and what it is here.

One table for all: flags of commands, keys of a config, arguments of `LLM` and of its methods, `SamplingParams`, and
fields of HTTP bodies. A name of the table is never accepted in the place of another, since only few mean exactly the
same; the error says what to write. Where an option cannot be had, the error says so: a user who were told to leave it
out would get another answer.
"""

import enum
import functools
from collections.abc import Collection, Mapping
from typing import NamedTuple


class Place(enum.StrEnum):
    """Where a name was written."""

    FLAG = "flag"  # of a command with --set
    SETTING = "setting"  # the last part of a dotted name
    MODEL = "model"  # an argument of LLM and AsyncLLM
    CALL = "call"  # an argument of generate, chat, embed and other methods
    SAMPLING = "sampling"  # a field of SamplingParams, or of a line of a batch
    REQUEST = "request"  # a field of an HTTP body


class Row(NamedTuple):
    """One thing that other engines have, under all of its names.

    Attributes:
      names: as they are written in Python, of all engines, one after the other.
      setting: dotted name of the setting here.
      model: argument of `LLM`; by default that of `SAME` with this setting.
      call: argument of a method of `LLM`.
      sampling: field of `SamplingParams`.
      request: field of bodies of completions or chats; by default `sampling`.
      note: what differs, or how; alone: why nothing here has this name.
    """

    names: str
    setting: str = ""
    model: str = ""
    call: str = ""
    sampling: str = ""
    request: str = ""
    note: str = ""


_ALWAYS = "not needed here: "
_NONE = "not implemented here: "

ROWS: tuple[Row, ...] = (
    # The model.
    Row("model model_path model_tag pretrained_model_name_or_path m", setting="model.path", model="model"),
    Row(
        "hf_repo hf_file revision code_revision tokenizer_revision download_dir cache_dir local_files_only hf_token",
        note=f"{_ALWAYS}jaxserve downloads nothing; `hf download NAME --local-dir DIRECTORY` does, also with "
        "--revision, and DIRECTORY is the model",
    ),
    Row(
        "load_format model_loader_extra_config",
        note=f"{_ALWAYS}files of a checkpoint are recognised; weights at random are model.random_weights",
    ),
    Row("tokenizer_path", setting="model.tokenizer"),
    Row("tokenizer_mode", note=f"{_ALWAYS}the tokenizer is recognised by its files"),
    Row("skip_tokenizer", setting="model.skip_tokenizer"),
    Row("alias model_alias", setting="model.name"),
    Row("torch_dtype", setting="model.dtype"),
    Row(
        "load_in_8bit load_in_4bit quantization_config",
        setting="model.quantization",
        note="int8 or int4; a checkpoint that is quantised is read as it is",
    ),
    Row("context_length ctx_size n_ctx c max_seq_len", setting="model.max_len"),
    Row("random_seed", setting="model.seed"),
    Row(
        "hf_overrides json_model_override_args rope_scaling rope_theta",
        setting="model.overrides",
        note="of config.json",
    ),
    Row("pooler_config override_pooler_config pooling_type", setting="model.pooling"),
    Row("model_impl", setting="model.family"),
    Row(
        "trust_remote_code allow_remote_code",
        note=f"{_ALWAYS}no code of a checkpoint is ever run; families are in the package, or named by model.family",
    ),
    Row("task runner convert is_embedding embedding embeddings reranking", note=f"{_ALWAYS}a model does all it can do"),
    Row(
        "generation_config override_generation_config preferred_sampling_params",
        note="a request says what it wants; what generation_config.json recommends is the default of LLM and jaxserve "
        "run, and is not applied over HTTP and gRPC",
    ),
    Row(
        "chat_template_content_format jinja",
        note=f"{_ALWAYS}the template is chat_template.jinja of the model's directory, and its form is recognised",
    ),
    # Pages and memory.
    Row("page_size", setting="cache.page_size"),
    Row("max_total_tokens", setting="cache.num_pages", note="pages, not tokens"),
    Row("mem_fraction_static", setting="cache.memory_fraction"),
    Row("kv_cache_memory_bytes", setting="cache.memory_bytes"),
    Row("kv_cache_dtype cache_type_k cache_type_v type_k type_v", setting="cache.dtype", note="keys and values alike"),
    Row("calculate_kv_scales quantization_param_path", setting="cache.scales", note="from `jaxserve calibrate-cache`"),
    Row("disable_radix_cache", setting="cache.prefix_caching", note="false turns it off"),
    Row(
        "swap_space kv_offloading_size hicache_size hicache_ratio enable_hierarchical_cache cache_ram",
        setting="cache.host_bytes",
        note="in bytes",
    ),
    Row("hicache_storage_backend kv_transfer_config", setting="store.kind", note="see docs/kv-stores.md"),
    Row("disaggregation_mode disaggregation_transfer_backend", setting="handoff.role", note="see docs/apart.md"),
    Row("kv_events_config", setting="events.port"),
    Row(
        "cpu_offload_gb offload_folder low_vram",
        note=f"{_NONE}all weights are on the devices; model.quantization and parallel.tensor make room",
    ),
    # The scheduler.
    Row("max_running_requests n_parallel parallel max_batch_size", setting="sched.max_rows"),
    Row(
        "chunked_prefill_size max_prefill_tokens n_batch batch_size ubatch_size n_ubatch",
        setting="sched.max_step_tokens",
    ),
    Row("long_prefill_token_threshold enable_mixed_chunk", setting="sched.max_mixed_tokens"),
    Row("scheduling_policy schedule_policy scheduler_cls", setting="sched.policy", model="scheduler"),
    Row("max_queued_requests", setting="sched.max_waiting"),
    Row("cont_batching", note=f"{_ALWAYS}requests always join and leave a batch between two steps"),
    Row("disable_log_stats enable_metrics metrics", note=f"{_ALWAYS}figures are at /metrics, and no line is logged"),
    # Drafts.
    Row(
        "speculative_config speculative_algorithm prompt_lookup_num_tokens assistant_model",
        setting="speculation.method",
        note="see docs/speculation.md",
    ),
    Row(
        "num_speculative_tokens speculative_num_draft_tokens draft_max",
        setting="speculation.width",
        note="drafts and the token before them, so one more",
    ),
    Row("speculative_model speculative_draft_model_path model_draft draft_model", setting="speculation.model"),
    Row("ngram_prompt_lookup_min prompt_lookup_min", setting="speculation.ngram_min"),
    Row("ngram_prompt_lookup_max prompt_lookup_max", setting="speculation.ngram_max"),
    # Adapters.
    Row("enable_lora max_loras max_loras_per_batch", setting="adapters.slots", note="0: none"),
    Row("max_lora_rank", setting="adapters.max_rank"),
    Row("lora_modules lora_paths lora", setting="adapters.load"),
    Row("max_cpu_loras max_loaded_loras", setting="adapters.host_bytes", note="in bytes"),
    Row("lora_request lora_path", call="adapter", request="model", note="the name of an adapter that is loaded"),
    Row("prompt_adapter_request enable_prompt_adapter", note=f"{_NONE}adapters are LoRA"),
    # Devices.
    Row("tp tp_size", setting="parallel.tensor"),
    Row("pp pp_size", setting="parallel.pipeline"),
    Row("dp dp_size", setting="parallel.data"),
    Row("enable_expert_parallel ep_size expert_parallel_size", setting="parallel.expert"),
    Row("dist_init_addr master_addr", setting="hosts.coordinator"),
    Row("nnodes", setting="hosts.num_processes"),
    Row("node_rank", setting="hosts.process_id"),
    Row(
        "distributed_executor_backend", note=f"{_ALWAYS}each host runs one process (docs/hosts.md); Ray: docs/fleets.md"
    ),
    Row("disable_custom_all_reduce", note=f"{_ALWAYS}XLA makes the collectives"),
    Row(
        "device device_map n_gpu_layers gpu_layers main_gpu",
        note=f"{_ALWAYS}all layers are on JAX's devices; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES choose these",
    ),
    Row("use_mmap use_mlock mmap no_mmap mlock", note=f"{_ALWAYS}weights are read into the memory that computes"),
    Row(
        "threads n_threads threads_batch",
        note=f"{_ALWAYS}all cores that the process may use compute; `taskset` limits them",
    ),
    # The compiled step.
    Row("attention_backend attn_implementation flash_attn", setting="kernels.paged_attention"),
    Row(
        "enforce_eager disable_cuda_graph",
        note=f"{_ALWAYS}every step is a compiled program; runtime.row_buckets and token_buckets make fewer of them",
    ),
    Row(
        "compilation_config cuda_graph_sizes cuda_graph_bs cuda_graph_max_bs cudagraph_capture_sizes compile_sizes",
        setting="runtime.row_buckets",
        note="of steps with prompts: runtime.token_buckets",
    ),
    Row("enable_deterministic_inference", setting="runtime.batch_invariant"),
    Row("skip_server_warmup warmup no_warmup", setting="runtime.background_buckets"),
    Row("enable_sleep_mode", note=f"{_ALWAYS}LLM.sleep works without; over HTTP it is for operators"),
    # The server.
    Row("host hostname", setting="serve.host", note="`jaxserve serve MODEL --host H`"),
    Row("port", setting="serve.http.port", note="`jaxserve serve MODEL --port N`; of gRPC: serve.grpc.port"),
    Row(
        "api_key api_key_file",
        setting="serve.http.api_keys_file",
        note="a file, one key a line; gRPC: serve.grpc.tokens_file",
    ),
    Row("ssl_certfile ssl_cert_file", setting="serve.http.tls_cert"),
    Row("ssl_keyfile ssl_key_file", setting="serve.http.tls_key"),
    Row("ssl_ca_certs", setting="serve.http.tls_client_ca"),
    Row("allowed_origins", setting="serve.http.cors_origins"),
    Row("tool_call_parser", setting="serve.http.tool_parser"),
    Row("enable_auto_tool_choice", setting="serve.http.tool_parser", note="tools always work where a parser is known"),
    Row("reasoning_parser reasoning_format enable_reasoning", setting="serve.http.reasoning_parser"),
    Row("profiler_config torch_profiler_dir", setting="serve.http.profile_dir"),
    Row("webui no_webui", setting="serve.http.web_page"),
    Row("log_level uvicorn_log_level verbosity", setting="runtime.log_level"),
    Row("enable_log_requests disable_log_requests", setting="runtime.log_requests"),
    Row("max_log_len", note=f"{_ALWAYS}texts are never logged; runtime.log_prompts adds ids of prompts"),
    Row("otlp_traces_endpoint", setting="runtime.trace_endpoint"),
    Row("watchdog_timeout", setting="watchdog.floor_s"),
    Row("api_server_count num_workers", note=f"{_ALWAYS}one process serves; `jaxserve route` joins several"),
    Row("response_role", note=f"{_ALWAYS}answers are the assistant's"),
    Row("max_logprobs", note=f"{_ALWAYS}a request may ask for 20"),
    Row(
        "guided_decoding_backend structured_outputs_config grammar_backend guided_whitespace_pattern",
        note=f"{_ALWAYS}llguidance holds every constraint (docs/structured-output.md)",
    ),
    Row("limit_mm_per_prompt", setting="vision.max_pictures"),
    Row("min_pixels image_max_tokens", setting="vision.max_pixels"),
    Row("mm_processor_cache_gb", setting="vision.pool_tokens", note="in tokens; beyond the device: vision.host_bytes"),
    # What is sampled.
    Row("max_new_tokens n_predict", sampling="max_tokens"),
    Row("max_completion_tokens max_output_tokens", sampling="max_tokens"),
    Row("max_length", sampling="max_tokens", note="tokens of the answer alone; truncate_prompt_tokens cuts prompts"),
    Row("min_new_tokens", sampling="min_tokens"),
    Row("min_length", sampling="min_tokens", note="tokens of the answer alone"),
    Row("temp", sampling="temperature"),
    Row("do_sample", sampling="temperature", note="0 is greedy"),
    Row("num_return_sequences num_generations", sampling="n"),
    Row("best_of", sampling="n", note="ask for n answers with logprobs, and keep the best"),
    Row("repeat_penalty", sampling="repetition_penalty", note="over the prompt and the whole answer"),
    Row("repeat_last_n penalty_last_n", note=f"{_NONE}penalties count the whole answer"),
    Row("stop_strings stop_sequences", sampling="stop"),
    Row("eos_token_id", sampling="stop_token_ids"),
    Row("suppress_tokens sequence_bias", sampling="logit_bias", note="-100 forbids a token"),
    Row("bad_words_ids", sampling="bad_words", note="texts, not ids"),
    Row("num_logprobs n_probs top_logprobs_num return_logprob output_logprobs output_scores", sampling="logprobs"),
    Row("top_logprobs", sampling="logprobs"),
    Row("logprob_start_len return_prompt_logprobs", sampling="prompt_logprobs"),
    Row(
        "guided_decoding guided_options_request guided_json guided_regex guided_choice guided_grammar "
        "structured_outputs response_format json_schema regex ebnf grammar structural_tag",
        sampling="structured",
        request="structured_outputs",
        note="{'regex': ...}, {'choice': [...]}, {'grammar': ...}; JSON: {'json_schema': ...} in Python, {'json': "
        "...} over HTTP",
    ),
    Row(
        "logits_processors logits_processor custom_logit_processor logit_processors",
        note=f"{_NONE}logit_bias, allowed_token_ids, bad_words and structured run on the device",
    ),
    Row(
        "num_beams use_beam_search beam_width num_beam_groups diversity_penalty length_penalty early_stopping",
        note=f"{_NONE}there is no beam search; draw n answers with logprobs, and keep the likeliest",
    ),
    Row(
        "no_repeat_ngram_size encoder_repetition_penalty dry_multiplier dry_base dry_allowed_length",
        note=f"{_NONE}repetition_penalty, frequency_penalty and presence_penalty are",
    ),
    Row(
        "typical_p tfs_z top_a top_n_sigma mirostat mirostat_tau mirostat_eta xtc_probability xtc_threshold "
        "dynatemp_range dynatemp_exponent epsilon_cutoff eta_cutoff penalty_alpha top_h",
        note=f"{_NONE}temperature, top_k, top_p and min_p choose among tokens",
    ),
    Row(
        "samplers sampler_seq",
        note=f"{_NONE}samplers have one order, which docs/differences.md and SamplingParams name",
    ),
    Row("thinking_budget thinking_token_budget", note=f"{_NONE}max_tokens is for thoughts and answer together"),
    Row(
        "spaces_between_special_tokens clean_up_tokenization_spaces",
        note=f"{_ALWAYS}no blanks are added to a text, and none are taken away",
    ),
    Row("return_tensors padding", note=f"{_ALWAYS}a prompt is a list of ids of any length"),
    Row("output_kind", note="LLM.generate returns whole outputs; LLM.stream and AsyncLLM give new text as it comes"),
    Row("extra_args vllm_xargs custom_params", note=f"{_NONE}nothing here reads it"),
    # What is asked.
    Row("prompt_token_ids input_ids inputs", call="prompts", request="prompt", note="a list of ids is a prompt"),
    Row("prompt_embeds inputs_embeds", note=f"{_NONE}prompts are texts or token ids"),
    Row("pooling_params", call="dimensions", note="and normalize and truncate_prompt_tokens are arguments of embed"),
    Row("tokenization_kwargs truncation", sampling="truncate_prompt_tokens", note="of embed: an argument of that name"),
    Row("level", call="keep_weights", note="of sleep: true is level 1, false is level 2"),
    Row("streamer", note="LLM.stream yields new text as it comes; AsyncLLM is for asyncio"),
    Row("stream", request="stream", note="in Python: LLM.stream, or AsyncLLM"),
    Row("separate_reasoning", request="include_reasoning", note="thoughts are always apart from the answer"),
    Row(
        "enable_thinking thinking",
        call="chat_template_kwargs",
        request="chat_template_kwargs",
        note="{'enable_thinking': ...}, or what the template reads",
    ),
    Row("continue_final_message", note=f"{_NONE}complete a prompt that you have rendered yourself"),
    Row("documents", note=f"{_NONE}put them into a message"),
    Row(
        "mm_processor_kwargs media_io_kwargs multi_modal_data",
        note="the model's own files say how pictures are read; vision.max_pixels bounds them",
    ),
    Row("functions", call="tools", request="tools"),
    Row("function_call", request="tool_choice"),
    Row("sampling_params", call="sampling_params", note="over HTTP its fields stand in the body itself"),
    Row("priority", call="priority", request="priority"),
    Row("cache_salt", call="cache_salt", request="cache_salt"),
    Row("request_id rid", call="request_id", request="request_id", note="of AsyncLLM"),
    Row("kv_transfer_params", note="requests say nothing of that; see handoff.role"),
)

# vLLM's names that mean exactly the same, and work: arguments of `LLM`, and flags of `jaxserve serve` -> setting.
SAME: Mapping[str, str] = {
    "tokenizer": "model.tokenizer",
    "skip_tokenizer_init": "model.skip_tokenizer",
    "served_model_name": "model.name",
    "dtype": "model.dtype",
    "quantization": "model.quantization",
    "seed": "model.seed",
    "max_model_len": "model.max_len",
    "max_num_seqs": "sched.max_rows",
    "max_num_batched_tokens": "sched.max_step_tokens",
    "enable_prefix_caching": "cache.prefix_caching",
    "enable_chunked_prefill": "sched.chunked_prefill",
    "block_size": "cache.page_size",
    "num_gpu_blocks_override": "cache.num_pages",
    "gpu_memory_utilization": "cache.memory_fraction",
    "tensor_parallel_size": "parallel.tensor",
    "pipeline_parallel_size": "parallel.pipeline",
    "data_parallel_size": "parallel.data",
}

_DOWNLOAD = (
    "`hf download OWNER/NAME --local-dir DIRECTORY`, since jaxserve downloads nothing; then `jaxserve chat DIRECTORY`"
)
_DIRECTORY = "`ls`, or `rm`: a model is a directory, or a GGUF file, wherever you keep it"

COMMANDS: Mapping[str, str] = {  # commands of others -> how it is done here
    "complete": "`jaxserve run --prompt TEXT`",
    "generate": "`jaxserve run --prompt TEXT`",
    "run-batch": "`jaxserve run --input FILE --output FILE`",
    "launch_server": "`jaxserve serve MODEL --port N`",
    "api_server": "`jaxserve serve MODEL --port N`",
    "server": "`jaxserve serve MODEL --port N`",
    "start": "`jaxserve serve MODEL --port N`",
    "pull": _DOWNLOAD,
    "download": _DOWNLOAD,
    "list": _DIRECTORY,
    "ls": _DIRECTORY,
    "rm": _DIRECTORY,
    "ps": "`jaxserve top HOST:PORT`, of one server, which has one model",
    "stop": "SIGTERM, or Ctrl-C, to the process of the server",
    "quantise": "`jaxserve quantize`",
    "collect-env": "`jaxserve version`",
}


ATTRIBUTES: Mapping[str, str] = {  # what others have on a loaded model -> how it is done here
    **dict.fromkeys(("create_completion", "complete", "async_generate", "add_request"), "generate"),
    **dict.fromkeys(("create_chat_completion", "conversation"), "chat"),
    **dict.fromkeys(("create_embedding", "encode", "embed_query"), "embed"),
    **dict.fromkeys(("generate_stream", "stream_generate", "stream_chat"), "stream (of AsyncLLM: generate)"),
    **dict.fromkeys(("classify", "reward", "rerank"), "score (of a model that judges; there are no classifiers)"),
    **dict.fromkeys(("tokenize", "apply_chat_template", "preprocess_chat"), "get_tokenizer()"),
    **dict.fromkeys(("detokenize", "decode", "batch_decode"), "get_tokenizer().decode(ids)"),
    **dict.fromkeys(("add_lora", "load_lora_adapter"), "load_adapter"),
    **dict.fromkeys(("remove_lora", "unload_lora_adapter"), "unload_adapter"),
    **dict.fromkeys(("update_weights_from_disk", "update_weights_from_tensor", "load_weights"), "update_weights"),
    "release_memory_occupation": "sleep",
    "resume_memory_occupation": "wake_up",
    "beam_search": "generate with SamplingParams(n=..., logprobs=...), of which you keep the likeliest; no beams",
}


def answer(name: str, place: Place, known: Collection[str] | None = None) -> str | None:
    """What `name` is here, as the end of a sentence about it; None: the table has no such name.

    `known`: for a REQUEST, the fields that its body may have, since not every route has all of them.
    """
    row = _table().get(name)
    if row is None:
        return None
    found = _here(row, place, known)
    if found is None:
        is_of_others = place is Place.REQUEST and (row.sampling or row.request)
        return "this route has nothing like it" if is_of_others else row.note
    return f"{found} ({row.note})" if row.note else found


def command_answer(name: str) -> str | None:
    """How that which the command `name` does elsewhere is done here."""
    return COMMANDS.get(name)


@functools.cache
def _table() -> Mapping[str, Row]:
    rows = {name: Row(name, setting=setting) for name, setting in SAME.items()}
    return {**rows, **{name: row for row in ROWS for name in row.names.split()}}


def _here(row: Row, place: Place, known: Collection[str] | None) -> str | None:
    setting, sampling, call = row.setting, row.sampling, row.call
    request = row.request or sampling
    match place:
        case Place.FLAG:
            if setting:
                return f"here it is --set {setting}=VALUE"
            return f"each request says it, as {request or call!r}" if request or call else None
        case Place.SETTING:
            if setting:
                return f"here it is {setting!r}"
            return f"each request says it, as {request or call!r}" if request or call else None
        case Place.MODEL:
            argument = row.model or next((name for name, same in SAME.items() if same == setting), "")
            if argument:
                return f"here it is {argument!r}"
            if setting:
                return f"here it is the setting {setting!r}: from_config(None, overrides={{{setting!r}: ...}})"
            return _of_a_call(sampling, call, request)
        case Place.CALL:
            if call:
                return f"here it is {call!r}"
            return _of_a_call(sampling, call, request) or _of_the_engine(setting)
        case Place.SAMPLING:
            if sampling:
                return f"here it is {sampling!r}"
            return _of_a_call(sampling, call, request) or _of_the_engine(setting)
        case Place.REQUEST:
            if request and (known is None or request in known):
                return f"here it is {request!r}"
            return None if request else _of_the_engine(setting)


def _of_a_call(sampling: str, call: str, request: str) -> str | None:
    if sampling:
        return f"here it is SamplingParams({sampling}=...)"
    if call:
        return f"here it is {call!r}, an argument of the call that asks"
    return f"over HTTP it is {request!r}" if request else None


def _of_the_engine(setting: str) -> str | None:
    return f"the engine has it, not a request: the setting {setting!r}" if setting else None
