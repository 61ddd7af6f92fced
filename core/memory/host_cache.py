"""The prefix cache's second tier: what a pool forgets is kept in host memory, and comes back when it is asked for.

Blocks have one such tier, and snapshots of recurrent state another, which copies between state slots and host memory.
"""

from __future__ import annotations

from collections import OrderedDict

from .block_pool import Key
from .updates import NO_COPIES, Copies

ON_HOST = -1  # in place of a block or a snapshot that was looked up: it is here, and has to be loaded


class HostCache:
    """Which prefix lies in which of `num_slots` host slots, and what the next step has to copy.

    A block is saved when the pool evicts it, for until the next step it still holds what it held, unless it is here
    already. What is loaded stays here too, so that it is not copied again when it is evicted once more. The least
    recently used goes first. Every operation is O(1), but for those that pass slots of which the next step loads.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._free = list(range(num_slots - 1, -1, -1))
        self._saves: dict[int, int] = {}  # slot → block
        self._loads: dict[int, int] = {}  # block → slot
        self._pinned: set[int] = set()  # slots that the next step loads from

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def pin(self, key: Key) -> int:
        """The slot of a prefix that is here; it stays as it is until the next step."""
        self._slots.move_to_end(key)
        self._pinned.add(slot := self._slots[key])
        return slot

    def load(self, slot: int, block: int) -> None:
        """Let the next step copy a pinned slot to `block`."""
        self._loads[block] = slot

    def evicted(self, block: int, key: Key) -> None:
        """The pool forgets `key`. Its block may not have been loaded yet."""
        self._loads.pop(block, None)
        if key in self._slots:
            self._slots.move_to_end(key)
        elif (slot := self._free.pop() if self._free else self._oldest()) is not None:
            self._slots[key] = slot
            self._saves[slot] = block

    def take_copies(self) -> Copies:
        """Those due since the last call, for the step that is being launched."""
        self._pinned.clear()
        if not (self._saves or self._loads):
            return NO_COPIES
        copies = Copies([(block, slot) for slot, block in self._saves.items()], list(self._loads.items()))
        self._saves, self._loads = {}, {}
        return copies

    def reset(self) -> None:
        """Forget everything. Not while a step is being made."""
        assert not self._loads, "what a request was given is not loaded yet"
        self._slots.clear()
        self._saves.clear()
        self._pinned.clear()
        self._free = list(range(self.num_slots - 1, -1, -1))

    def _oldest(self) -> int | None:
        """A slot to use anew, which loses its name; none if the next step loads from every one."""
        for key, slot in self._slots.items():
            if slot not in self._pinned:
                del self._slots[key]
                return slot
        return None
