"""Rollouts in a training loop: the core sleeps while the trainer needs the memory, and wakes with new weights."""

import torch
from safetensors.torch import load_file

from mainspring import LLM, SamplingParams
from mainspring.demo import MODEL_PATH

prompts = ["What is the capital of Peru?", "What is 2 plus 3?"]
params = SamplingParams(temperature=0.0, max_tokens=8)
weights = load_file(MODEL_PATH / "model.safetensors")  # the trainer's copy of the weights

with LLM() as llm:
    for step in range(3):
        answers = [output.outputs[0].text.strip() for output in llm.generate(prompts, params, use_tqdm=False)]
        print(f"step {step}:", " | ".join(answers))

        llm.sleep(level=1)  # now the trainer can use the memory of the KV cache and, on a GPU, of the weights
        torch.manual_seed(step)
        for name, value in weights.items():  # a trivial trainer that makes the model worse in every step
            weights[name] = value + 0.03 * torch.randn_like(value)
        llm.wake_up(tags=["weights"])
        llm.update_weights(weights.items(), version=f"step {step + 1}")
        llm.wake_up(tags=["kv_cache"])
    print("asleep:", llm.llm_engine.is_sleeping())
