"""A LoRA adapter for one request, beside another without it. The adapter here has random values."""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from mainspring import LLM, LoRARequest, SamplingParams

RANK, LAYERS, HIDDEN, OUTPUTS = 8, 4, 256, 256  # sizes of the query projections of the embedded model


def write_adapter(folder: Path) -> None:
    """Write an adapter in the format of `PeftModel.save_pretrained`."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(LAYERS):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) * 0.4
        tensors[f"{module}.lora_B.weight"] = torch.randn(OUTPUTS, RANK, generator=generator) * 0.4
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


with tempfile.TemporaryDirectory() as folder, LLM(enable_lora=True, max_loras=2) as llm:
    write_adapter(Path(folder))
    adapter = LoRARequest("random", 1, folder)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    prompts = ["Once upon a time"] * 2
    for output in llm.generate(prompts, params, use_tqdm=False, lora_request=[None, adapter]):
        name = output.lora_request.lora_name if output.lora_request else "none"
        print(f"adapter {name}: {output.outputs[0].text!r}")
    print(f"in memory: {llm.llm_engine.list_loras()}")
