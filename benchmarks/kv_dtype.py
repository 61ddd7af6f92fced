"""The accuracy of an fp8 KV cache: the embedded model's answers, and the change of its logits.

The logits are those of every position of the held-out questions with their answers and of long stories, with the same
tokens before each, relative to the standard deviation of those with a bf16 cache. The error of bf16 itself, compared
with fp32 throughout, is shown beside it.

    python benchmarks/kv_dtype.py
"""

from __future__ import annotations

import argparse
from random import Random

import torch
from transformers import AutoTokenizer

from demo_questions import ANIMALS, GIRLS, Question, heldout_other, heldout_sums, is_right, long_story
from mainspring import LLM, SamplingParams
from mainspring.core.model.learn.verify import Chunk, paged_logits
from mainspring.core.model.load.loader import load_model
from mainspring.demo import MODEL_PATH
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from report import publish, table

CACHE_BYTES = 64 << 20


def right(llm: LLM, questions: list[Question]) -> str:
    params = SamplingParams(temperature=0, max_tokens=96, stop=["\n"])
    outputs = llm.generate([question.prompt for question in questions], params, use_tqdm=False)
    count = sum(is_right(q, output.outputs[0].text) for q, output in zip(questions, outputs, strict=True))
    return f"{count}/{len(questions)} = {count / len(questions):.1%}"


def accuracy(sums: int, others: int) -> str:
    rows = []
    for dtype in ("bfloat16", "fp8"):
        with LLM(dtype="bfloat16", kv_cache_dtype=dtype, kv_cache_memory_bytes=CACHE_BYTES) as llm:
            blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
            rows.append([dtype, right(llm, heldout_sums(sums)), right(llm, heldout_other(others)), f"{blocks:,}"])
    return table(["KV cache", "sums", "other questions", f"blocks in {CACHE_BYTES >> 20} MiB"], rows)


def logits(dtype: str, cache: torch.dtype, texts: list[str]) -> torch.Tensor:
    """fp32 ``[positions of all texts, vocab]``."""
    model = load_model(ModelConfig(model=str(MODEL_PATH), dtype=dtype), LoadConfig(), torch.device("cpu"))
    tokenizer, backend = AutoTokenizer.from_pretrained(MODEL_PATH), ReferenceBackend()
    parts = []
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text))
        parts += paged_logits(model, [ids], [[Chunk(0, 0, len(ids))]], backend, cache)
    return torch.cat(parts).float()


def logit_error(texts: list[str]) -> str:
    bf16 = logits("bfloat16", torch.bfloat16, texts)
    rows = []
    for name, other in (
        ("fp8 cache, bf16 model", logits("bfloat16", torch.float8_e4m3fn, texts)),
        ("fp32 cache, fp32 model", logits("float32", torch.float32, texts)),
    ):
        error = (other - bf16).abs() / bf16.std()
        agree = (other.argmax(-1) == bf16.argmax(-1)).double().mean()
        rows.append([name, f"{error.mean():.4f}", f"{error.max():.3f}", f"{agree:.2%}"])
    head = ["logits against bf16 cache, bf16 model", "mean difference", "largest", "same largest logit"]
    return f"{table(head, rows)}\n\n{len(bf16):,} positions of {len(texts)} texts."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sums", type=int, default=500, help="held-out sums to ask (default: %(default)s)")
    parser.add_argument("--others", type=int, default=200, help="other held-out questions (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    args = parser.parse_args()
    questions = heldout_sums(args.sums)[:100] + heldout_other(args.others)[:100]
    texts = [f"{question.prompt} {question.answer}" for question in questions]
    rng = Random(0)
    texts += [long_story(rng, rng.choice(GIRLS), rng.choice(ANIMALS)) for _ in range(20)]
    publish("kv-dtype", f"{accuracy(args.sums, args.others)}\n\n{logit_error(texts)}", args.write)


if __name__ == "__main__":
    main()
