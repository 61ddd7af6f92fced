"""The accuracy of quantized weights: the embedded model's perplexity on text that it was not trained on.

The text is held-out questions with their answers, each to be continued and as a chat, and stories of a new seed. The
bars are for all tokens; perplexities of the answers alone, which the model predicts almost with certainty, are also
shown.

    python benchmarks/quantized.py
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from random import Random

import torch
from tokenizers import Tokenizer

from bars import Bar, add_arguments, conclude
from demo_questions import ANIMALS, GIRLS, heldout_other, heldout_sums, long_story
from mainspring.core.model.learn.verify import Chunk, paged_logits
from mainspring.core.model.learn.whole_match import make_whole
from mainspring.core.model.load.loader import load_model
from mainspring.core.model.load.quantized import BITS
from mainspring.demo import MODEL_PATH
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.kernels.native.native_backend import NativeBackend
from report import table

LIMITS = {"int8": 0.005, "int8-dynamic": 0.01, "int4": 0.03}
AT_ONCE = 32  # texts in a step
BEGIN, END, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"


def texts(sums: int, others: int, stories: int) -> list[tuple[str, str]]:
    """Texts, each a given part and an answer."""
    questions = heldout_sums(sums) + heldout_other(others)
    rng = Random("held out")
    return [
        *((f"{BEGIN}{question.prompt}", f" {question.answer}{END}") for question in questions),
        *((f"{BEGIN}{USER}{question.prompt}{ASSISTANT}", f"{question.answer}{END}") for question in questions),
        *((BEGIN, long_story(rng, rng.choice(GIRLS), rng.choice(ANIMALS)) + END) for _ in range(stories)),
    ]


def losses(quantization: str | None, pairs: Sequence[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The negative logarithm of each token's probability, with bf16 activations, and whether the token is in an
    answer."""
    backend = NativeBackend()
    model = load_model(ModelConfig(model=str(MODEL_PATH)), LoadConfig(), torch.device("cpu"), backend=backend)
    make_whole(model, backend, BITS.get(quantization or ""))
    tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
    encoded = [[tokenizer.encode(part, add_special_tokens=False).ids for part in pair] for pair in pairs]
    found, of_answer = [], []
    for start in range(0, len(encoded), AT_ONCE):
        some = encoded[start : start + AT_ONCE]
        ids = [torch.tensor(given + answer) for given, answer in some]
        step = [Chunk(i, 0, len(sequence)) for i, sequence in enumerate(ids)]
        for (given, _), sequence, logits in zip(some, ids, paged_logits(model, ids, [step], backend), strict=True):
            scores = torch.log_softmax(logits[:-1].double(), dim=-1)
            found.append(-scores.gather(1, sequence[1:, None])[:, 0])
            of_answer.append(torch.arange(1, len(sequence)) >= len(given))
    return torch.cat(found), torch.cat(of_answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sums", type=int, default=500, help="held-out sums (default: %(default)s)")
    parser.add_argument("--others", type=int, default=200, help="other held-out questions (default: %(default)s)")
    parser.add_argument("--stories", type=int, default=100, help="long stories (default: %(default)s)")
    add_arguments(parser)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    pairs = texts(args.sums, args.others, args.stories)
    plain, of_answer = losses(None, pairs)

    def perplexity(loss: torch.Tensor) -> tuple[float, float]:
        return math.exp(loss.mean()), math.exp(loss[of_answer].mean())

    rows = [["bf16", *(f"{value:.4f}" for value in perplexity(plain)), "", ""]]
    bars = []
    for name, limit in LIMITS.items():
        loss, _ = losses(name, pairs)
        rise = [ours / before - 1 for ours, before in zip(perplexity(loss), perplexity(plain), strict=True)]
        rows.append([name, *(f"{value:.4f}" for value in perplexity(loss)), *(f"{value:+.2%}" for value in rise)])
        bars.append(Bar(f"{name}: perplexity rises by at most {limit:.1%}", f"{rise[0]:+.2%}", rise[0] <= limit))
    head = ["weights", "perplexity", "of answers", "rise", "of answers"]
    more = f"{table(head, rows)}\n\n{len(plain):,} tokens of {len(pairs):,} texts, {int(of_answer.sum()):,} of answers."
    return conclude(bars, {}, args, "performance.md", more)


if __name__ == "__main__":
    sys.exit(main())
