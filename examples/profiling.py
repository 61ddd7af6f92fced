"""Profile steps: a trace of a few steps, for chrome://tracing or ui.perfetto.dev."""

import json
from collections import Counter
from pathlib import Path

from mainspring import LLM, SamplingParams

params = SamplingParams(max_tokens=32, ignore_eos=True)

with LLM() as llm:
    llm.start_profile("example")
    llm.generate(["Tell me a story."] * 8, params, use_tqdm=False)
    trace = Path(llm.stop_profile())

spans = Counter[str]()
for event in json.loads(trace.read_text())["traceEvents"]:
    if event.get("cat") == "user_annotation":
        spans[event["name"]] += event["dur"]
for name, microseconds in spans.most_common():
    print(f"{name:10}{microseconds / 1000:8.1f} ms")
print("the whole trace:", trace)
