"""Log probabilities of an answer's tokens and of the most likely alternatives; beam search; penalties."""

import math

from mainspring import LLM, BeamSearchParams, SamplingParams

with LLM() as llm:
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    (output,) = llm.generate("What is the capital of France?", params, use_tqdm=False)
    answer = output.outputs[0]
    for token, others in zip(answer.token_ids, answer.logprobs or [], strict=True):
        shown = ", ".join(f"{one.decoded_token!r} {math.exp(one.logprob):.0%}" for one in others.values())
        print(f"{token:5}  {shown}")
    print(f"the whole answer: {math.exp(answer.cumulative_logprob or 0.0):.1%}")

    (found,) = llm.beam_search("Once upon a time", BeamSearchParams(beam_width=3, max_tokens=12))
    for beam in found.sequences:
        print(f"{beam.cum_logprob:7.2f}  {beam.text}")

    (output,) = llm.generate(
        "Tell me a story.", SamplingParams(temperature=0.0, max_tokens=30, frequency_penalty=1.0, bad_words=["fox"])
    )
    print("without foxes:", output.outputs[0].text)
