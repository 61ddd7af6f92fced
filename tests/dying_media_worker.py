"""A media worker that dies of some pictures: the real program, with a decoder that does what the first pixel says, and
with a processor that needs no transformers, so that it starts in a fraction of the time."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mainspring.ipc.errors import UnsupportedModelError
from mainspring.media import __main__ as program
from mainspring.media import preparer
from mainspring.media.processor import Expanded, Place, Way

SEGV, HANG, HOLD, GREEDY, SLOW = range(1, 6)  # red of the first pixel, if its green and blue are 7
decode = preparer.decode_image


def decode_or_die(what: str, data: bytes, limits: Any) -> Any:
    found = decode(what, data, limits)
    red, green, blue = found.getpixel((0, 0))
    if (green, blue) == (7, 7):
        if red == SEGV:
            signal.raise_signal(signal.SIGSEGV)  # in this thread, as a library's fault is: it does not go on
        elif red == HANG:
            time.sleep(600)
        elif red == HOLD:  # a library that keeps the interpreter's lock
            import ctypes

            ctypes.PyDLL(None).sleep(600)
        elif red == GREEDY:
            bytearray(64 << 30)
        elif red == SLOW:
            time.sleep(0.5)
    return found


class StandInProcessor:
    """Takes images, each of which is four tokens and one array."""

    PLACEHOLDER, TOKEN, ROWS = "<image>", 300, 4
    is_encoder_decoder, adds_special_tokens = False, True
    sampling_rate, window, settings = 16_000, None, b"stand-in"

    def __init__(self, folder: Path, trust_remote_code: bool = False) -> None: ...

    def has_place(self, modality: str) -> bool:
        return modality == "image"

    def place(self, modality: str) -> Place:
        if not self.has_place(modality):
            raise UnsupportedModelError(f"the checkpoint's processor takes no {modality} items")
        return Place(self.PLACEHOLDER, self.TOKEN, Way.ALONE, False)

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        pieces = re.findall(f"{self.PLACEHOLDER}|.", text, re.DOTALL)
        return [self.TOKEN if piece == self.PLACEHOLDER else ord(piece) % 256 for piece in pieces]

    def expand(self, modality: str, item: Any, kwargs: Any) -> Expanded:
        pixels = np.asarray(item.resize((56, 56)), np.float32).transpose(2, 0, 1)[None]
        return Expanded(self.PLACEHOLDER * self.ROWS, {"pixel_values": pixels})


def run() -> None:
    preparer.decode_image, preparer.Processor = decode_or_die, StandInProcessor  # type: ignore[misc, assignment]
    assert "transformers" not in sys.modules, "this process takes seconds to start"
    program.NICENESS = 0  # beside busy processes a nice one gets so little time that good pictures reach their limit
    program.main()
