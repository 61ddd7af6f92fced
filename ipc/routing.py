"""Which of several cores gets a request."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from hashlib import blake2b

from .errors import InvalidRequestError, shown
from .messages import AddRequest

PREFIX_TOKENS = 512  # most tokens at the beginning of a prompt that name its conversation
BOUND = 1.25  # the load that a core may have, as a multiple of the mean


def prefix_of(request: AddRequest) -> bytes:
    """A name of the beginning of the prompt: requests with the same one find each other's prefix in the cache. All
    that keeps two prompts from sharing cached blocks is part of it.

    The beginning has a power of two of tokens, so that the name of a conversation changes rarely while it is short.
    """
    if request.prompt_embeds is not None:  # its token ids are zeros
        return request.handle.to_bytes(8, "big")
    length = min(PREFIX_TOKENS, 1 << max(0, len(request.prompt_token_ids).bit_length() - 1))
    tokens = array("q", request.prompt_token_ids[:length])
    adapters = [one.name for one in (request.lora, request.prompt_adapter) if one is not None]
    return tokens.tobytes() + "\0".join([request.cache_salt, *adapters]).encode()


def choose(prefix: bytes, cost: int, loads: Mapping[int, int]) -> int:
    """The core for a request, by rendezvous hashing with bounded loads: each prefix has an order of the cores, the same
    in all frontends, and the request goes to the first core that would not be loaded too far above the mean. A core
    more or less changes the place of that core's share of the prefixes only.

    Args:
        cost: tokens that the request may take.
        loads: number of each core → tokens in flight there.
    """
    if len(loads) == 1:
        return next(iter(loads))
    name = blake2b(prefix, digest_size=16).digest()
    order = sorted(loads, key=lambda number: blake2b(name + number.to_bytes(4, "big"), digest_size=8).digest())
    most = BOUND * (sum(loads.values()) + cost) / len(loads)
    return next((number for number in order if loads[number] + cost <= most), min(order, key=loads.__getitem__))


def check_rank(rank: int | None, numbers: Collection[int]) -> None:
    """Raise `InvalidRequestError` if a request is to go to a core that does not exist."""
    if rank is not None and (type(rank) is not int or rank not in numbers):
        raise InvalidRequestError(
            f"data_parallel_rank is {shown(rank)}; the cores have the numbers {', '.join(map(str, sorted(numbers)))}"
        )
