"""Rows without their own test, with the reason, and descriptions of fields that have no other documentation."""

WITHOUT_EFFECT = {
    "StructuredOutputsParams.disable_fallback": "there is one implementation, and nothing to fall back to",
    "StructuredOutputsParams.backend": "as `disable_fallback`; a field of the older `GuidedDecodingParams`",
    **{f"{owner}.reset_{kind}_cache": "no model takes images: there is nothing in it"
       for owner in ("LLMEngine", "AsyncLLMEngine", "LLM") for kind in ("mm", "encoder")},
    **{f"{owner}.dp_group": "None, for there is one copy of the model" for owner in ("LLMEngine", "AsyncLLMEngine")},
    **{f"{kind}RequestOutput.error": "None, for `LLM`'s method raises it: see `PoolingRequestOutput.error`"
       for kind in ("Embedding", "Classification", "Scoring")},
    **{f"{kind}RequestOutput.late_chunking": "None: one vector has no chunks; see `PoolingRequestOutput.late_chunking`"
       for kind in ("Embedding", "Classification", "Scoring")},
}  # fmt: skip
_GPU = "needs an NVIDIA GPU: `make gpu-check`"
ELSEWHERE = {
    "EngineArgs.gpu_memory_utilization": _GPU,
    "EngineArgs.enforce_eager": _GPU,
    "EngineArgs.cudagraph_capture_sizes": _GPU,
    "EngineArgs.deterministic": f"on a CPU tokens never depend on other requests; {_GPU}",
    "EngineArgs.kernels_dir": "kernels for a GPU: tests/test_prebuilt.py",
    "EngineArgs.restart_window": "takes crashes and time: tests/test_supervisor.py",
    "EngineArgs.watchdog_timeout": "takes a core that hangs: tests/test_supervisor.py",
    "EngineArgs.frontend_timeout": "takes a machine that is gone: tests/test_server.py",
    "EngineArgs.slow_frontend_timeout": "takes a frontend that does not read: tests/test_server.py",
}
SAYS: dict[str, str] = {}
