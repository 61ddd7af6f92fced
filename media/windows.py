"""Where a sound is cut that is too long for an encoder."""

from __future__ import annotations

import numpy as np

_SEARCHED_SECONDS = 1.0  # at the end of a window, where a quiet place is looked for
_FRAMES_PER_SECOND = 10  # of which the quietest is chosen


def window_ends(samples: np.ndarray, most: int, rate: int) -> list[int]:
    """Where each window of a sound ends. All but the last end in the middle of the quietest tenth of their last second,
    so that few words are cut.

    Args:
        samples: float32 ``[samples]``, at least one.
        most: samples of a window.
        rate: samples per second.
    """
    ends, size = list[int](), max(1, rate // _FRAMES_PER_SECOND)
    begin, searched = 0, min(int(_SEARCHED_SECONDS * rate), most // 2) // size * size
    while len(samples) - begin > most:
        end = begin + most
        if searched:
            frames = samples[end - searched : end].reshape(-1, size)
            end += int((frames**2).mean(axis=1).argmin()) * size + size // 2 - searched
        ends.append(end)
        begin = end
    return [*ends, len(samples)]
