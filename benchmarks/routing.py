"""Which part of the prompts do cores find in their prefix caches, depending on how frontends choose the core?

    python benchmarks/routing.py

A simulation without a model. Conversations of several turns begin with one of 200 system prompts, whose popularity is
Zipf's and whose lengths are 512 to 2,000 tokens; a turn brings 64 to 400 tokens. 4 frontends send turns at random to 8
cores. A frontend knows only the tokens in flight that it has sent itself. A core caches 192,000 tokens, the latest
ones. `mainspring` is `ipc/routing.py`; the two others take the cores in turn, or the one with the fewest tokens.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections import OrderedDict
from statistics import mean

from mainspring.ipc.messages import AddRequest, Sampling
from mainspring.ipc.routing import PREFIX_TOKENS, choose, prefix_of

CORES, FRONTENDS, BLOCK, CACHED = 8, 4, 64, 3000  # blocks of 64 tokens
NAMES = itertools.count(1 << 20)  # of blocks that no other conversation has


def simulate(policy: str, seed: int, turns: int) -> tuple[float, float]:
    """→ share of the prompt tokens that were found; work in flight of the busiest core, as a multiple of the mean."""
    rng = random.Random(seed)
    popular = [1 / (place + 1) for place in range(200)]
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(CORES)]
    work = [0.0] * CORES
    sent = [dict.fromkeys(range(CORES), 0) for _ in range(FRONTENDS)]
    ends: dict[int, list[tuple[int, int, int, int]]] = {}
    conversations: list[list[int]] = []
    found = total = 0
    busiest = []
    for turn in range(turns):
        for core, cost, frontend, tokens in ends.pop(turn, ()):
            work[core] -= cost
            sent[frontend][core] -= tokens
        if conversations and rng.random() < 0.7:
            blocks = rng.choice(conversations)
        else:
            [system] = rng.choices(range(200), popular)
            blocks = [1000 * system + place for place in range(8 + system % 24)]
            conversations = [*conversations[-399:], blocks]
        blocks += [next(NAMES) for _ in range(rng.randint(1, 6))]
        frontend, length = rng.randrange(FRONTENDS), len(blocks) * BLOCK
        loads = sent[frontend]
        if policy == "in turn":
            core = turn % CORES
        elif policy == "fewest tokens":
            core = min(loads, key=loads.__getitem__)
        else:
            prompt = [token for block in blocks[: PREFIX_TOKENS // BLOCK] for token in (block, *range(BLOCK - 1))]
            core = choose(prefix_of(AddRequest(0, "", prompt, Sampling(1))), length, loads)
        cache = caches[core]
        hits = next((place for place, block in enumerate(blocks) if block not in cache), len(blocks))
        found, total = found + hits, total + len(blocks)
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > CACHED:
            cache.popitem(last=False)
        cost = len(blocks) - hits + 20  # decoding costs as much as a prompt of 20 blocks
        work[core] += cost
        loads[core] += length
        ends.setdefault(turn + rng.randint(100, 400), []).append((core, cost, frontend, length))
        if turn > turns / 12:
            busiest.append(max(work) / mean(work))
    return found / total, mean(busiest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12_000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for policy in ("in turn", "fewest tokens", "mainspring"):
        shares, loads = zip(*(simulate(policy, seed, args.turns) for seed in range(args.seeds)), strict=True)
        print(
            f"{policy:14} prompt tokens found {mean(shares):.0%}, busiest core {mean(loads):.2f} of the mean",
            flush=True,
        )


if __name__ == "__main__":
    main()
