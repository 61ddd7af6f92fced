"""Measures the demo model on its held-out questions with transformers, greedily (`python demo/training/evaluate.py`).

This is the reference measurement, without the engine: when the engine's own accuracy test fails, it tells
whether the model or the engine is at fault.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from corpus import Question, heldout_other, heldout_sums, is_right
from mainspring.demo import MODEL_PATH

OPTIONS = {
    "batch_size": 100,
    "max_new_tokens": 96,  # the longest answer
    "do_sample": False,
    "return_full_text": False,
    "skip_special_tokens": False,
}


def completions(model: Any, tokenizer: Any, questions: list[Question], chat: bool) -> list[str]:
    """What the model writes after each question, its end token included: as a chat, or after the begin token."""
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts: Any = [
        [{"role": "user", "content": question.prompt}] if chat else question.prompt for question in questions
    ]
    return [written["generated_text"].replace(tokenizer.pad_token, "") for (written,) in write(prompts, **OPTIONS)]


def report(name: str, questions: list[Question], written: list[str], show_wrong: bool) -> None:
    """Print the share of right answers, over all and per kind."""
    asked = Counter(question.kind for question in questions)
    wrong = [
        (question, text) for question, text in zip(questions, written, strict=True) if not is_right(question, text)
    ]
    right = asked - Counter(question.kind for question, _ in wrong)
    kinds = ", ".join(f"{kind} {right[kind]}/{asked[kind]}" for kind in asked)
    print(f"{name}: {right.total()}/{asked.total()} = {right.total() / asked.total():.1%} ({kinds})", flush=True)
    if show_wrong:
        for question, text in wrong:
            print(f"    {question.prompt!r} -> {text!r}, not {question.answer!r}")


def main() -> None:
    """Command line: both sets of questions, as text to continue and as chats, in bfloat16 and float32."""
    parser = argparse.ArgumentParser(description="Measure the demo model on its held-out questions.")
    parser.add_argument("--model", type=Path, default=MODEL_PATH, help="model folder (default: %(default)s)")
    parser.add_argument("--show-wrong", action="store_true", help="print every wrong answer")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
        for set_name, questions in (("sums", heldout_sums()), ("other", heldout_other())):
            for chat in (False, True):
                written = completions(model, tokenizer, questions, chat)
                name = f"{set_name}, {'chat' if chat else 'plain'}, {str(dtype).removeprefix('torch.')}"
                report(name, questions, written, arguments.show_wrong)


if __name__ == "__main__":
    main()
