"""The public surface as it was agreed on, name by name. What stands here and does not exist is missing."""

ENGINE = """
    add_request abort_request step has_unfinished_requests get_num_unfinished_requests
    has_unfinished_requests_for_virtual_engine has_unfinished_requests_dp
    get_model_config get_parallel_config get_scheduler_config get_decoding_config get_lora_config get_cache_config
    get_tokenizer tokenizer vllm_config model_config observability_config log_stats renderer input_processor
    output_processor engine_core logger_manager model_executor dp_group get_supported_tasks
    reset_prefix_cache reset_mm_cache reset_encoder_cache sleep wake_up is_sleeping
    pause_generation resume_generation is_paused update_weights
    add_lora remove_lora list_loras pin_lora collective_rpc apply_model start_profile stop_profile
    get_metrics do_log_stats do_log_stats_with_interval stat_loggers DO_VALIDATE_OUTPUT
    __init__ from_engine_args from_vllm_config connect shutdown __enter__ __exit__
"""
ASYNC = """
    generate encode abort add_request pause_generation resume_generation is_paused check_health errored dead_error
    is_running wait_for_requests_to_drain get_model_config get_parallel_config get_scheduler_config get_decoding_config
    get_lora_config get_cache_config get_tokenizer get_supported_tasks reset_prefix_cache reset_mm_cache
    reset_encoder_cache sleep wake_up is_sleeping update_weights add_lora remove_lora list_loras pin_lora
    collective_rpc apply_model start_profile stop_profile do_log_stats
    __init__ from_engine_args from_vllm_config connect shutdown __aenter__ __aexit__
"""
LLM = """
    __init__ generate chat embed encode classify score beam_search get_default_sampling_params get_tokenizer get_metrics
    sleep wake_up collective_rpc apply_model reset_prefix_cache start_profile stop_profile shutdown llm_engine
    __enter__ __exit__
"""
SAMPLING = """
    n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids bad_words include_stop_str_in_output ignore_eos max_tokens min_tokens logprobs prompt_logprobs
    detokenize skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens output_kind stream_interval
    logit_bias allowed_token_ids structured_outputs guided_decoding logits_processors extra_args cache_salt
    use_beam_search length_penalty early_stopping trace_decode_token_ids
"""
ARGS = """
    model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code revision tokenizer_revision dtype seed
    max_model_len quantization config_format hf_overrides generation_config override_generation_config served_model_name
    runner task load_format download_dir use_tqdm_on_load block_size gpu_memory_utilization kv_cache_memory_bytes
    kv_cache_dtype
    num_gpu_blocks_override enable_prefix_caching kv_offloading_size swap_space cpu_offload_gb max_num_batched_tokens
    max_num_seqs enable_chunked_prefill long_prefill_token_threshold scheduling_policy async_scheduling stream_interval
    max_num_queued_requests tensor_parallel_size pipeline_parallel_size data_parallel_size distributed_executor_backend
    worker_extension_cls device attention_backend enforce_eager cudagraph_capture_sizes deterministic enable_lora
    max_loras max_lora_rank max_cpu_loras enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token
    speculative_config structured_outputs_config disable_log_stats otlp_traces_endpoint metrics_port
    add_cli_args from_cli_args create_engine_config
"""
METRICS = """
    num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits num_preemptions
    prompt_tokens generation_tokens iteration_tokens_total time_to_first_token_seconds inter_token_latency_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_prompt_tokens request_generation_tokens request_success lora_requests_info engine_sleep_state
    frontends_connected core_epoch requests_recovered requests_quarantined malformed_frames
"""
NAMES = """
    LLM LLMEngine AsyncLLMEngine AsyncLLM EngineArgs AsyncEngineArgs SamplingParams PoolingParams BeamSearchParams
    StructuredOutputsParams GuidedDecodingParams LoRARequest PromptAdapterRequest TextPrompt TokensPrompt EmbedsPrompt
    ExplicitEncoderDecoderPrompt RequestOutput CompletionOutput PoolingRequestOutput EmbeddingRequestOutput Logprob
    RequestOutputKind UsageContext Device StatLoggerBase DecodingConfig StructuredOutputsConfig
"""

WRITTEN = [
    f"{owner}.{name}"
    for owner, names in {
        "LLMEngine": ENGINE,
        "AsyncLLMEngine": ASYNC,
        "LLM": LLM,
        "SamplingParams": SAMPLING,
        "PoolingParams": "dimensions use_activation normalize task",
        "BeamSearchParams": "beam_width max_tokens ignore_eos temperature length_penalty",
        "StructuredOutputsParams": "json regex choice grammar json_object structural_tag",
        "RequestOutput": (
            "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics lora_request num_cached_tokens"
        ),
        "CompletionOutput": (
            "index text token_ids cumulative_logprob logprobs finish_reason stop_reason lora_request finished"
        ),
        "PoolingRequestOutput": "request_id outputs prompt_token_ids finished",
        "EmbeddingRequestOutput": "request_id outputs prompt_token_ids finished",
        "Logprob": "logprob rank decoded_token",
        "EngineArgs": ARGS,
        "metrics": METRICS,
        "mainspring": NAMES,
    }.items()
    for name in names.split()
]
