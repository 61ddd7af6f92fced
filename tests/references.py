"""Reference outputs of transformers for a checkpoint, computed once in a test run for all pytest workers."""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

folder: Path | None = None  # the folder of this run; conftest.py sets it


def greedy(path: Path, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    """The new tokens of each request (prompt, number of new tokens), as ``model.generate`` gives them in fp32.

    No end-of-sequence token ends an output. The result is stored under a digest of the checkpoint's files and of the
    requests.
    """
    assert folder is not None
    digest = hashlib.sha256(json.dumps(requests).encode())
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\0".encode() + content)
    stored = folder / f"{digest.hexdigest()}.json"
    with stored.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process that needs the same result waits for the first
        if not stored.exists():
            stored.write_text(json.dumps(_generate(path, requests)))
    return json.loads(stored.read_text())  # type: ignore[no-any-return]


def _generate(path: Path, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt, length in requests:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, pad_token_id=0
        )
        outputs.append(output[0, len(prompt) :].tolist())
    return outputs
