"""Add, step, collect: several concurrent requests, each printed while it is generated, one aborted."""

from mainspring import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams

params = SamplingParams(temperature=0.8, seed=1, max_tokens=40, output_kind=RequestOutputKind.DELTA)

with LLMEngine.from_engine_args(EngineArgs()) as engine:
    for animal in ("fox", "owl", "bear"):
        engine.add_request(animal, f"Tell me a short story about a {animal}.", params)
    tokens = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            new = output.outputs[0]
            print(f"{output.request_id}: {new.text!r}" + (f" ({new.finish_reason})" if output.finished else ""))
            tokens += len(new.token_ids)
        if tokens > 60:
            engine.abort_request("bear")
