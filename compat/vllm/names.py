"""Which names of vLLM are offered, and what each is here."""

from __future__ import annotations

from typing import NamedTuple

_CLEANUP = {"compat.vllm.helpers": "cleanup_dist_env_and_memory destroy_distributed_environment destroy_model_parallel"}
_INPUTS = {
    "": "TextPrompt TokensPrompt EmbedsPrompt ExplicitEncoderDecoderPrompt",
    "engine.request.prompts": "PromptType=Prompt",
}
_MEDIA = "MultiModalDataDict MultiModalUUIDDict"
_SOURCES = "ModuleSource ParamMeta WeightSource"

# module of vLLM → module of ours → names, or `theirs=ours` where they differ
_TABLE = {
    "": {
        "": (
            "LLM LLMEngine AsyncLLMEngine EngineArgs AsyncEngineArgs SamplingParams PoolingParams TextPrompt "
            "TokensPrompt RequestOutput CompletionOutput PoolingOutput PoolingRequestOutput EmbeddingOutput "
            "EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput ScoringOutput "
            "ScoringRequestOutput __version__"
        ),
        "engine.request.prompts": "PromptType=Prompt",
    },
    "beam_search": {"": "BeamSearchOutput BeamSearchSequence"},
    "config": {
        "": (
            "CacheConfig DeviceConfig LoadConfig LoRAConfig ModelConfig ObservabilityConfig ParallelConfig "
            "SchedulerConfig SpeculativeConfig StructuredOutputsConfig DecodingConfig VllmConfig=EngineConfig"
        ),
        "compat.engine_fields": "ProfilerConfig",
        "compat.weight_transfer": "WeightTransferConfig",
        "ipc.config": "PoolerConfig",
    },
    "distributed": _CLEANUP,
    "distributed.parallel_state": _CLEANUP,
    "distributed.weight_transfer": {"tools.weight_sender": f"{_SOURCES} WeightTransferTrainerFactory"},
    "distributed.weight_transfer.base": {
        "tools.weight_sender": f"{_SOURCES} TrainerWeightTransferEngine",
        "compat.weight_transfer": "WeightTransferInitRequest WeightTransferUpdateRequest",
    },
    "distributed.weight_transfer.factory": {"tools.weight_sender": "WeightTransferTrainerFactory"},
    "distributed.weight_transfer.ipc_engine": {
        "tools.weight_sender": "IPCTrainerInitInfo IPCTrainerWeightTransferEngine"
    },
    "distributed.weight_transfer.nccl_engine": {
        "tools.weight_sender": "NCCLTrainerInitInfo NCCLTrainerWeightTransferEngine"
    },
    "engine.arg_utils": {"": "EngineArgs AsyncEngineArgs"},
    "engine.async_llm_engine": {"": "AsyncLLMEngine", "ipc.errors": "AsyncEngineDeadError=EngineDeadError"},
    "engine.llm_engine": {"": "LLMEngine"},
    "entrypoints.llm": {"": "LLM"},
    "entrypoints.score_utils": {"engine.pooling_methods": "ScoreMultiModalParam"},
    "inputs": _INPUTS,
    "inputs.data": _INPUTS,
    "logger": {"compat.vllm.helpers": "init_logger"},
    "logprobs": {"": "Logprob"},
    "lora.request": {"": "LoRARequest"},
    "outputs": {
        "": (
            "RequestOutput CompletionOutput PoolingOutput PoolingRequestOutput EmbeddingOutput EmbeddingRequestOutput "
            "ClassificationOutput ClassificationRequestOutput ScoringOutput ScoringRequestOutput"
        ),
    },
    "platforms": {"compat.vllm.helpers": "current_platform"},
    "multimodal": {"engine.request.media_inputs": _MEDIA},
    "multimodal.image": {"compat.vllm.helpers": "convert_image_mode"},
    "multimodal.inputs": {"engine.request.media_inputs": _MEDIA},
    "pooling_params": {"": "PoolingParams", "ipc.pooling_params": "LateChunkingParams"},
    "model_executor.model_loader": {"compat.vllm.helpers": "ShardedStateLoader"},
    "prompt_adapter.request": {"": "PromptAdapterRequest"},
    "sampling_params": {
        "": "SamplingParams BeamSearchParams RequestOutputKind StructuredOutputsParams GuidedDecodingParams"
    },
    "sequence": {"": "Logprob RequestMetrics"},
    "transformers_utils.repo_utils": {"compat.vllm.helpers": "hf_api"},
    "usage.usage_lib": {"": "UsageContext"},
    "utils": {
        "": "Device",
        "compat.vllm.helpers": "FlexibleArgumentParser get_ip get_open_port random_uuid",
    },
    "utils.argparse_utils": {"compat.vllm.helpers": "FlexibleArgumentParser"},
    "utils.network_utils": {"compat.vllm.helpers": "get_ip get_open_port"},
    "utils.print_utils": {"compat.vllm.helpers": "print_embeddings"},
    "v1.engine": {"": "EngineCoreRequest"},
    "v1.engine.async_llm": {"": "AsyncLLM"},
    "v1.engine.exceptions": {"": "EngineDeadError"},
    "v1.engine.llm_engine": {"": "LLMEngine"},
    "v1.metrics.loggers": {"": "StatLoggerBase"},
    "v1.metrics.reader": {"engine.observe.metrics": "Metric Counter Gauge Histogram Vector"},
    "v1.sample.logits_processor": {
        "ipc.logits_processors": (
            "LogitsProcessor AdapterLogitsProcessor BatchUpdate MoveDirectionality AddedRequest MovedRequest "
            "RemovedRequest RequestLogitsProcessor"
        )
    },
    "v1.sample.logits_processor.builtin": {"ipc.logits_processors": "process_dict_updates"},
    "version": {"": "__version__"},
}

# names and whole modules that are not offered → what to do instead, or why not
_INSTEAD = {
    "ModelRegistry": "models are those of transformers; register a class of your own with its AutoConfig and AutoModel",
    "__version_tuple__": "take __version__ apart",
    "bc_linter_skip": "it marks vLLM's own interfaces",
    "bc_linter_include": "it marks vLLM's own interfaces",
    "assets": "files of vLLM's examples are not part of this; give files, URLs or PIL images of your own",
    "multimodal": "the checkpoint's own processor prepares media, see docs/media.md; multi_modal_data takes URLs",
    "initialize_ray_cluster": "several devices are not supported yet",
    "distributed": "several devices are not supported yet",
    "distributed.kv_events": "events of the KV cache are not supported",
    "distributed.kv_transfer": "KV connectors are not supported; kv_offloading_size keeps blocks in host memory",
    "config.KVTransferConfig": "KV connectors are not supported; kv_offloading_size keeps blocks in host memory",
    "distributed.weight_transfer": "see WeightTransferTrainerFactory, or update_weights of LLM and the engines",
    "distributed.weight_transfer.HTTPVLLMWeightSyncClient": "give trainer_init an LLM or an LLMEngine as client",
    "distributed.weight_transfer.RayVLLMWeightSyncClient": "give trainer_init an LLM or an LLMEngine as client",
    "entrypoints": "there is no HTTP server yet; `mainspring daemon` runs an engine for several processes",
    "model_executor": "the inside of the engine is another one here; LLM.apply_model reaches the model",
    "v1.worker": "the inside of the engine is another one here; v1.sample.logits_processor has the classes",
    "envs": "set options as fields of EngineArgs",
    "platforms": "ask torch about the device",
    "benchmarks": "see `mainspring bench`",
}


class Place(NamedTuple):
    """Where a name is here: `name` in the module `mainspring.module`."""

    module: str
    name: str


def _places() -> dict[str, dict[str, Place]]:
    places: dict[str, dict[str, Place]] = {}
    for theirs, homes in _TABLE.items():
        parts = theirs.split(".")
        for end in range(len(parts)):
            places.setdefault(".".join(parts[:end]), {})
        named = places.setdefault(theirs, {})
        for home, names in homes.items():
            for name in names.split():
                their_name, _, our_name = name.partition("=")
                named[their_name] = Place(home, our_name or their_name)
    return places


PLACES = _places()  # module of vLLM, and "" for vLLM itself → name → its place here


def refusal(dotted: str) -> str:
    """Says that a name of vLLM, given without ``vllm.``, is not offered, and what to do instead."""
    parts = dotted.split(".")
    reasons = (_INSTEAD.get(".".join(parts[:end])) for end in range(len(parts), 0, -1))
    reason = next(filter(None, reasons), None)
    return f"vllm.{dotted} has no counterpart in Mainspring" + (f": {reason}" if reason else "")
