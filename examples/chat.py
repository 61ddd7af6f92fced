"""A conversation with the model's chat template; each answer becomes part of the next prompt."""

from mainspring import LLM, SamplingParams

messages = []
with LLM() as llm:
    for question in ("What is the capital of France?", "Count up from 3 to 9.", "What is twelve minus five?"):
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
        answer = output.outputs[0].text.strip()
        messages.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}\n")
