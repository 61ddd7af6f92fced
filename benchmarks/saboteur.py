"""The embedded model as a checkpoint whose own code can fail inside a step: what chaos.py has its daemon load.

The product has no hook for failing. A checkpoint may bring code (`trust_remote_code`), and this one's does as it is
told: by a file, once, or by a prompt, always.
"""

from __future__ import annotations

import json
import shutil
import signal
import textwrap
from pathlib import Path

from mainspring import demo

MODEL = Path(demo.__file__).parent / "model"
POISON = [1, 2, 1, 2, 1]  # begin and end of sequence in turn: no other prompt or output has that

_CODE = '''
import os
from pathlib import Path

import torch
from mainspring.core.worker.runner import ModelRunner
from transformers import LlamaForCausalLM

ORDER = Path({order!r})
POISON = {poison}
SIGNAL = {signal}
forward = ModelRunner.forward


def obey(runner, slots, starts, counts, token_ids, rows):
    """Before each step: not by a hook of the model, with which it would not run as a whole."""
    if ORDER.exists():
        kind = ORDER.read_text()
        ORDER.unlink()
        if kind == "allocation":
            torch.empty(1 << 60)
        raise RuntimeError("an exception in the step, as ordered")
    if SIGNAL and len(token_ids) >= len(POISON):
        windows = torch.tensor(token_ids).unfold(0, len(POISON), 1)
        if (windows == torch.tensor(POISON)).all(1).any():
            os.kill(os.getpid(), SIGNAL)
    return forward(runner, slots, starts, counts, token_ids, rows)


class SaboteurForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        ModelRunner.forward = obey
'''


class Saboteur:
    """A checkpoint in `folder`.

    Args:
        poison: the signal that ends whoever computes a prompt with `POISON` in it.
    """

    def __init__(self, folder: Path, poison: signal.Signals | None = None) -> None:
        self.checkpoint = folder / "saboteur"
        self._order = folder / "order"
        shutil.copytree(MODEL, self.checkpoint)
        path = self.checkpoint / "config.json"
        config = json.loads(path.read_text())
        config |= {
            "architectures": ["SaboteurForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "saboteur.SaboteurForCausalLM"},
        }
        path.write_text(json.dumps(config))
        code = _CODE.format(order=str(self._order), poison=POISON, signal=int(poison or 0))
        (self.checkpoint / "saboteur.py").write_text(textwrap.dedent(code))
        self.flags = ["--model", str(self.checkpoint), "--trust-remote-code"]
        self.env = {"HF_MODULES_CACHE": str(folder / "modules")}  # where transformers copies the code to

    def order(self, kind: str) -> None:
        """The next step fails: by an "exception", or by an "allocation" that can't be had."""
        written = self._order.with_suffix(".new")
        written.write_text(kind)
        written.rename(self._order)

    @property
    def obeyed(self) -> bool:
        return not self._order.exists()
