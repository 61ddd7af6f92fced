"""Urgent requests first: with two slots, waiting requests are served by the lowest priority number, not by arrival."""

from mainspring import EngineArgs, LLMEngine, SamplingParams

params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
args = EngineArgs(max_num_seqs=2, scheduling_policy="priority")

with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
    for number in range(6):
        engine.add_request(f"batch {number}", f"Number {number} is", params, priority=10)
    engine.add_request("urgent", "Help!", params, priority=0)
    order = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step() if output.finished]
    print("ended in this order:", ", ".join(order))
    print("urgent was number", order.index("urgent") + 1)
