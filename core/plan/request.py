"""One request as the core sees it: token ids in, a reason to end. No text."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from ...ipc.messages import Adapter, AddRequest, Sampling
from .step import NewSequence

MOST_LOGPROBS = 32  # of a request that speculates: a step brings several times as many of them


class LoRAName(NamedTuple):
    """A request's adapter."""

    digest: bytes  # of its content
    adapter: Adapter


class Request:
    """The per-request state that is not kept in the scheduler's arrays. While the request runs, its tokens and counters
    are in these arrays at `slot`; `tokens` is the copy for the time it waits.

    Args:
        arrival: monotonic seconds.
        key: names it under every core, see `request_key`.
        salt: at most 64 bytes; only requests of one salt share cached prefixes.
        functions: numbers of the user's functions that change its logits, see control.py.
    """

    # many may wait: a fifth of the memory
    __slots__ = tuple(
        (
            "admitted_at arrival branch digests embeds finished first_token_at frontend functions grammar handle hold "
            "keeps_rows key lora lora_name lora_number lora_place max_len num_cached_blocks num_cached_tokens "
            "num_preemptions num_virtual pending pooling priority prompt_len queued room root sampling seq slot "
            "started stop_tokens tables tokens told"
        ).split()
    )

    def __init__(
        self,
        message: AddRequest,
        frontend: int,
        arrival: float,
        max_model_len: int,
        embeds: np.ndarray | None = None,
        key: int = 0,
        salt: bytes = b"",
        functions: tuple[int, ...] = (),
    ) -> None:
        self.frontend = frontend
        self.handle = message.handle
        self.key = key
        self.pooling = message.pooling
        self.keeps_rows = False  # of a prompt that is pooled all hidden states are needed
        self.sampling: Sampling = Sampling(1) if message.pooling else message.sampling
        self.priority = message.priority
        self.arrival = arrival
        self.admitted_at: float | None = None  # first time
        self.first_token_at: float | None = None  # if this core computed it
        adapter = message.prompt_adapter
        self.num_virtual = 0 if adapter is None else adapter.num_virtual_tokens  # tokens before the prompt's own
        self.prompt_len = self.num_virtual + len(message.prompt_token_ids)
        self.max_len = min(self.prompt_len + self.sampling.max_tokens, max_model_len)  # tokens it may come to
        tokens = [0] * self.num_virtual + message.prompt_token_ids + message.output_token_ids
        self.tokens = np.array(tokens, dtype=np.int32)
        self.stop_tokens = frozenset(self.sampling.stop_token_ids)
        self.embeds = embeds  # of the prompt, or of its first tokens: [tokens, hidden], uint16 for bfloat16
        self.functions = functions
        self.grammar = 0  # the number of its grammar, if it has one
        # prompt tokens whose log probabilities were told, or are not asked for; the first one has none
        wanted = self.sampling.prompt_logprobs >= 0 and not message.output_token_ids
        self.told = self.num_virtual + 1 if wanted else self.prompt_len
        self.pending = 0  # what it waits for before it is queued
        self.lora_name = "" if message.lora is None else message.lora.name
        self.lora: LoRAName | None = None  # once it is known
        self.lora_number = self.lora_place = 0  # while it runs with an adapter, see adapter_slots.py
        self.slot = -1  # while running
        self.seq = 0  # order of arrival, given when it is queued
        self.started = bool(message.output_token_ids)  # a token of it was sent
        self.finished = False
        self.queued = False  # waits in its frontend's queue
        self.room = self.hold = 0  # as far as known: free blocks to admit it, blocks that it will hold
        self.tables: list[list[int]] = []  # one a KV group
        self.digests: list[bytes] = []  # of the prefixes that end with each full block
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_cached_blocks = 0  # when it was looked up last
        self.branch = 0  # then: tokens whose keys and values are cached, whether or not recurrent state is, too
        # What else than tokens the keys and values depend on is hashed into the root of the chain. Each hash has a
        # domain of its own: no salt can be made that leads into another one's chain.
        self.root = hashlib.blake2b(message.cache_salt.encode(), digest_size=16, key=salt, person=b"root").digest()
        if embeds is not None:
            content = np.ascontiguousarray(embeds).tobytes()
            self.root = hashlib.blake2b(self.root + content, digest_size=16, person=b"embeds").digest()

    def use_lora(self, lora: LoRAName) -> None:
        """Run with an adapter; said before it is queued, as `use_virtual_tokens`."""
        self.lora = lora
        self.root = hashlib.blake2b(self.root + lora.digest, digest_size=16, person=b"lora").digest()

    def use_virtual_tokens(self, embeds: np.ndarray, digest: bytes) -> None:
        """Embeddings fp32 ``[num_virtual, hidden]`` of the tokens before the prompt's own."""
        self.embeds = embeds
        self.root = hashlib.blake2b(self.root + digest, digest_size=16, person=b"virtual").digest()

    @property
    def has_begun(self) -> bool:
        """Whether it has run, under this core or one before."""
        return self.admitted_at is not None or self.started

    @property
    def looks_back(self) -> bool:
        """Whether its next token can only be chosen when the host knows the one before."""
        return bool(self.functions) or self.sampling.looks_back

    @property
    def may_speculate(self) -> bool:
        """Whether several of its tokens can be chosen at once: what changes its logits must not depend on the tokens
        before, and the prompt must be tokens."""
        stateless = not (self.looks_back or self.sampling.is_penalised or self.embeds is not None)
        return stateless and self.sampling.logprobs <= MOST_LOGPROBS

    def sequence(self) -> NewSequence:
        """What a worker must know of it, when it gets its slot."""
        return NewSequence(
            self.slot,
            self.tokens,
            self.prompt_len,
            self.sampling,
            self.num_virtual,
            self.embeds,
            self.lora_number,
            self.lora_place,
            self.grammar,
            self.functions,
            self.may_speculate,
            self.pooling,
            self.keeps_rows,
        )

    @property
    def most_cached(self) -> int:
        """Tokens that may come out of the prefix cache: at least one is to be computed, and all whose logits or hidden
        states are asked for."""
        if self.keeps_rows:
            return 0
        return min(len(self.tokens), self.told if self.told < self.prompt_len else len(self.tokens)) - 1

    def extend_digests(self, tokens: np.ndarray, num_tokens: int, block_size: int) -> None:
        """Hash the blocks that `tokens[:num_tokens]` fills and that are not hashed yet."""
        for start in range(len(self.digests) * block_size, num_tokens - block_size + 1, block_size):
            parent = self.digests[-1] if self.digests else self.root
            block = np.ascontiguousarray(tokens[start : start + block_size]).tobytes()
            self.digests.append(hashlib.blake2b(parent + block, digest_size=16).digest())
