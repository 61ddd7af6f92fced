"""The program that runs vLLM's examples of media finds their models, and runs one on a checkpoint that it makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mainspring.benchmarks import vllm_media_examples as program

SCRIPT = """
import argparse
from vllm import LLM, SamplingParams
from vllm.assets.image import ImageAsset

def run_llava():
    return LLM(model="llava-hf/llava-1.5-7b-hf", tensor_parallel_size=2, max_model_len=512)

def run_other(model_name):
    return LLM(model=model_name)

def run_third():
    return run_other("who/third-7b")

model_example_map = {"llava": run_llava, "third": run_third}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-type")
    llm = model_example_map[parser.parse_args().model_type]()
    prompt = {"prompt": "USER: <image>", "multi_modal_data": {"image": ImageAsset("cherry_blossom").pil_image}}
    print(llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0].text)
"""


def test_an_example_is_a_function_with_the_name_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "vision_language.py").write_text(SCRIPT)
    found = program.examples_of(tmp_path, "vision_language.py")
    assert [(one.name, one.hub_name, one.arguments.split()) for one in found] == [
        ("llava", "llava-hf/llava-1.5-7b-hf", ["--model-type", "llava"]),
        ("third", "who/third-7b", ["--model-type", "third"]),
    ]


@pytest.mark.slow
def test_an_example_runs_with_a_local_checkpoint_and_a_local_picture(tmp_path: Path) -> None:
    (tmp_path / "vision_language.py").write_text(SCRIPT)
    example, _ = program.examples_of(tmp_path, "vision_language.py")
    [model] = [one for one in program.MODELS if example.hub_name in one.names.split()]
    names = tmp_path / "models.json"
    names.write_text(json.dumps({example.hub_name: str(program.make(model, tmp_path / "llava"))}))
    result = program.run(example, tmp_path, names, tmp_path / "out")
    assert (result.outcome, result.reason) == ("runs", "on one device; the example asks for 2")
