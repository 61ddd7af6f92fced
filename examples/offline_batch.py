"""Many prompts in one call. Without `model`, the embedded model is used."""

from mainspring import LLM, SamplingParams

prompts = [f"What is {number} plus {number + 5}?" for number in range(1, 9)]

with LLM() as llm:
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16)):
        print(f"{output.prompt} -> {output.outputs[0].text.strip()}")
