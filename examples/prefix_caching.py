"""Many questions about one text: the text is computed once, for concurrent and for later requests."""

from mainspring import LLM, SamplingParams

text = "The mill stands at the river. Its wheel turns all day. The miller has three cats. " * 20
questions = ["Who lives there?", "What turns?", "How many cats are there?", "Where does the mill stand?"]
params = SamplingParams(temperature=0.0, max_tokens=8)

with LLM() as llm:
    for _ in range(2):
        for output in llm.generate([text + question for question in questions], params, use_tqdm=False):
            tokens = len(output.prompt_token_ids or [])
            answer = output.outputs[0].text.strip()
            print(f"{output.num_cached_tokens:4} of {tokens} prompt tokens were cached -> {answer}")
    llm.reset_prefix_cache()
    (output,) = llm.generate(text + questions[0], params, use_tqdm=False)
    print(f"after a reset: {output.num_cached_tokens}")
