"""Measures the vision demo on its held-out questions with transformers (`python demo/training/evaluate_vision.py`).

This is the reference measurement, without the engine: when the engine's own accuracy test fails, it tells
whether the model or the engine is at fault.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from evaluate import report
from pictures import VISION_FOLDER, Picture, Question, draw, heldout

MAX_TOKENS = 8  # the longest answer has 2 and the end token


def prompt(processor: Any, question: Question, chat: bool) -> str:
    """The question as the first message of a chat, or as text to continue."""
    if not chat:
        return f"<image>{question.prompt}"
    content = [{"type": "image"}, {"type": "text", "text": question.prompt}]
    rendered: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return rendered


def completions(model: Any, processor: Any, asked: list[tuple[Picture, Question]], chat: bool) -> list[str]:
    """What the model writes after each question."""
    written = []
    for start in range(0, len(asked), 50):
        pairs = asked[start : start + 50]
        inputs = processor(
            images=[draw(picture) for picture, _ in pairs],
            text=[prompt(processor, question, chat) for _, question in pairs],
            add_special_tokens=not chat,  # the template writes the begin token itself
            padding=True,
            padding_side="left",
            return_tensors="pt",
        )
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        generated = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = generated[:, inputs["input_ids"].shape[1] :]
        written += processor.batch_decode(new, skip_special_tokens=True)
    return written


def main() -> None:
    """Command line: the held-out questions as chats and as text to continue, in bfloat16 and float32."""
    parser = argparse.ArgumentParser(description="Measure the vision demo on its held-out questions.")
    parser.add_argument("--model", type=Path, default=VISION_FOLDER, help="model folder (default: %(default)s)")
    parser.add_argument("--count", type=int, default=300, help="how many questions (default: %(default)s)")
    parser.add_argument("--show-wrong", action="store_true", help="print every wrong answer")
    arguments = parser.parse_args()
    processor = AutoProcessor.from_pretrained(arguments.model)
    asked = heldout(arguments.count)
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=dtype)
        for chat in (True, False):
            written = completions(model, processor, asked, chat)
            name = f"{'chat' if chat else 'plain'}, {str(dtype).removeprefix('torch.')}"
            report(name, [question for _, question in asked], written, arguments.show_wrong)


if __name__ == "__main__":
    main()
