"""Fields of vLLM's `EngineArgs` (0.11 to 0.33) that ours does not have: what each of them does here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..ipc.config import MODALITIES, MOST_ITEMS
from ..ipc.errors import InvalidArgumentError, check_default, shown
from .weight_transfer import check_transfer

# reason → fields that are accepted and have no effect; flags with their default in vLLM after `=` (JSON)
WITHOUT_EFFECT = {
    "it is always on": "enable_prompt_embeds=false enable_sleep_mode=false enable_trace_replay=false",
    "the core chooses kernels, graphs and their tuning itself; see attention_backend and enforce_eager": (
        "attention_config disable_cascade_attn=null enable_batch_sharded_sampling=null "
        "enable_flashinfer_autotune=null gdn_prefill_backend ir_op_priority jit_monitor_mode "
        "jit_monitor_verbose=false kda_decode_backend kda_prefill_backend kernel_config linear_backend "
        "mamba_backend mamba_ssu_algorithm max_cudagraph_capture_size max_seq_len_to_capture moe_backend "
        "monokernel=false optimization_level override_attention_dtype performance_mode sparse_indexer_topk_backend "
        "specialize_active_lora=false use_fp64_gumbel=false"
    ),
    "of several devices, and without a counterpart here": (
        "_api_process_count _api_process_rank all2all_backend cpu_distributed_timeout_seconds "
        "data_parallel_address data_parallel_backend data_parallel_rpc_port dbo_decode_token_threshold "
        "dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate=null "
        "cp_kv_cache_interleave_size disable_nccl_for_dp_synchronization=null "
        "distributed_timeout_seconds dp_sync_interval enable_ep_weight_filter=false "
        "enable_hc_sp=false enable_nccl_comm_suspend=false enable_shm_tensor_arena=false eplb_config "
        "eplb_log_balancedness=false eplb_step_interval eplb_window_size expert_placement_strategy "
        "fully_sharded_loras=false max_parallel_loading_workers "
        "ray_workers_use_nsight=false"
    ),
    "parts of a conversation keep their order": "interleave_mm_strings=false",
    "media workers and the encoder's cache need no such choice": (
        "disable_chunked_mm_input=false enable_mm_processor_stats=false enable_multimodal_encoder_data_parallel=false "
        "ec_manager_config mm_device_do_normalize=true mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_type mm_processor_device "
        "mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling=false"
    ),
    "models are those of transformers": "model_impl",
    "one library reads and writes the checkpoint's files": (
        "ignore_patterns pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size "
        "safetensors_prefetch_num_threads"
    ),
    "one library does structured outputs": "guided_decoding_backend guided_decoding_disable_fallback=null",
    "the scheduler and the cache need no such choice": (
        "disable_hybrid_kv_cache_manager=null enable_mamba_shared_prefix_checkpoint=false kv_offloading_backend "
        "kv_sharing_fast_prefill=false long_prefill_token_threshold_adaptive=false lora_dtype "
        "lora_extra_vocab_size mamba_block_size mamba_cache_mode mamba_config max_long_partial_prefills "
        "max_num_partial_prefills num_lookahead_slots prefill_schedule_interval prefix_cache_retention_interval "
        "prefix_caching_hash_algo prefix_match_unit replayssm_buffer_len scheduler_reserve_full_isl=true "
        "swa_bounded_replay=true use_replayssm=false watermark"
    ),
    "weights sleep in host memory, however they are allocated": (
        "enable_cumem_allocator=false sleep_mode_backend sleep_mode_offload_cudagraph=false"
    ),
    "logs and metrics have one form; see metrics.md": (
        "aggregate_engine_logging=false cudagraph_metrics=false enable_layerwise_nvtx_tracing=false "
        "enable_log_requests=false enable_logging_iteration_details=false enable_mfu_metrics=false "
        "kv_cache_metrics=false kv_cache_metrics_sample log_config_file log_level logging_config "
        "per_request_spec_decode_metrics show_hidden_metrics_for_version"
    ),
    "the engine has one frontend process and its own supervisor": (
        "fail_on_environ_validation=false fault_tolerance_config renderer_num_workers shutdown_timeout "
        "tokens_only=false watchdog_config"
    ),
}

# feature → fields that are accepted with the values after `=` (JSON, `|` between two), with None or an empty value
DEFAULT_ONLY = {
    "several devices": (
        "data_parallel_external_lb=false data_parallel_hybrid_lb=false data_parallel_multi_port_external_lb=false "
        "data_parallel_rank=0 data_parallel_size_local=1 data_parallel_start_rank=0 decode_context_parallel_size=1 "
        "device_ids elastic_ep_max_dp_size enable_dbo=false enable_elastic_ep=false enable_eplb=false "
        "enable_fault_tolerance=false num_redundant_experts=0 prefill_context_parallel_size=1 "
        "ubatch_size=0"
    ),
    "embeddings of media, and encoders without a language model": "enable_mm_embeds=false mm_encoder_only=false",
    "adapters of encoders": "enable_tower_connector_lora=false default_mm_loras",
    "encoders in 8 bits": "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path",
    "leaving out tokens of videos": "video_pruning_method video_pruning_rate=0",
    "options of decoders (num_frames and fps are mm_processor_kwargs)": "media_io_kwargs",
    "KV connectors and events": "kv_transfer_config kv_events_config ec_transfer_config",
    "choosing the logprobs' stage": 'logprobs_mode="raw_logprobs"',
    "older patterns of logits processors": "logits_processor_pattern",
    "processors of pooling plugins": "io_processor_plugin",
    "a config from elsewhere": "hf_config_path code_revision",
    "whitespace and additional properties by configuration (set them in StructuredOutputsParams)": (
        "guided_decoding_disable_additional_properties=false guided_decoding_disable_any_whitespace=false"
    ),
    "other model classes": "model_class_overrides diffusion_config engram_config",
    "loader options": 'model_loader_extra_config model_weights=""',
    "quantization options": (
        "quantization_config allow_deprecated_quantization=false calculate_kv_scales=false kv_cache_dtype_skip_layers"
    ),
    "options of adapters": (
        "enable_lora_bias=false enable_mixed_moe_lora_format=false enable_moe_shared_loras=false lora_target_modules "
        "max_lora_cls_labels"
    ),
    "dtypes of recurrent state": (
        'enable_mamba_cache_stochastic_rounding=false mamba_cache_dtype="auto" mamba_cache_philox_rounds=0 '
        'mamba_ssm_cache_dtype="auto"'
    ),
    "switching off sliding windows": "disable_sliding_window=false",
    "other classes of worker and scheduler (see worker_extension_cls)": (
        'worker_cls="auto" scheduler_cls="vllm.core.scheduler.Scheduler"'
    ),
    "further limits of the scheduler": "max_num_active_seqs max_num_queued_tokens max_num_scheduled_tokens",
    "choosing what is offloaded": (
        'cpu_offload_params offload_backend="auto"|"uva" offload_group_size=0 offload_num_in_group=1 offload_params '
        "offload_prefetch_step=1"
    ),
    "sleep that keeps some parameters": "sleep_preserve_parameter_names",
    "reasoning parsers": "reasoning_config reasoning_parser reasoning_parser_plugin",
    "further outputs": "aux_output_config return_sampling_mask=false",
    "watermarks": "watermark_config",
    "detailed traces and histograms": "collect_detailed_traces custom_histogram_buckets",
    "binding to NUMA nodes": "numa_bind=false numa_bind_cpus numa_bind_nodes",
    "configuration of plugins": "additional_config",
}

# field → ours, where only the name is another one
RENAMED = {
    "max_num_queued_reqs": "max_num_queued_requests",
    "cuda_graph_sizes": "cudagraph_capture_sizes",
    "override_pooler_config": "pooler_config",
}
_SPECULATION = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
MAPPED = {  # field → how it works here
    "rope_scaling": "a field of hf_overrides",
    "rope_theta": "a field of hf_overrides",
    **dict.fromkeys(_SPECULATION, "a field of speculative_config"),
    "compilation_config": "its cudagraph_capture_sizes is that field; the rest has no effect",
    "disable_mm_preprocessor_cache": "`true`: mm_processor_cache_gb is 0",
    "language_model_only": "`true`: limit_mm_per_prompt is 0 for each modality",
    "convert": "`embed` and `classify` are a `task`; with `auto` and `none` the checkpoint decides",
    "hf_token": "set as HF_TOKEN in this process; `true`, the stored token, is what is used anyway",
    "weight_transfer_config": "the backends `nccl` and `ipc` need no configuration; others are not supported",
    "profiler_config": "torch_profiler_dir is where start_profile writes, in MAINSPRING_PROFILE_DIR of this process",
}
# field that ours has too → value of vLLM's → ours; None is our default where vLLM's default is None
VALUES: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "tokenizer_mode": {"slow": "hf"},
    "load_format": {
        "hf": "auto",
        "bitsandbytes": "auto",
        "fastsafetensors": "safetensors",
        "runai_streamer": "safetensors",
    },
    "attention_backend": {
        None: "auto",
        "FLASHINFER": "flashinfer",
        **dict.fromkeys("FLASH_ATTN FLEX_ATTENTION TORCH_SDPA TRITON_ATTN XFORMERS".split(), "auto"),
    },
    "distributed_executor_backend": {None: "uni"},
    "seed": {None: 0},
    "generation_config": {"vllm": "none"},
    "quantization": {
        "awq_marlin": "awq",
        "gptq_marlin": "gptq",
        **dict.fromkeys(("modelopt_fp4", "modelopt_mxfp8"), "modelopt"),
    },
    "task": {None: "auto"},
}
# field that ours has too → vLLM's short flag
SHORT = {"quantization": "-q", **{f"{kind}_parallel_size": f"-{kind[0]}p" for kind in ("tensor", "pipeline", "data")}}
_NONE_IS_DEFAULT = (
    "block_size enable_chunked_prefill enable_prefix_caching max_num_batched_tokens max_num_seqs limit_mm_per_prompt "
    "mm_processor_kwargs allowed_media_domains allowed_local_media_path mm_processor_cache_gb"
).split()


def _table(rows: Mapping[str, str]) -> dict[str, tuple[str, list[Any]]]:
    """→ name → text of its row, and the values after `=`."""
    return {
        name: (text, [json.loads(one) for one in values.split("|") if one])
        for text, names in rows.items()
        for name, _, values in (entry.partition("=") for entry in names.split())
    }


IGNORED, RESTRICTED = _table(WITHOUT_EFFECT), _table(DEFAULT_ONLY)
KNOWN = frozenset({*IGNORED, *RESTRICTED, *RENAMED, *MAPPED})


def is_flag(name: str) -> bool:
    """Whether a field of `KNOWN` is True or False."""
    if name in ("disable_mm_preprocessor_cache", "language_model_only"):
        return True
    values = (IGNORED.get(name) or RESTRICTED.get(name) or ("", []))[1]
    return any(value is None or isinstance(value, bool) for value in values)


def resolve_fields(given: Mapping[str, Any], theirs: frozenset[str]) -> dict[str, Any]:
    """Keyword arguments of `EngineArgs` without `theirs`, the fields that only vLLM's has, and with our values.

    Raises:
        NotSupportedError: a field has another value than its default, and its feature does not exist here.
        InvalidArgumentError: a field and its other name are both given.
    """
    found = {name: value for name, value in given.items() if name not in theirs}
    for name in theirs & given.keys():
        value = given[name]
        if name in RENAMED:
            _set(found, RENAMED[name], value, name)
        elif name in ("rope_scaling", "rope_theta"):
            if value:
                found["hf_overrides"] = {**(found.get("hf_overrides") or {}), name: value}
        elif name in _SPECULATION:
            if value is not None:
                found["speculative_config"] = {**(found.get("speculative_config") or {}), _SPECULATION[name]: value}
        elif name == "compilation_config":
            sizes = value.get("cudagraph_capture_sizes") if isinstance(value, Mapping) else None
            _set(found, "cudagraph_capture_sizes", sizes, name)
        elif name == "convert":
            check_default(name, value, ("auto", "none", "embed", "classify"), "other conversions of a model")
            _set(found, "task", value if value in ("embed", "classify") else None, name)
        elif name == "disable_mm_preprocessor_cache":
            found |= {"mm_processor_cache_gb": 0.0} if value else {}
        elif name == "language_model_only":
            found |= {"limit_mm_per_prompt": dict.fromkeys(MODALITIES, 0)} if value else {}
        elif name == "hf_token":
            _use_token(value)
        elif name == "profiler_config":
            _profile_into(value)
        elif name == "weight_transfer_config":
            check_transfer(value)
        elif name in RESTRICTED:
            feature, values = RESTRICTED[name]
            check_default(name, value, values, feature)
    if found.get("load_format") == "bitsandbytes" and found.get("quantization") is None:
        found["quantization"] = "bitsandbytes"
    for name in VALUES.keys() & found.keys():
        value = str(found[name]).removeprefix("torch.") if type(found[name]).__name__ == "dtype" else found[name]
        found[name] = VALUES[name].get(value, value) if isinstance(value, str | None) else value
    for name in _NONE_IS_DEFAULT:
        if found.get(name, 0) is None:
            del found[name]
    if isinstance(limits := found.get("limit_mm_per_prompt"), Mapping):  # beside a count, vLLM's may have sizes
        found["limit_mm_per_prompt"] = {
            key: limit.get("count", MOST_ITEMS) if isinstance(limit, Mapping) else limit
            for key, limit in limits.items()
        }
    if isinstance(names := found.get("served_model_name"), list) and names:
        found["served_model_name"] = names[0]
    if isinstance(outputs := found.get("structured_outputs_config"), Mapping):
        found["structured_outputs_config"] = _structured(outputs)
    return found


def _set(found: dict[str, Any], ours: str, value: Any, name: str) -> None:
    if found.get(ours) in (None, "auto"):
        found.pop(ours, None)
    if value is not None and found.setdefault(ours, value) is not value:
        raise InvalidArgumentError(f"{name} is given beside {ours}, its other name; give one of them")


def _structured(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without what vLLM's has besides: the names of other libraries, and fields at their default."""
    for name, feature in _STRUCTURED_ONLY.items():
        check_default(f"structured_outputs_config: {name}", given.get(name), (False,), feature)
    found = {name: value for name, value in given.items() if name not in (*_STRUCTURED_ONLY, "disable_fallback")}
    if found.get("backend") in _OTHER_LIBRARIES:
        del found["backend"]
    return found


_IN_PARAMS = "for all requests; set it in StructuredOutputsParams"
_STRUCTURED_ONLY = {
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), _IN_PARAMS),
    **dict.fromkeys(("reasoning_parser", "reasoning_parser_plugin", "enable_in_reasoning"), "reasoning parsers"),
}
_OTHER_LIBRARIES = ("xgrammar", "outlines", "lm-format-enforcer")


def _use_token(token: Any) -> None:
    if isinstance(token, str) and token:
        os.environ["HF_TOKEN"] = token
    else:
        check_default("hf_token", token, (True,), "switching the token off; set HF_HUB_DISABLE_IMPLICIT_TOKEN")


class ProfilerConfig(dict[str, Any]):
    """Options of `start_profile`, as a dict."""

    def __init__(self, profiler: str | None = None, torch_profiler_dir: str = "", **options: Any) -> None:
        super().__init__(profiler=profiler, torch_profiler_dir=torch_profiler_dir, **options)


_PROFILER: dict[str, tuple[Any, ...]] = {
    "profiler": ("torch",),
    "active_iterations": (5,),
    "ignore_frontend": (True, False),
}


def _profile_into(config: Any) -> None:
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise InvalidArgumentError(f"profiler_config is {shown(config)}; it must be a dict")
    for name, value in config.items():
        if not name.startswith("torch_profiler_"):  # these say how detailed the trace is
            feature = "choosing which steps are recorded, or by what"
            check_default(f"profiler_config: {name}", value, _PROFILER.get(name, (False,)), feature)
    if folder := config.get("torch_profiler_dir"):
        os.environ["MAINSPRING_PROFILE_DIR"] = os.path.abspath(folder)
