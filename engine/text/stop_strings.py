"""Stop strings, found in text as it grows, however tokens cut it.

The match that ends first wins, and of matches with the same end the longest. So the result depends on the text alone,
not on how it is cut into tokens or chunks. Text that may be the beginning of a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Filters the text of one completion. `matched` is the stop string that was found; then no more text is pushed."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._firsts, self._longest = {stop[0] for stop in stops}, max(map(len, stops), default=0)
        self._held = ""  # the longest end of the text that begins a stop string
        self.matched: str | None = None

    def push(self, new: str, accept: bool = True) -> str:
        """Add text. Returns the text that can be shown. Without `accept`, a stop string that ends in it is ignored."""
        if not self._held and not any(first in new for first in self._firsts):
            return new  # it holds the beginning of no stop string
        text = self._held + new
        best: tuple[int, int] | None = None
        for stop in self._stops if accept and new else ():
            at = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best):
                best, self.matched = (at + len(stop), at), stop
        shown_before = len(self._held) if self._include else 0
        if best is not None:
            self._held = ""
            return text[shown_before : best[0] if self._include else best[1]]
        self._held = self._longest_beginning(text)
        return text[shown_before : len(text) if self._include else len(text) - len(self._held)]

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _longest_beginning(self, text: str) -> str:
        for at in range(max(0, len(text) - self._longest), len(text)):  # a place that fails is never tried again
            if text[at] in self._firsts:
                end = text[at:]
                if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stops):
                    return end
        return ""
