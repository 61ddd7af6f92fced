"""Trains the demo model and its tokenizer from a seed and writes them to a folder (`make demo-model`).

Documents are packed into rows with their positions starting at 0 each and attention kept within each, so a
short prompt at inference looks exactly like training. The loss is mostly on the answers: the prompts are drawn
at random, and predicting random numbers teaches nothing. An answer of n tokens counts as the square root of n,
or the stories would drown the sums.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from corpus import BEGIN, END, PAD, documents
from mainspring.demo import MODEL_PATH
from tokenizer import SPECIAL_TOKENS, save_tokenizer, train_tokenizer

SEED = "1"
VOCAB_SIZE = 1024
CONTEXT_LENGTH = 4096
ROW_LENGTH = 384
ROWS_PER_STEP = 10
OPEN_ROWS = 16
STEPS = 4000
WARMUP_STEPS = 100
PEAK_RATE = 2e-3
FINAL_RATE = 2e-5
WEIGHT_DECAY = 0.1
PROMPT_WEIGHT = 0.02


class Row(NamedTuple):
    """Packed documents: tokens, each one's position in its document, and its weight in the loss as a target."""

    tokens: list[int]
    positions: list[int]
    weights: list[float]


class Batch(NamedTuple):
    """Rows as tensors of one shape."""

    tokens: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor


def _encoded(tokenizer: Tokenizer, seed: str) -> Iterator[Row]:
    """Each document as a row of its own; the begin token is given, never a target."""
    begin = SPECIAL_TOKENS.index(BEGIN)
    for document in documents(seed):
        tokens, weights = [begin], [0.0]
        for piece in document.pieces:
            ids = tokenizer.encode(piece.text, add_special_tokens=False).ids
            tokens += ids
            weights += [len(ids) ** -0.5 if piece.is_answer else PROMPT_WEIGHT] * len(ids)
        if len(tokens) <= ROW_LENGTH:
            yield Row(tokens, list(range(len(tokens))), weights)


def _packed(tokenizer: Tokenizer, seed: str) -> Iterator[Row]:
    """Rows of at most ROW_LENGTH, each document put in the fullest open row that still has room for it."""
    rows: list[Row] = []
    for document in _encoded(tokenizer, seed):
        fitting = [row for row in rows if len(row.tokens) + len(document.tokens) <= ROW_LENGTH]
        if fitting:
            row = max(fitting, key=lambda candidate: len(candidate.tokens))
        else:
            if len(rows) == OPEN_ROWS:
                rows.sort(key=lambda candidate: len(candidate.tokens))
                yield rows.pop()
            row = Row([], [], [])
            rows.append(row)
        row.tokens.extend(document.tokens)
        row.positions.extend(document.positions)
        row.weights.extend(document.weights)


def _batches(tokenizer: Tokenizer, seed: str) -> Iterator[Batch]:
    """Rows padded to ROW_LENGTH; the padding of a row is a document of its own, without loss."""
    pad = SPECIAL_TOKENS.index(PAD)
    rows = _packed(tokenizer, seed)
    while True:
        chosen = [next(rows) for _ in range(ROWS_PER_STEP)]
        gaps = [ROW_LENGTH - len(row.tokens) for row in chosen]
        yield Batch(
            torch.tensor([row.tokens + [pad] * gap for row, gap in zip(chosen, gaps, strict=True)]),
            torch.tensor([row.positions + list(range(gap)) for row, gap in zip(chosen, gaps, strict=True)]),
            torch.tensor([row.weights + [0.0] * gap for row, gap in zip(chosen, gaps, strict=True)]),
        )


def new_model() -> LlamaForCausalLM:
    """A Llama of 3.2 million parameters with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=CONTEXT_LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=SPECIAL_TOKENS.index(BEGIN),
            eos_token_id=SPECIAL_TOKENS.index(END),
            pad_token_id=SPECIAL_TOKENS.index(PAD),
        )
    )


def _rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to the final rate."""
    if step < WARMUP_STEPS:
        return PEAK_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return FINAL_RATE + (PEAK_RATE - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def _loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits
    targets, weights = batch.tokens[:, 1:].reshape(-1), batch.weights[:, 1:].reshape(-1)
    each = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB_SIZE).float(), targets, reduction="none")
    return (each * weights).sum() / weights.sum()


def train(tokenizer: Tokenizer, seed: str, steps: int) -> LlamaForCausalLM:
    """The trained model, in float32; prints its progress."""
    torch.manual_seed(int(seed))
    model = new_model()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters, {steps} steps", flush=True)
    batches, started, recent = _batches(tokenizer, seed), time.monotonic(), 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, steps)
        loss = _loss(model, next(batches))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent += loss.item()
        if (step + 1) % 50 == 0:
            elapsed = time.monotonic() - started
            left = elapsed / (step + 1) * (steps - step - 1)
            print(f"step {step + 1} loss {recent / 50:.4f} {elapsed:.0f} s, {left:.0f} s left", flush=True)
            recent = 0.0
    return model


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """The model folder as transformers and the engine read it, weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    )
    model.bfloat16().save_pretrained(folder)
    save_tokenizer(tokenizer, folder, CONTEXT_LENGTH)


def main() -> None:
    """Command line: train from the seed, for the full number of steps unless told otherwise."""
    parser = argparse.ArgumentParser(description="Train the demo model and its tokenizer from the seed.")
    parser.add_argument("--output", type=Path, default=MODEL_PATH, help="folder to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = train_tokenizer(SEED, VOCAB_SIZE)
    save(train(tokenizer, SEED, arguments.steps), tokenizer, arguments.output)
    print(f"wrote {arguments.output}", flush=True)


if __name__ == "__main__":
    main()
