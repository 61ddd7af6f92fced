"""A model as a checkpoint whose own code can fail inside a step, loaded by the daemon of chaos.py.

The package has no hook for failures. A checkpoint may contain code (`trust_remote_code`); this one's code fails once if
a file exists, or always for a certain prompt.
"""

from __future__ import annotations

import json
import shutil
import signal
import textwrap
from pathlib import Path

from mainspring import demo

MODEL = Path(demo.__file__).parent / "model"
POISON = [1, 2, 1, 2, 1]  # alternating begin and end of sequence: in no other prompt or output

_CODE = '''
import os
from pathlib import Path

import torch
from mainspring.core.worker.runner import ModelRunner
from transformers import {base}

ORDER = Path({order!r})
POISON = {poison}
SIGNAL = {signal}
forward = ModelRunner.forward


def claimed():
    """The order; "" if another core was faster."""
    own = ORDER.with_suffix(f".{{os.getpid()}}")
    try:
        ORDER.rename(own)
    except FileNotFoundError:
        return ""
    return own.read_text()


def obey(runner, slots, starts, counts, token_ids, rows):
    """Before each step: not by a hook of the model, with which it would not run as a whole."""
    if ORDER.exists() and (kind := claimed()):
        if kind == "allocation":
            torch.empty(1 << 60)
        raise RuntimeError("an exception in the step, as ordered")
    if SIGNAL and len(token_ids) >= len(POISON):
        windows = torch.tensor(token_ids).unfold(0, len(POISON), 1)
        if (windows == torch.tensor(POISON)).all(1).any():
            os.kill(os.getpid(), SIGNAL)
    return forward(runner, slots, starts, counts, token_ids, rows)


class SaboteurForCausalLM({base}):
    def __init__(self, config):
        super().__init__(config)
        ModelRunner.forward = obey
'''


class Saboteur:
    """A checkpoint in `folder`.

    Args:
        poison: the signal that kills a process that computes a prompt with `POISON` in it.
        model: the checkpoint to copy, of a class of transformers; by default the embedded model.
    """

    def __init__(self, folder: Path, poison: signal.Signals | None = None, model: Path = MODEL) -> None:
        self.checkpoint = folder / "saboteur"
        self._order = folder / "order"
        shutil.copytree(model, self.checkpoint)
        path = self.checkpoint / "config.json"
        config = json.loads(path.read_text())
        [base] = config["architectures"]
        config |= {
            "architectures": ["SaboteurForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "saboteur.SaboteurForCausalLM"},
        }
        path.write_text(json.dumps(config))
        code = _CODE.format(base=base, order=str(self._order), poison=POISON, signal=int(poison or 0))
        (self.checkpoint / "saboteur.py").write_text(textwrap.dedent(code))
        self.flags = ["--model", str(self.checkpoint), "--trust-remote-code"]
        self.env = {"HF_MODULES_CACHE": str(folder / "modules")}  # the folder to which transformers copies the code

    def order(self, kind: str) -> None:
        """Make the next step fail, by an "exception" or by a failed "allocation"."""
        written = self._order.with_suffix(".new")
        written.write_text(kind)
        written.rename(self._order)

    @property
    def obeyed(self) -> bool:
        return not self._order.exists()
