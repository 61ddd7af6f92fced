"""Vectors of tiny models by sentence-transformers, computed in a separate program, because sentence-transformers loads
scikit-learn, whose OpenMP prevents the native kernels from loading in the same process.

    python sentences.py FOLDER     # folders of models, and NAME.npz with what each makes of TEXTS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import pooled

TEXTS = ["The clock strikes twelve.", "Count the wheels: one, two, three.", "spring", "The spring is wound again. " * 4]
LONG = TEXTS[3] * 20
CASES = {  # name → architecture, pooling, width of a dense layer, normalised
    "bert mean": ("bert", "mean", 0, True),
    "bert cls": ("bert", "cls", 0, False),
    "distilbert max": ("distilbert", "max", 0, True),
    "roberta dense": ("roberta", "mean", 24, True),
    "qwen3 last": ("qwen3", "lasttoken", 0, True),
    "qwen3 mean": ("qwen3", "mean", 0, False),
}
CROSS = ("bert", "qwen3")


def main(folder: Path) -> None:
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import AutoModelForSequenceClassification

    for name, (architecture, mode, dense, normalize) in CASES.items():
        base = pooled.make(architecture, folder / f"{name} base", tokenizer=True)
        parts: list[Any] = [modules.Transformer(str(base)), modules.Pooling(64, mode)]
        parts += [modules.Dense(64, dense)] if dense else []
        parts += [modules.Normalize()] if normalize else []
        model = SentenceTransformer(modules=parts, device="cpu")
        model.save(str(folder / name))
        whole = model.encode(TEXTS, batch_size=1)
        np.savez(
            folder / f"{name}.npz",
            whole=whole,
            cut=model.encode(TEXTS, truncate_dim=16, normalize_embeddings=True, batch_size=1),
            long=model.encode([LONG]),
            similarity=model.similarity(whole[:1], whole)[0].numpy(),
        )
    for architecture in CROSS:
        path = folder / f"{architecture} cross"
        pooled.make(architecture, path, AutoModelForSequenceClassification, tokenizer=True, num_labels=1)
        cross = CrossEncoder(str(path), device="cpu")
        one_and_many = cross.predict([(TEXTS[0], text) for text in TEXTS[1:]], batch_size=1)
        pairs = cross.predict(list(zip(TEXTS[:2], TEXTS[2:], strict=True)), batch_size=1)
        np.savez(folder / f"{architecture} cross.npz", one_and_many=one_and_many, pairs=pairs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
