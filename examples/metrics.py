"""Metrics for dashboards: counters, gauges and histograms, from Python and in Prometheus' format."""

import urllib.request

from mainspring import EngineArgs, LLMEngine, SamplingParams

with LLMEngine.from_engine_args(EngineArgs(metrics_port=0)) as engine:  # 0: any free port
    for number in range(8):
        engine.add_request(str(number), f"Number {number} is", SamplingParams(max_tokens=16, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    for metric in engine.get_metrics():
        if metric.name.endswith(("generation_tokens", "time_to_first_token_seconds")):
            print(metric)
    with urllib.request.urlopen(f"http://127.0.0.1:{engine.metrics_port}/metrics") as page:
        lines = page.read().decode().splitlines()
    print(*[line for line in lines if line.startswith("mainspring:request_success")], sep="\n")
