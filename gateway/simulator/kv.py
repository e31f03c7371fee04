"""The KV cache as counted blocks, with an optional prefix cache.

Owns which blocks are in use, which are cached and idle, and which are free. Promises that used blocks never pass the
total, and that a block is given back exactly once. A block is either private (None) or named by the hash of the whole
prompt up to its end, so that equal prefixes share it. Talks to the engine only; no clock, no I/O.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq

BlockName = int | None


def prefix_hashes(tokens: Seq[int], block_size: int, salt: int) -> list[int]:
    """Name of each full block of `tokens`: a chain, so that a name says everything before it too."""
    names: list[int] = []
    previous = salt
    for start in range(0, len(tokens) - block_size + 1, block_size):
        previous = hash((previous, *tokens[start : start + block_size]))
        names.append(previous)
    return names


class BlockPool:
    """All blocks of one engine. Callers hold a list of block names and give it back whole."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._private = 0
        self._shared: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks that some sequence holds."""
        return self._private + len(self._shared)

    @property
    def free(self) -> int:
        """Blocks that can be handed out, cached idle ones included."""
        return self.num_blocks - self.used

    def grow(self, held: list[BlockName], tokens: int) -> bool:
        """Extend `held` until it covers `tokens`; False (and nothing changed) when too few blocks are free."""
        missing = -(-tokens // self.block_size) - len(held)
        if missing > self.free:
            return False
        for _ in range(missing):
            self._private += 1
            held.append(None)
        self._evict()
        return True

    def cached_prefix(self, names: Seq[int]) -> int:
        """How many leading blocks of `names` are in the cache."""
        for index, name in enumerate(names):
            if name not in self._shared and name not in self._idle:
                return index
        return len(names)

    def take_cached(self, held: list[BlockName], names: Seq[int]) -> None:
        """Hold the cached blocks `names`; the caller has checked that they are cached."""
        for name in names:
            self._idle.pop(name, None)
            self._shared[name] = self._shared.get(name, 0) + 1
            held.append(name)

    def publish(self, held: list[BlockName], names: Seq[int]) -> None:
        """Make the first `len(names)` private blocks of `held` findable under their names."""
        for index, name in enumerate(names):
            if held[index] is not None:
                continue
            self._private -= 1
            self._idle.pop(name, None)
            self._shared[name] = self._shared.get(name, 0) + 1
            held[index] = name

    def release(self, held: list[BlockName]) -> None:
        """Give every block back; named ones stay cached until room is needed. The last block becomes idle first."""
        for name in reversed(held):
            if name is None:
                self._private -= 1
                continue
            self._shared[name] -= 1
            if not self._shared[name]:
                del self._shared[name]
                self._idle[name] = None
        held.clear()

    def _evict(self) -> None:
        while self._idle and self.used + len(self._idle) > self.num_blocks:
            self._idle.popitem(last=False)
