"""What users of vLLM, SGLang, llama.cpp and transformers type, and what it is here.

One table for all: flags of commands, keys of a config, arguments of `LLM` and of its methods, `SamplingParams`, and
fields of HTTP bodies. A name of the table is never accepted in the place of another, since only few mean exactly the
same; the error says what to write. Where an option cannot be had, the error says so: a user who were told to leave it
out would get another answer.
"""

import enum
import fnmatch
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
      names: as they are written in Python, of all engines, one after the other; `*` stands for any letters, and of
        several that fit the longest counts.
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
    Row("model model_path model_tag pretrained_model_name_or_path -m", setting="model.path", model="model"),
    Row(
        "hf_repo hf_file revision code_revision tokenizer_revision download_dir cache_dir local_files_only "
        "hf_token -hf -hff -hft -hfr -cl token variant subfolder force_download proxies offline use_auth_token "
        "model_url -mu docker_repo -dr hf_repo_v hf_file_v cache_list mmproj_url -mmu hf_repo_draft spec_draft_hf "
        "-hfd embd_gemma_default fim_qwen_* gpt_oss_* vision_gemma_* from_pretrained",
        note=f"{_ALWAYS}jaxserve downloads nothing; `hf download NAME --local-dir DIRECTORY` does, also with "
        "--revision, and DIRECTORY is the model",
    ),
    Row(
        "load_format model_loader_extra_config model_weights config_format model_config_parser hf_config_path "
        "model_class_overrides safetensors_load_strategy ignore_patterns use_tqdm_on_load pt_load_map_location "
        "max_parallel_loading_workers use_safetensors gguf_file weights_only low_cpu_mem_usage "
        "ignore_mismatched_sizes output_loading_info state_dict from_flax from_tf key_mapping framework "
        "weight_loader_* remote_instance_weight_loader_* custom_weight_loader startup_weight_load_mode "
        "delete_ckpt_after_loading model_checksum decrypted_config_file decrypted_draft_config_file "
        "modelexpress_config checkpoint_engine_wait_weights_before_ready vocab_only",
        note=f"{_ALWAYS}files of a checkpoint are recognised; weights at random are model.random_weights",
    ),
    Row("tokenizer_path", setting="model.tokenizer"),
    Row("tokenizer_mode tokenizer_backend use_fast", note=f"{_ALWAYS}the tokenizer is recognised by its files"),
    Row("skip_tokenizer tokens_only", setting="model.skip_tokenizer"),
    Row("alias model_alias -a", setting="model.name"),
    Row(
        "torch_dtype override_attention_dtype rl_on_policy_target enable_fp32_lm_head enable_tf32_matmul",
        setting="model.dtype",
    ),
    Row(
        "load_in_8bit load_in_4bit quantization_config -q quantize_and_serve modelopt_* torchao_config "
        "allow_deprecated_quantization rl_quant_profile",
        setting="model.quantization",
        note="int8 or int4; a checkpoint that is quantised is read as it is",
    ),
    Row(
        "context_length ctx_size n_ctx -c max_seq_len max_cache_len fit_ctx -fitc kv_unified_per_slot",
        setting="model.max_len",
    ),
    Row("random_seed -s", setting="model.seed"),
    Row(
        "hf_overrides json_model_override_args rope_scaling rope_theta rope_* yarn_* override_kv kv_overrides",
        setting="model.overrides",
        note="of config.json",
    ),
    Row("pooler_config override_pooler_config pooling_type pooling", setting="model.pooling"),
    Row("model_impl", setting="model.family"),
    Row(
        "trust_remote_code allow_remote_code custom_generate pipeline_class",
        note=f"{_ALWAYS}no code of a checkpoint is ever run; families are in the package, or named by model.family",
    ),
    Row(
        "task runner convert is_embedding embedding embeddings reranking rerank enable_multimodal language_model_only",
        note=f"{_ALWAYS}a model does all it can do",
    ),
    Row(
        "generation_config override_generation_config preferred_sampling_params sampling_defaults",
        note="a request says what it wants; what generation_config.json recommends is the default of LLM and jaxserve "
        "run, and is not applied over HTTP and gRPC",
    ),
    Row(
        "chat_template_content_format jinja no_jinja hf_chat_template_name chat_format chat_handler "
        "completion_template spm_infill",
        note=f"{_ALWAYS}the template is chat_template.jinja of the model's directory, and its form is recognised",
    ),
    # Pages and memory.
    Row("page_size", setting="cache.page_size"),
    Row("max_total_tokens", setting="cache.num_pages", note="pages, not tokens"),
    Row("mem_fraction_static max_memory fit -fit fit_target -fitt", setting="cache.memory_fraction"),
    Row("kv_cache_memory_bytes cpu_kvcache_space_bytes", setting="cache.memory_bytes"),
    Row(
        "kv_cache_dtype cache_type_k cache_type_v type_k type_v -ctk -ctv prefill_kv_cache_dequant_dtype "
        "cache_implementation",
        setting="cache.dtype",
        note="keys and values alike",
    ),
    Row("calculate_kv_scales quantization_param_path", setting="cache.scales", note="from `jaxserve calibrate-cache`"),
    Row(
        "disable_radix_cache cache_reuse n_cache_reuse cache_prompt no_cache_prompt use_cache "
        "prefill_only_disable_kv_cache",
        setting="cache.prefix_caching",
        note="false turns it off",
    ),
    Row(
        "swap_space kv_offloading_size hicache_size hicache_ratio enable_hierarchical_cache cache_ram -cram "
        "hicache_* enable_unified_memory kv_offloading_backend kv_offload no_kv_offload -kvo -nkvo offload_kqv",
        setting="cache.host_bytes",
        note="in bytes",
    ),
    Row(
        "hicache_storage_backend kv_transfer_config hicache_storage_* enable_lmcache lmcache_config_file "
        "enable_flexkv flexkv_config_file lookup_cache_static -lcs lookup_cache_dynamic -lcd",
        setting="store.kind",
        note="see docs/kv-stores.md",
    ),
    Row(
        "disaggregation_mode disaggregation_transfer_backend disaggregation_* optimistic_prefill_attempts "
        "num_reserved_decode_tokens enable_pd_role_switch enable_pdmux pdmux_config_path sm_group_num "
        "mooncake_ib_device",
        setting="handoff.role",
        note="see docs/apart.md",
    ),
    Row("kv_events_config", setting="events.port"),
    Row(
        "cpu_offload_gb offload_folder low_vram cpu_offload_params offload_* enable_weights_cpu_backup "
        "enable_draft_weights_cpu_backup cpu_moe -cmoe n_cpu_moe -ncmoe n_cpu_ffn -ncffn moe_cache_mib "
        "override_tensor -ot lazy_mode -lzm kt_* ple_offload_* enable_paged_experts paged_experts_num_resident "
        "cpu_moe_draft n_cpu_moe_draft override_tensor_draft -otd",
        note=f"{_NONE}all weights are on the devices; model.quantization and parallel.tensor make room",
    ),
    # The scheduler.
    Row(
        "max_running_requests n_parallel parallel max_batch_size -np pp_max_micro_batch_size prefill_max_requests",
        setting="sched.max_rows",
    ),
    Row(
        "chunked_prefill_size max_prefill_tokens n_batch batch_size ubatch_size n_ubatch -b -ub "
        "max_num_scheduled_tokens prefill_chunk_size max_lora_chunk_size",
        setting="sched.max_step_tokens",
    ),
    Row(
        "long_prefill_token_threshold enable_mixed_chunk max_num_partial_prefills max_long_partial_prefills "
        "enable_prefill_delayer prefill_delayer_* prefill_decode_interval prefill_decode_interval_min_bs",
        setting="sched.max_mixed_tokens",
    ),
    Row(
        "scheduling_policy schedule_policy scheduler_cls enable_priority_scheduling "
        "abort_on_priority_when_disabled schedule_low_priority_values_first disable_priority_preemption "
        "priority_scheduling_preemption_threshold default_priority_value retraction_policy load_balance_method",
        setting="sched.policy",
        model="scheduler",
    ),
    Row("max_queued_requests max_num_queued_reqs", setting="sched.max_waiting"),
    Row(
        "cont_batching -cb -nocb no_cont_batching async_scheduling disable_async_output_proc "
        "disable_overlap_schedule num_scheduler_steps multi_step_stream_outputs num_continuous_decode_steps "
        "scheduler_recv_interval continuous_batching_config enable_dynamic_chunking",
        note=f"{_ALWAYS}requests always join and leave a batch between two steps",
    ),
    Row(
        "disable_log_stats enable_metrics metrics enable_metrics_for_all_schedulers "
        "show_hidden_metrics_for_version kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics "
        "enable_mfu_metrics enable_mm_processor_stats enable_logging_iteration_details aggregate_engine_logging "
        "enable_request_time_stats_logging decode_log_interval stat_loggers bucket_* prompt_tokens_buckets "
        "generation_tokens_buckets extra_metric_labels tokenizer_metrics_* export_metrics_to_file "
        "export_metrics_to_file_dir show_time_cost enable_forward_pass_metrics forward_pass_metrics_* "
        "load_publish_endpoint load_snapshot_publish_interval perf no_perf slots no_slots props "
        "expert_balancedness_report_mode timings_per_token return_progress",
        note=f"{_ALWAYS}figures are at /metrics, and no line is logged",
    ),
    # Drafts.
    Row(
        "speculative_config speculative_algorithm prompt_lookup_num_tokens assistant_model speculative_* "
        "spec_type spec_default spec_draft_* spec_ngram_* spec_synth_* assistant_* is_assistant "
        "num_assistant_tokens_schedule target_lookbehind speculation_type use_mtp draft_min draft_n_min "
        "draft_p_split draft_p_min threads_draft -td threads_batch_draft -tbd cpu_mask_draft cpu_range_draft "
        "cpu_strict_draft prio_draft poll_draft device_draft -devd gpu_layers_draft n_gpu_layers_draft -ngld "
        "cache_type_k_draft cache_type_v_draft decoupled_spec_* spec_trace_dir -sc dllm_algorithm "
        "dllm_algorithm_config dllm_fdfo",
        setting="speculation.method",
        note="see docs/speculation.md",
    ),
    Row(
        "num_speculative_tokens speculative_num_draft_tokens draft_max draft draft_n spec_draft_n_max "
        "spec_ngram_mod_n_max num_assistant_tokens",
        setting="speculation.width",
        note="drafts and the token before them, so one more",
    ),
    Row(
        "speculative_model speculative_draft_model_path model_draft draft_model -md spec_draft_model",
        setting="speculation.model",
    ),
    Row("ngram_prompt_lookup_min prompt_lookup_min spec_ngram_mod_n_min", setting="speculation.ngram_min"),
    Row(
        "ngram_prompt_lookup_max prompt_lookup_max max_matching_ngram_size speculative_ngram_max_trie_depth",
        setting="speculation.ngram_max",
    ),
    # Adapters.
    Row("enable_lora max_loras max_loras_per_batch lora_init_without_apply", setting="adapters.slots", note="0: none"),
    Row("max_lora_rank", setting="adapters.max_rank"),
    Row("lora_modules lora_paths lora lora_scaled qlora_adapter_name_or_path adapter_kwargs", setting="adapters.load"),
    Row("max_cpu_loras max_loaded_loras", setting="adapters.host_bytes", note="in bytes"),
    Row("lora_request lora_path", call="adapter", request="model", note="the name of an adapter that is loaded"),
    Row(
        "prompt_adapter_request enable_prompt_adapter prompt_adapters max_prompt_adapters "
        "max_prompt_adapter_token control_vector control_vector_scaled control_vector_layer_range",
        note=f"{_NONE}adapters are LoRA",
    ),
    # Devices.
    Row("tp -tp tp_size", setting="parallel.tensor"),
    Row("pp -pp pp_size", setting="parallel.pipeline"),
    Row("dp -dp dp_size data_parallel_* -dpn -dpr -dpl -dpa -dpp -dpb -dph -dpe", setting="parallel.data"),
    Row("enable_expert_parallel ep_size expert_parallel_size ep -ep max_ep_size", setting="parallel.expert"),
    Row("dist_init_addr master_addr device_mesh", setting="hosts.coordinator"),
    Row("nnodes", setting="hosts.num_processes"),
    Row("node_rank -r", setting="hosts.process_id"),
    Row(
        "distributed_executor_backend worker_cls worker_extension_cls ray_workers_use_nsight use_ray headless "
        "additional_config override_neuron_config distributed_config rpc master_port nccl_port dist_timeout",
        note=f"{_ALWAYS}each host runs one process (docs/hosts.md); Ray: docs/fleets.md",
    ),
    Row(
        "disable_custom_all_reduce disable_nccl_for_dp_synchronization enable_p2p_check enable_nccl_nvls "
        "enable_symm_mem enable_torch_symm_mem enable_mscclpp pre_warm_nccl boundary_reduction "
        "flashinfer_allreduce_fusion_backend enable_quant_communications enable_aiter_allreduce_fusion "
        "disable_aiter_allreduce_* enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion "
        "enable_tp_lm_head_all_to_all synced_gpus",
        note=f"{_ALWAYS}XLA makes the collectives",
    ),
    Row(
        "device device_map n_gpu_layers gpu_layers main_gpu -ngl ngl_draft -mg split_mode -sm tensor_split -ts "
        "-dev list_devices mmproj_offload mmproj_device -mmdev numa numa_node base_gpu_id gpu_id_step op_offload "
        "no_op_offload repack no_repack -nr",
        note=f"{_ALWAYS}all layers are on JAX's devices; JAX_PLATFORMS and CUDA_VISIBLE_DEVICES choose these",
    ),
    Row(
        "use_mmap use_mlock mmap no_mmap mlock load_mode -lm check_tensors",
        note=f"{_ALWAYS}weights are read into the memory that computes",
    ),
    Row(
        "threads n_threads threads_batch -t -tb n_threads_batch threads_http cpu_mask -C cpu_range -Cr cpu_strict "
        "cpu_mask_batch -Cb cpu_range_batch -Crb cpu_strict_batch prio prio_batch poll poll_batch",
        note=f"{_ALWAYS}all cores that the process may use compute; `taskset` limits them",
    ),
    # The compiled step.
    Row(
        "attention_backend attn_implementation flash_attn -fa -ac attention_config *_attention_backend "
        "*_attn_backend attention_type use_kernels",
        setting="kernels.paged_attention",
    ),
    Row(
        "enforce_eager disable_cuda_graph disable_*cuda_graph* enable_torch_compile* disable_compile "
        "optimization_level performance_mode",
        note=f"{_ALWAYS}every step is a compiled program; runtime.row_buckets and token_buckets make fewer of them",
    ),
    Row(
        "compilation_config cuda_graph_sizes cuda_graph_bs cuda_graph_max_bs cudagraph_capture_sizes "
        "compile_sizes -cc compile_config cuda_graph_* max_cudagraph_capture_size max_seq_len_to_capture "
        "torch_compile_max_bs debug_cuda_graph enable_cudagraph_gc enable_profile_cuda_graph",
        setting="runtime.row_buckets",
        note="of steps with prompts: runtime.token_buckets",
    ),
    Row("enable_deterministic_inference", setting="runtime.batch_invariant"),
    Row(
        "skip_server_warmup warmup no_warmup warmups enable_flashinfer_autotune disable_flashinfer_autotune "
        "flashinfer_autotune_skip_ops",
        setting="runtime.background_buckets",
    ),
    Row(
        "enable_sleep_mode enable_memory_saver sleep_idle_seconds sleep_on_idle",
        note=f"{_ALWAYS}LLM.sleep works without; over HTTP it is for operators",
    ),
    # The server.
    Row("host hostname api_address", setting="serve.host", note="`jaxserve serve MODEL --host H`"),
    Row("port", setting="serve.http.port", note="`jaxserve serve MODEL --port N`; of gRPC: serve.grpc.port"),
    Row(
        "api_key api_key_file auth_token",
        setting="serve.http.api_keys_file",
        note="a file, one key a line; gRPC: serve.grpc.tokens_file",
    ),
    Row("ssl_certfile ssl_cert_file", setting="serve.http.tls_cert"),
    Row("ssl_keyfile ssl_key_file", setting="serve.http.tls_key"),
    Row("ssl_ca_certs ssl_cert_reqs", setting="serve.http.tls_client_ca"),
    Row(
        "allowed_origins cors_origins allow_credentials allowed_methods allowed_headers cors_methods cors_headers "
        "cors_credentials",
        setting="serve.http.cors_origins",
    ),
    Row("tool_call_parser", setting="serve.http.tool_parser"),
    Row("enable_auto_tool_choice", setting="serve.http.tool_parser", note="tools always work where a parser is known"),
    Row("reasoning_parser reasoning_format enable_reasoning", setting="serve.http.reasoning_parser"),
    Row(
        "profiler_config torch_profiler_dir enable_layerwise_nvtx_* debug_tensor_dump_* msprobe_dump_config "
        "forward_hooks",
        setting="serve.http.profile_dir",
    ),
    Row(
        "webui no_webui ui no_ui ui_config webui_config ui_config_file webui_config_file", setting="serve.http.web_page"
    ),
    Row(
        "log_level uvicorn_log_level verbosity log_level_http log_config_file verbose log_verbose -lv -v "
        "log_verbosity log_disable log_file",
        setting="runtime.log_level",
    ),
    Row(
        "enable_log_requests disable_log_requests log_requests log_requests_* disable_uvicorn_access_log "
        "disable_access_log_for_endpoints uvicorn_access_log_exclude_prefixes log_error_stack crash_dump_folder",
        setting="runtime.log_requests",
    ),
    Row(
        "max_log_len enable_log_outputs enable_log_deltas",
        note=f"{_ALWAYS}texts are never logged; runtime.log_prompts adds ids of prompts",
    ),
    Row(
        "otlp_traces_endpoint enable_trace trace_modules collect_detailed_traces otlp_service_name "
        "external_trace_header",
        setting="runtime.trace_endpoint",
    ),
    Row(
        "watchdog_timeout soft_watchdog_timeout fault_tolerance_config enable_fault_tolerance custom_sigquit_handler",
        setting="watchdog.floor_s",
    ),
    Row(
        "api_server_count num_workers disable_frontend_multiprocessing models_dir models_preset models_max "
        "models_autoload enable_http_worker_reuseport reuse_port",
        note=f"{_ALWAYS}one process serves; `jaxserve route` joins several",
    ),
    Row("response_role", note=f"{_ALWAYS}answers are the assistant's"),
    Row("max_logprobs sampling_mask_max_tokens", note=f"{_ALWAYS}a request may ask for 20"),
    Row(
        "guided_decoding_backend structured_outputs_config grammar_backend guided_whitespace_pattern "
        "guided_decoding_disable_* constrained_json_* disable_outlines_disk_cache",
        note=f"{_ALWAYS}llguidance holds every constraint (docs/structured-output.md)",
    ),
    Row("limit_mm_per_prompt", setting="vision.max_pictures"),
    Row("min_pixels image_max_tokens image_min_tokens mm_process_config", setting="vision.max_pixels"),
    Row(
        "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "disable_mm_preprocessor_cache mm_preprocess_cache_size_mb enable_prefix_mm_cache enable_mm_global_cache "
        "mm_global_cache_backend mtmd_batch_max_tokens",
        setting="vision.pool_tokens",
        note="in tokens; beyond the device: vision.host_bytes",
    ),
    # What is sampled.
    Row("max_new_tokens n_predict predict", sampling="max_tokens"),
    Row("max_completion_tokens max_output_tokens", sampling="max_tokens"),
    Row("max_length", sampling="max_tokens", note="tokens of the answer alone; truncate_prompt_tokens cuts prompts"),
    Row("min_new_tokens", sampling="min_tokens"),
    Row("min_length", sampling="min_tokens", note="tokens of the answer alone"),
    Row("temp", sampling="temperature"),
    Row("do_sample", sampling="temperature", note="0 is greedy"),
    Row("num_return_sequences num_generations", sampling="n"),
    Row("best_of", sampling="n", note="ask for n answers with logprobs, and keep the best"),
    Row("repeat_penalty", sampling="repetition_penalty", note="over the prompt and the whole answer"),
    Row(
        "repeat_last_n penalty_last_n last_n_tokens_size dry_penalty_last_n",
        note=f"{_NONE}penalties count the whole answer",
    ),
    Row("stop_strings stop_sequences reverse_prompt stop_sequence", sampling="stop"),
    Row("eos_token_id forced_eos_token_id", sampling="stop_token_ids"),
    Row(
        "suppress_tokens sequence_bias begin_suppress_tokens prefix_allowed_tokens_fn",
        sampling="logit_bias",
        note="-100 forbids a token",
    ),
    Row("bad_words_ids", sampling="bad_words", note="texts, not ids"),
    Row(
        "num_logprobs n_probs top_logprobs_num return_logprob output_logprobs output_scores logits_all "
        "post_sampling_probs return_token_logprobs",
        sampling="logprobs",
    ),
    Row("top_logprobs", sampling="logprobs"),
    Row("logprob_start_len return_prompt_logprobs", sampling="prompt_logprobs"),
    Row(
        "guided_decoding guided_options_request guided_json guided_regex guided_choice guided_grammar "
        "structured_outputs response_format json_schema regex ebnf grammar structural_tag grammar_file "
        "json_schema_file -j -jf force_words_ids constraints",
        sampling="structured",
        request="structured_outputs",
        note="{'regex': ...}, {'choice': [...]}, {'grammar': ...}; JSON: {'json_schema': ...} in Python, {'json': "
        "...} over HTTP",
    ),
    Row(
        "logits_processors logits_processor custom_logit_processor logit_processors logits_processor_pattern "
        "enable_custom_logit_processor sampling_backend backend_sampling -bs mlx_enable_sampling "
        "renormalize_logits remove_invalid_values watermark watermark_* enable_watermark watermarking_config",
        note=f"{_NONE}logit_bias, allowed_token_ids, bad_words and structured run on the device",
    ),
    Row(
        "num_beams use_beam_search beam_width num_beam_groups diversity_penalty length_penalty early_stopping "
        "concurrency_limit",
        note=f"{_NONE}there is no beam search; draw n answers with logprobs, and keep the likeliest",
    ),
    Row(
        "no_repeat_ngram_size encoder_repetition_penalty dry_multiplier dry_base dry_allowed_length "
        "encoder_no_repeat_ngram_size dry_* repetition_detection exponential_decay_length_penalty penalize_nl",
        note=f"{_NONE}repetition_penalty, frequency_penalty and presence_penalty are",
    ),
    Row(
        "typical_p tfs_z top_a top_n_sigma mirostat mirostat_tau mirostat_eta xtc_probability xtc_threshold "
        "dynatemp_range dynatemp_exponent epsilon_cutoff eta_cutoff penalty_alpha top_h typical top_nsigma "
        "mirostat_* dynatemp_* adaptive_target adaptive_decay guidance_scale dola_layers token_healing "
        "negative_prompt_ids negative_prompt_attention_mask min_keep",
        note=f"{_NONE}temperature, top_k, top_p and min_p choose among tokens",
    ),
    Row(
        "samplers sampler_seq sampling_seq",
        note=f"{_NONE}samplers have one order, which docs/differences.md and SamplingParams name",
    ),
    Row(
        "thinking_budget thinking_token_budget reasoning_budget reasoning_budget_message enable_strict_thinking",
        note=f"{_NONE}max_tokens is for thoughts and answer together",
    ),
    Row(
        "spaces_between_special_tokens clean_up_tokenization_spaces",
        note=f"{_ALWAYS}no blanks are added to a text, and none are taken away",
    ),
    Row(
        "return_tensors padding attention_mask pad_token_id bos_token_id decoder_start_token_id "
        "forced_bos_token_id position_ids cache_position past_key_values return_dict_in_generate "
        "tokenizer_encode_kwargs add_bos prepend_bos interleave_mm_strings",
        note=f"{_ALWAYS}a prompt is a list of ids of any length",
    ),
    Row("output_kind", note="LLM.generate returns whole outputs; LLM.stream and AsyncLLM give new text as it comes"),
    Row("extra_args vllm_xargs custom_params additional_information", note=f"{_NONE}nothing here reads it"),
    # What is asked.
    Row(
        "prompt_token_ids input_ids inputs prompts text_inputs tokens text",
        call="prompts",
        request="prompt",
        note="a list of ids is a prompt",
    ),
    Row(
        "prompt_embeds inputs_embeds enable_prompt_embeds item_embed_overrides query_embed_overrides "
        "stacked_query_item_embed_overrides",
        note=f"{_NONE}prompts are texts or token ids",
    ),
    Row(
        "pooling_params pooling_task",
        call="dimensions",
        note="and normalize and truncate_prompt_tokens are arguments of embed",
    ),
    Row(
        "tokenization_kwargs truncation truncate allow_auto_truncate handle_long_generation",
        sampling="truncate_prompt_tokens",
        note="of embed: an argument of that name",
    ),
    Row("level", call="keep_weights", note="of sleep: true is level 1, false is level 2"),
    Row("streamer", note="LLM.stream yields new text as it comes; AsyncLLM is for asyncio"),
    Row("stream", request="stream", note="in Python: LLM.stream, or AsyncLLM"),
    Row("separate_reasoning", request="include_reasoning", note="thoughts are always apart from the answer"),
    Row(
        "enable_thinking thinking default_chat_template_kwargs reasoning_preserve thinking_forced_open",
        call="chat_template_kwargs",
        request="chat_template_kwargs",
        note="{'enable_thinking': ...}, or what the template reads",
    ),
    Row(
        "continue_final_message prefill_assistant no_prefill_assistant",
        note=f"{_NONE}complete a prompt that you have rendered yourself",
    ),
    Row("documents", note=f"{_NONE}put them into a message"),
    Row(
        "mm_processor_kwargs media_io_kwargs multi_modal_data image_data video_data audio_data",
        note="the model's own files say how pictures are read; vision.max_pixels bounds them",
    ),
    Row("functions", call="tools", request="tools"),
    Row("function_call", request="tool_choice"),
    Row("sampling_params params", call="sampling_params", note="over HTTP its fields stand in the body itself"),
    Row("priority", call="priority", request="priority"),
    Row("cache_salt", call="cache_salt", request="cache_salt"),
    Row("request_id rid", call="request_id", request="request_id", note="of AsyncLLM"),
    # What only few of them have.
    Row("max_num_queued_tokens", setting="sched.max_waiting_tokens"),
    Row(
        "scheduler_delay_factor schedule_conservativeness min_free_slots_delay",
        setting="sched.watermark",
        note="pages that admissions leave free; a policy of your own decides more (docs/scheduling.md)",
    ),
    Row("preemption_mode", setting="cache.host_bytes", note="there preempted requests find their pages again"),
    Row(
        "tokenizer_pool_* tokenizer_worker_num detokenizer_worker_num batch_notify_size "
        "enable_tokenizer_batch_encode disable_tokenizer_batch_decode enable_dynamic_batch_tokenizer "
        "dynamic_batch_tokenizer_* mm_io_worker_num mm_processor_worker_num num_encode_threads",
        setting="serve.encode_threads",
    ),
    Row("moe_runner_backend moe_backend", setting="kernels.grouped_matmul"),
    Row("kernel_config fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend", setting="kernels.matmul"),
    Row("shutdown_timeout", setting="serve.drain_s"),
    Row("timeout", setting="serve.http.request_timeout_s"),
    Row(
        "h11_max_incomplete_event_size h11_max_header_count http2_* enable_http2",
        setting="serve.http.max_body_bytes",
        note="HTTP/1.1, and gRPC beside it; limits of connections are beside this one",
    ),
    Row("admin_api_key", setting="serve.admin_tokens_file", note="a file, one token a line"),
    Row("grpc grpc_mode grpc_port grpc_* smg_* sidecar sidecar_args gated_launch_port", setting="serve.grpc.port"),
    Row("log_jsonl log_colors log_prefix log_timestamps", setting="runtime.log_format"),
    Row("log_prompts_dir", setting="runtime.log_prompts", note="ids, in the log"),
    Row("enable_return_routed_experts enable_trace_replay", note=f"{_ALWAYS}runtime.step_log and `jaxserve replay`"),
    Row(
        "page_major_* enable_page_major_kv_layout use_v2_block_manager num_lookahead_slots c128_page_size "
        "disable_hybrid_kv_cache_manager disable_hybrid_swa_memory prefix_caching_hash_algo radix_* "
        "enable_session_radix_cache disable_chunked_prefix_cache kv_unified no_kv_unified -kvu defrag_thold -dt "
        "context_checkpoints ctx_checkpoints -ctxcp swa_checkpoints checkpoint_min_step -cms cache_idle_slots "
        "slot_save_path slot_prompt_similarity -sps id_slot kv_canary kv_canary_* "
        "enable_unified_cache_external_linker unified_cache_external_linker_* enable_linker_mla_dedup "
        "enable_kv_cache_sharding kv_sharing_fast_prefill",
        note=f"{_ALWAYS}all requests share one pool of pages, and equal beginnings of prompts are found in it "
        "(docs/architecture.md)",
    ),
    Row(
        "disable_sliding_window disable_cascade_attn swa_* enable_*_swa_bounded_replay context_shift "
        "no_context_shift keep n_keep",
        note=f"{_ALWAYS}a model attends as its config.json says, which model.overrides changes; a prompt is cut only "
        "by truncate_prompt_tokens",
    ),
    Row(
        "enable_eplb eplb_* expert_placement_strategy all2all_backend moe_* ep_* deepep_* elastic_ep_* "
        "fuseep_mode enable_elastic_expert_backup init_expert_location expert_distribution_recorder_* "
        "experts_implementation enable_fused_moe_sum_all_reduce *_shared_experts_* flashinfer_a2a_dispatch_type "
        "enable_waterfill flashinfer_mxfp4_moe_precision disable_flashinfer_cutlass_moe_fp4_allgather "
        "enable_w4a4_mxfp4_megamoe enable_megamoe_for_layernorm_sp shared_experts_tp_size",
        note=f"{_NONE}experts stay where parallel.expert puts them",
    ),
    Row(
        "enable_dbo dbo_* enable_two_batch_overlap enable_single_batch_overlap tbo_* pp_async_batch_depth "
        "enable_dp_attention* enable_dp_lm_head disable_attn_tp_gather enable_attn_tp_input_scattered "
        "enable_dense_mlp_attn_tp enable_layernorm_sp tp_plan",
        note=f"{_ALWAYS}XLA orders computing and collectives; parallel.tensor and parallel.pipeline share layers",
    ),
    Row(
        "prefill_context_parallel_size decode_context_parallel_size -pcp -dcp dcp_* cp_* attn_cp_size "
        "attn_dp_size dwdp_size enable_prefill_cp enable_cp_*",
        note=f"{_NONE}parallel.tensor and parallel.pipeline share layers; no context is shared",
    ),
    Row(
        "mamba_* linear_attn_* enable_linear_replayssm* linear_replayssm_* gdn_prefill_backend "
        "kda_prefill_backend max_mamba_cache_size int8_mamba_ckpt_size enable_int8_mamba_checkpoint "
        "enable_mamba_cache_* uses_mamba_radix_cache enable_scattered_sconv",
        note=f"{_NONE}no family here has layers of state spaces or linear attention",
    ),
    Row(
        "dsa_* dsv4_* enable_dsa_* enable_deepseek_v4_fp4_indexer qsa_indexer_dtype flashinfer_mla_disable_ragged "
        "hisparse_config enable_hisparse enable_return_indexer_topk enable_lean_attention triton_attention_* "
        "enable_fused_qk_norm_rope enable_nvidia_megakernel enable_amd_monokernel enable_precise_embedding_* "
        "enable_multi_layer_eagle",
        note=f"{_ALWAYS}kernels are XLA's and Pallas', which kernels.paged_attention and kernels.matmul choose among",
    ),
    Row(
        "lora_* fully_sharded_loras long_lora_scaling_factors enable_lora_bias enable_tower_connector_lora "
        "specialize_active_lora default_mm_loras enable_lora_overlap_loading experts_shared_outer_loras "
        "uno_lora_path",
        note="adapters are read as PEFT wrote them (docs/lora.md); adapters.slots, adapters.max_rank and "
        "adapters.host_bytes bound them",
    ),
    Row(
        "enable_mm_embeds mm_* skip_mm_profiling video_* io_processor_plugin disable_chunked_mm_input "
        "disable_fast_image_processor image_processor_backend enable_broadcast_mm_inputs_process "
        "enable_adaptive_dispatch_to_encoder language_only encoder_* keep_mm_feature_on_device mmproj -mm "
        "no_mmproj mmproj_auto limit_mm_data_per_request trust_mm_content_hashes asr_* feature_extractor "
        "image_processor processor num_crops",
        note="pictures are read where the model's directory has a tower for them (docs/pictures.md); vision.max_pixels "
        "and vision.max_pictures bound them",
    ),
    Row(
        "allowed_local_media_path allowed_media_domains media_path file_storage_path media_url_max_file_size_mb",
        note="a picture comes in the request, as a data: URL; `jaxserve run --pictures DIRECTORY` reads files",
    ),
    Row("uds fd", note=f"{_NONE}servers listen on TCP"),
    Row("root_path fastapi_root_path api_prefix", note=f"{_NONE}a proxy before the server can take a prefix away"),
    Row("middleware", note=f"{_NONE}a proxy before the server can do that"),
    Row(
        "enable_ssl_refresh ssl_ciphers ssl_keyfile_password",
        note=f"{_NONE}TLS is by serve.http.tls_cert and serve.http.tls_key, read at the start",
    ),
    Row("enable_request_id_headers", note=f"{_ALWAYS}X-Request-Id is taken, and sent back"),
    Row("exclude_tools_when_tool_choice_none", request="tool_choice", note="with 'none' no tool is called"),
    Row(
        "reasoning_parser_plugin tool_parser_plugin tool_server tools_runtime mcp_servers_config mcp_servers_json "
        "ui_mcp_proxy webui_mcp_proxy agent -ag no_agent",
        note=f"{_NONE}tools are called by clients; their forms are in the package (docs/tools.md)",
    ),
    Row("disable_fastapi_docs enable_offline_docs", note=f"{_ALWAYS}GET /openapi.json describes all routes"),
    Row("enable_prompt_tokens_details enable_cache_report", note=f"{_ALWAYS}usage has the cached tokens"),
    Row("enable_server_load_tracking", note=f"{_ALWAYS}GET /load says it"),
    Row("enable_tokenizer_info_endpoint", note=f"{_ALWAYS}GET /tokenizer_info says it"),
    Row("enable_force_include_usage stream_response_default_include_usage", request="stream_options"),
    Row(
        "stream_interval incremental_streaming_output sse_ping_interval",
        note=f"{_ALWAYS}new text is sent with the step that made it",
    ),
    Row("fail_on_environ_validation", note=f"{_ALWAYS}a variable that names no setting is an error"),
    Row("cache_config", setting="cache.dtype"),
    Row("trust_request_chat_template", note=f"{_ALWAYS}a request may bring its chat_template, which runs in a sandbox"),
    Row("chat_template", call="chat_template", request="chat_template", note="or chat_template.jinja beside the model"),
    Row("chat_template_file", call="chat_template", note="its text; or chat_template.jinja beside the model"),
    Row("skip_chat_parsing parse_tool_calls", setting="serve.http.tool_parser", note="none leaves answers as they are"),
    Row("reasoning -rea", request="chat_template_kwargs", note="{'enable_thinking': ...}, or what the template reads"),
    Row(
        "spec_decoding_acceptance_method typical_acceptance_* disable_logprobs_during_spec_decoding",
        note=f"{_ALWAYS}with drafts tokens have the same distribution, and log-probabilities, as without",
    ),
    Row(
        "ec_transfer_config weight_transfer_config weight_version weight_cache_*",
        note="LLM.update_weights takes other weights (docs/live-weights.md)",
    ),
    Row("embd_normalize", call="normalize", request="normalize", note="true: Euclidean length 1"),
    Row("special -sp no_special", sampling="skip_special_tokens", note="false shows them"),
    Row("escape -e no_escape", note=f"{_ALWAYS}texts are taken as they are"),
    Row("no_stop_trim", sampling="include_stop_str_in_output"),
    Row("stop_regex", sampling="stop", note="texts; structured={'regex': ...} bounds a whole answer"),
    Row("sampling_seed", sampling="seed"),
    Row("-n", sampling="max_tokens"),
    Row("n_cmpl", sampling="n"),
    Row("-l", sampling="logit_bias"),
    Row("-O", setting="runtime.row_buckets", note="XLA always optimises; fewer buckets start faster"),
    Row("-asc", note=f"{_ALWAYS}one process serves; `jaxserve route` joins several"),
    Row("-to", setting="serve.http.request_timeout_s"),
    Row(
        "stopping_criteria max_time t_max_predict_ms",
        sampling="stop",
        note="and stop_token_ids and max_tokens; code of your own can leave LLM.stream, which ends the request; "
        "timeout_s of LLM.stream and AsyncLLM bounds the time",
    ),
    Row("flat_logprobs skip_clone", note=f"{_ALWAYS}outputs have one form, and parameters never change"),
    Row(
        "skip_reading_prefix_cache",
        call="cache_salt",
        request="cache_salt",
        note="one of its own finds no pages of others",
    ),
    Row(
        "logprob_token_ids token_ids_logprob",
        sampling="logprobs",
        note="of the likeliest tokens and the one that was drawn, not of chosen ones",
    ),
    Row("logprobs_mode use_fp64_gumbel", note=f"{_NONE}docs/differences.md says which log-probabilities are told"),
    Row(
        "return_hidden_states enable_return_hidden_states return_hidden_states_mode "
        "enable_return_aux_hidden_states return_aux_* aux_hidden_* return_pooled_hidden_states "
        "output_hidden_states output_attentions output_logits return_routed_experts routed_experts_start_len "
        "return_input_ids",
        note=f"{_NONE}answers have tokens and log-probabilities; jaxserve.models has the model itself",
    ),
    Row("reset", note=f"{_ALWAYS}each prompt is a request of its own, and nothing remains to be reset"),
    Row("return_tokens_as_token_ids", request="return_tokens_as_token_ids"),
    Row("tools", call="tools", request="tools"),
    Row("tool_choice", request="tool_choice"),
    Row("chat_template_kwargs", call="chat_template_kwargs", request="chat_template_kwargs"),
    Row("reasoning_effort", request="reasoning_effort"),
    Row("return_output_ids return_tokens", request="return_token_ids", note="outputs of Python always have token_ids"),
    Row("use_tqdm", call="use_tqdm", note="of LLM.generate, chat, embed and score; other calls show no bar"),
    Row("data_1 text_1 query", call="queries", request="query"),
    Row("data_2 text_2 items", call="documents", request="documents"),
    Row(
        "label_token_ids score_extraction_token_id apply_softmax item_first",
        setting="rerank.positive",
        note="and rerank.negative",
    ),
    Row("reset_running_requests reset_connector", note=f"{_NONE}running requests and a store keep their pages"),
    Row("content", request="prompt"),
    Row("config", note="settings are in a file: --config FILE, LLM.from_config(FILE); of config.json: model.overrides"),
    Row("path", note="the model is 'model', an argument; the page of a server is in the package (serve.http.web_page)"),
    Row("tags", note="weights and pages sleep and wake together; the name of a model is model.name"),
    Row("scale_weights lora_scale lora_base", note=f"{_ALWAYS}an adapter has its scale in adapter_config.json"),
    Row("with_pieces", request="return_token_strs"),
    Row("add_special", request="add_special_tokens"),
    Row("parse_special", note=f"{_ALWAYS}special tokens in the text of a prompt are always read as such"),
    Row("session_params session_id enable_streaming_session", note=f"{_ALWAYS}a longer prompt finds its pages again"),
    Row("return_full_text", call="echo", request="echo", note="of LLM.stream, AsyncLLM.generate and completions"),
    Row("return_text return_type", note=f"{_ALWAYS}outputs have text and token_ids"),
    Row(
        "prefix suffix", note=f"{_NONE}write it into the prompt, with the model's own marks for what is to be filled in"
    ),
    Row("input", call="prompts", request="prompt"),
    Row("messages", call="messages", request="messages", note="of chat"),
    Row("embed_override_token_id embed_overrides", note=f"{_NONE}prompts are texts or token ids"),
    Row("return_count", note=f"{_ALWAYS}outputs have prompt_token_ids, whose length it is"),
    Row("low_memory", note=f"{_ALWAYS}a prompt is computed in chunks, and pages are given out as they are needed"),
    Row("response_fields n_indent", note=f"{_NONE}a response has all of its fields"),
    Row("require_reasoning", note=f"{_ALWAYS}serve.http.reasoning_parser separates thoughts where there are any"),
    Row(
        "gc_threshold gc_warning_threshold_secs enable_mis engine_info_bootstrap_port strip_thinking_cache "
        "completion_bash model_kwargs no_host enable_response_store",
        note=f"{_NONE}docs/config.md has all settings",
    ),
    Row(
        "kv_transfer_params bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank "
        "kv_hints data_parallel_rank",
        note="requests say nothing of that; see handoff.role",
    ),
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

# Fields of `SamplingParams`, which mean the same in most engines, written where they do not belong.
SAMPLING = (
    "n temperature top_k top_p min_p presence_penalty frequency_penalty repetition_penalty logit_bias "
    "allowed_token_ids bad_words min_tokens max_tokens stop stop_token_ids include_stop_str_in_output "
    "ignore_eos seed "
    "logprobs prompt_logprobs skip_special_tokens detokenize truncate_prompt_tokens structured"
)

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


_NO_MODULE = f"{_ALWAYS}LLM loads a model, and jaxserve.models has the arrays and the module themselves"
_WEIGHTS = "update_weights, with arrays or a directory; other processes send theirs over HTTP (docs/live-weights.md)"
_ONE_PROCESS = f"{_NONE}one process computes on all devices of its host; kernels and policies are extended in Python"
_PROFILE = f"{_ALWAYS}jax.profiler.start_trace(DIRECTORY) and stop_trace() record a profile around calls"
_FIGURES = f"{_ALWAYS}RequestOutput.metrics has the times of each request; a server has GET /metrics"
_NO_STATE = f"{_ALWAYS}each prompt is a request of its own, and equal beginnings of prompts are computed once"
_TOKENIZER = "get_tokenizer()"

ATTRIBUTES: Mapping[str, str] = {  # what others have on a loaded model -> how it is done here, or why it is not
    **dict.fromkeys(("create_completion", "complete", "async_generate", "add_request", "enqueue"), "generate"),
    **dict.fromkeys(("generate_batch", "wait_for_completion", "continuous_batching_context_manager"), "generate"),
    "init_continuous_batching": "generate",
    **dict.fromkeys(("create_chat_completion", "create_chat_completion_openai_v1", "conversation"), "chat"),
    "enqueue_chat": "chat",
    **dict.fromkeys(("create_embedding", "encode", "async_encode", "embed_query"), "embed"),
    **dict.fromkeys(("generate_stream", "stream_generate", "stream_chat"), "stream (of AsyncLLM: generate)"),
    **dict.fromkeys(("classify", "reward", "rerank"), "score (of a model that judges; there are no classifiers)"),
    "async_score": "score",
    **dict.fromkeys(("tokenize", "apply_chat_template", "preprocess_chat", "preprocess_cmpl"), _TOKENIZER),
    **dict.fromkeys(("render_chat", "token_eos", "token_bos", "token_nl", "n_vocab"), _TOKENIZER),
    **dict.fromkeys(("detokenize", "decode", "batch_decode"), "get_tokenizer().decode(ids)"),
    "set_tokenizer": f"{_NONE}LLM(model, tokenizer=DIRECTORY) takes another one",
    **dict.fromkeys(("add_lora", "load_lora_adapter", "async_load_lora_adapter", "add_adapter"), "load_adapter"),
    **dict.fromkeys(("load_lora_adapter_from_tensors", "pin_lora"), "load_adapter"),
    **dict.fromkeys(("remove_lora", "unload_lora_adapter", "async_unload_lora_adapter"), "unload_adapter"),
    **dict.fromkeys(("set_adapter", "list_loras"), "generate with adapter=NAME, of one that load_adapter has read"),
    **dict.fromkeys(("update_weights_from_disk", "update_weights_from_tensor", "load_weights"), "update_weights"),
    **dict.fromkeys(("update_weights_from_distributed", "update_weights_from_ipc"), _WEIGHTS),
    **dict.fromkeys(("init_weights_update_group", "destroy_weights_update_group"), _WEIGHTS),
    **dict.fromkeys(("begin_weight_update", "end_weight_update", "init_weight_transfer_engine"), _WEIGHTS),
    **dict.fromkeys(("start_weight_update", "finish_weight_update"), _WEIGHTS),
    "release_memory_occupation": "sleep",
    "resume_memory_occupation": "wake_up",
    "pause_generation": "sleep",
    "resume_generation": "wake_up",
    **dict.fromkeys(("flush_cache", "set_cache", "reset_mm_cache"), "reset_prefix_cache"),
    "beam_search": "generate with SamplingParams(n=..., logprobs=...), of which you keep the likeliest; no beams",
    "sample": "generate with SamplingParams(temperature=..., ...)",
    "set_seed": "generate with SamplingParams(seed=...)",
    "eval": "generate with SamplingParams(prompt_logprobs=...)",
    **dict.fromkeys(("eval_logits", "logits_to_logprobs"), "generate with SamplingParams(logprobs=...)"),
    "eval_tokens": "generate, whose outputs have prompt_token_ids and token_ids",
    "longest_token_prefix": "generate, whose outputs have num_cached_tokens",
    **dict.fromkeys(("shutdown", "shutdown_background_loop"), "close"),
    "abort": f"{_ALWAYS}leaving LLM.stream early ends its request; AsyncLLM has abort",
    **dict.fromkeys(("from_engine_args", "from_pretrained"), "from_config(FILE), or LLM(model) with a directory"),
    **dict.fromkeys(("llm_engine", "engine_class", "model_config", "ctx"), "from_config, which takes every setting"),
    **dict.fromkeys(
        ("get_model_config", "get_server_info", "get_model_info", "n_ctx"),
        "model_name (and `jaxserve config` prints the settings)",
    ),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(("get_metrics", "do_log_stats", "request_counter"), _FIGURES),
    **dict.fromkeys(("start_expert_distribution_record", "stop_expert_distribution_record"), _FIGURES),
    "dump_expert_distribution_record": _FIGURES,
    **dict.fromkeys(("collective_rpc", "apply_model", "get_world_size"), _ONE_PROCESS),
    **dict.fromkeys(("get_all_child_pids", "attach_tokenizer_worker", "freeze_gc"), _ONE_PROCESS),
    **dict.fromkeys(("reset", "save_state", "load_state", "open_session", "close_session"), _NO_STATE),
    **dict.fromkeys(("supported_tasks", "get_supported_tasks"), f"{_ALWAYS}a model does all it can do"),
    **dict.fromkeys(("is_running", "errored", "check_health"), f"{_ALWAYS}a call raises EngineStopped where it died"),
    "is_sleeping": f"{_ALWAYS}a call of a model that sleeps is refused, and says so",
    **dict.fromkeys(("get_model", "model", "forward", "parameters", "named_parameters", "state_dict"), _NO_MODULE),
    **dict.fromkeys(("get_weights_by_name", "num_parameters", "n_embd", "config", "dtype", "device"), _NO_MODULE),
    **dict.fromkeys(("train", "resize_token_embeddings", "gradient_checkpointing_enable"), _NO_MODULE),
    **dict.fromkeys(
        ("to", "cuda", "cpu", "half", "bfloat16", "compile"),
        f"{_ALWAYS}LLM(model, dtype=...) places and compiles a model, on the devices that JAX has",
    ),
    "generation_config": "get_default_sampling_params()",
    "pooling_type": f"{_ALWAYS}the setting is model.pooling",
    **dict.fromkeys(
        ("save_pretrained", "push_to_hub", "save_remote_model", "save_sharded_model"),
        f"{_ALWAYS}`jaxserve convert` writes checkpoints of both kinds",
    ),
}


def attribute_answer(name: str) -> str | None:
    """What the attribute `name` of a loaded model is here, as the end of a sentence about it."""
    said = ATTRIBUTES.get(name)
    return said if said is None or said.startswith((_ALWAYS, _NONE)) else f"here it is {said}"


def answer(name: str, place: Place, known: Collection[str] | None = None) -> str | None:
    """What `name` is here, as the end of a sentence about it; None: the table has no such name.

    `known`: for a REQUEST, the fields that its body may have, since not every route has all of them; for a FLAG, the
    parameters of the command. A flag of one dash is asked for with it.
    """
    row = _row(name)
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


def _row(name: str) -> Row | None:
    """The row of `name` itself, or that of the longest pattern that fits."""
    table = _table()
    if name in table:
        return table[name]
    fitting = [pattern for pattern in table if "*" in pattern and fnmatch.fnmatchcase(name, pattern)]
    return table[max(fitting, key=len)] if fitting else None


@functools.cache
def _table() -> Mapping[str, Row]:
    rows = {name: Row(name, sampling=name) for name in SAMPLING.split()}
    rows |= {name: Row(name, setting=setting) for name, setting in SAME.items()}
    return {**rows, **{name: row for row in ROWS for name in row.names.split()}}


def _here(row: Row, place: Place, known: Collection[str] | None) -> str | None:
    setting, sampling, call = row.setting, row.sampling, row.call
    request = row.request or sampling
    match place:
        case Place.FLAG:
            if (flag := _flag(setting, sampling, known or ())) is not None:
                return f"here it is {flag}"
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


def _flag(setting: str, sampling: str, known: Collection[str]) -> str | None:
    """The flag of a command that has these parameters, where one does this."""
    names = (sampling, *(name for name, same in SAME.items() if same == setting))
    found = next((name for name in names if name and name in known), None)
    return None if found is None else f"--{found.replace('_', '-')} VALUE"


def _of_a_call(sampling: str, call: str, request: str) -> str | None:
    if sampling:
        return f"here it is SamplingParams({sampling}=...)"
    if call:
        return f"here it is {call!r}, an argument of the call that asks"
    return f"over HTTP it is {request!r}" if request else None


def _of_the_engine(setting: str) -> str | None:
    return f"the engine has it, not a request: the setting {setting!r}" if setting else None
