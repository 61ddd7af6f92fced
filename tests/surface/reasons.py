"""Rows without a test of their own, and why; and what fields mean that nothing else says."""

WITHOUT_EFFECT = {
    "SamplingParams.extra_args": "it is for extensions; there are none",
    "StructuredOutputsParams.disable_fallback": "there is one implementation, and nothing to fall back to",
    "StructuredOutputsParams.backend": "as `disable_fallback`; a field of the older `GuidedDecodingParams`",
}
ELSEWHERE: dict[str, str] = {}
SAYS: dict[str, str] = {}
