"""Rows without their own test, with the reason, and descriptions of fields that have no other documentation."""

WITHOUT_EFFECT = {
    "StructuredOutputsParams.disable_fallback": "there is one implementation, and nothing to fall back to",
    "StructuredOutputsParams.backend": "as `disable_fallback`; a field of the older `GuidedDecodingParams`",
    **{f"{owner}.dp_group": "None, for copies of the model need no process group"
       for owner in ("LLMEngine", "AsyncLLMEngine")},
    **{f"{owner}.execute_dummy_batch": "no copy of the model waits for another"
       for owner in ("LLMEngine", "AsyncLLMEngine")},
    **{f"{kind}RequestOutput.error": "None, for `LLM`'s method raises it: see `PoolingRequestOutput.error`"
       for kind in ("Embedding", "Classification", "Scoring")},
    **{f"{kind}RequestOutput.late_chunking": "None: one vector has no chunks; see `PoolingRequestOutput.late_chunking`"
       for kind in ("Embedding", "Classification", "Scoring")},
}  # fmt: skip
_GPU = "needs an NVIDIA GPU: `make gpu-check`"
_MEDIA = "takes a model with media: tests/test_media.py and tests/test_media_prompts.py"
_WORKERS = "takes media workers: tests/test_media_worker.py and tests/test_media_safety.py"
ELSEWHERE = {
    **{
        f"{owner}.reset_{kind}_cache": _MEDIA
        for owner in ("LLMEngine", "AsyncLLMEngine", "LLM")
        for kind in ("mm", "encoder")
    },
    "Tokenizer.media": _MEDIA,
    "Tokenizer.response_template": "takes a checkpoint that ships one: tests/test_reading.py",
    **{
        f"metrics.{name}": "takes a model with media: tests/test_media_core.py and tests/test_metrics.py"
        for name in (
            "encoded_items",
            "encoder_seconds",
            "encoder_cache_bytes",
            "encoder_cache_hits",
            "encoder_cache_queries",
        )
    },
    **{f"EngineArgs.{name}": _MEDIA for name in ("limit_mm_per_prompt", "mm_processor_kwargs", "mm_encoder_cache_gb")},
    **{
        f"EngineArgs.{name}": _WORKERS
        for name in (
            "allowed_media_domains",
            "allowed_local_media_path",
            "media_workers",
            "mm_processor_cache_gb",
            "max_media_bytes",
            "max_media_pixels",
        )
    },
    "EngineArgs.gpu_memory_utilization": _GPU,
    "EngineArgs.enforce_eager": _GPU,
    "EngineArgs.cudagraph_capture_sizes": _GPU,
    "EngineArgs.deterministic": f"on a CPU tokens never depend on other requests; {_GPU}",
    "EngineArgs.disable_custom_all_reduce": "takes several GPUs: tests/test_shared_sums.py",
    "EngineArgs.kernels_dir": "kernels for a GPU: tests/test_prebuilt.py",
    "EngineArgs.restart_window": "takes crashes and time: tests/test_supervisor.py",
    "EngineArgs.watchdog_timeout": "takes a core that hangs: tests/test_supervisor.py",
    "EngineArgs.frontend_timeout": "takes a machine that is gone: tests/test_server.py",
    "EngineArgs.slow_frontend_timeout": "takes a frontend that does not read: tests/test_server.py",
}
SAYS: dict[str, str] = {}
