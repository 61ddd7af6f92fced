"""A request in the core, in token ids; the core has no text."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...ipc.messages import Adapter, AddRequest, MediaItem, Sampling
from .step import NewSequence, SequenceMedia

MOST_LOGPROBS = 32  # per token, where one result may have several tokens of a request: that bounds its size


class LoRAName(NamedTuple):
    """A request's adapter."""

    digest: bytes  # of its content
    adapter: Adapter


class Request:
    """The per-request state that is not kept in the scheduler's arrays. While the request runs, its tokens and counters
    are in these arrays at `slot`; `tokens` is the copy for the time it waits.

    Args:
        arrival: monotonic seconds.
        key: identifies the request also after a restart of the core, see `request_key`.
        salt: at most 64 bytes; only requests with the same salt share cached prefixes.
        functions: numbers of the user's functions that change the request's logits, see control.py.
    """

    # `__slots__` saves four fifths of a request's memory, and many requests may wait.
    __slots__ = tuple(
        (
            "admitted_at arrival branch digests embeds encoded finished first_token_at frontend functions grammar "
            "handle hold home keeps_rows key lora lora_name lora_number lora_place max_len media num_cached_blocks "
            "num_cached_tokens num_preemptions num_routed num_scored num_virtual patient pending pooling priority "
            "processed prompt_len queued room root sampling seq slot spans started stop_tokens tables timed tokens"
        ).split()
    )

    def __init__(
        self,
        message: AddRequest,
        frontend: int,
        arrival: float,
        max_model_len: int,
        key: int = 0,
        salt: bytes = b"",
        functions: tuple[int, ...] = (),
    ) -> None:
        self.frontend = frontend
        self.handle = message.handle
        self.key = key
        self.pooling = message.pooling
        self.keeps_rows = False  # whether pooling needs the hidden states of all prompt tokens
        self.sampling: Sampling = Sampling(1) if message.pooling else message.sampling
        self.priority = message.priority
        self.patient = message.patient  # its tokens may come several at a time
        self.arrival = arrival
        self.timed = True  # whether its latencies are counted; not if its client stated an unlikely age
        self.admitted_at: float | None = None  # when it was admitted first
        self.first_token_at: float | None = None  # None also if a previous core computed the first token
        adapter = message.prompt_adapter
        self.num_virtual = 0 if adapter is None else adapter.num_virtual_tokens  # virtual tokens before the prompt
        self.prompt_len = self.num_virtual + len(message.prompt_token_ids)
        self.max_len = min(self.prompt_len + self.sampling.max_tokens, max_model_len)  # prompt and output, at most
        tokens = [0] * self.num_virtual + message.prompt_token_ids + message.output_token_ids
        self.tokens = np.array(tokens, dtype=np.int32)
        self.stop_tokens = frozenset(self.sampling.stop_token_ids)
        # of the prompt, or of its first tokens: [tokens, hidden], uint16 for bfloat16
        self.embeds: np.ndarray | None = None
        self.media: Sequence[MediaItem] = ()  # of the prompt, in order
        self.encoded: tuple[SequenceMedia, ...] = ()  # the same for the worker; set when it gets a slot
        self.spans: Sequence[tuple[int, int]] = ()  # first token and end of what one step has to compute
        self.functions = functions
        self.processed = False  # whether the classes of logits processors see its logits
        self.grammar = 0  # the number of its grammar; 0: none
        # Prompt tokens whose log probabilities were sent or are not wanted. The first prompt token has none.
        wanted = self.sampling.prompt_logprobs >= 0 and not message.output_token_ids
        self.num_scored = self.num_virtual + 1 if wanted else self.prompt_len
        self.num_routed = self.num_virtual  # tokens whose experts were sent, or that are virtual
        self.pending = 0  # grammars and adapters that must be ready before the request is queued
        self.lora_name = "" if message.lora is None else message.lora.name
        self.lora: LoRAName | None = None  # set when the adapter has been read
        self.lora_number = self.lora_place = 0  # set while the request runs with an adapter, see adapter_slots.py
        self.slot = -1  # -1 unless the request runs
        self.home = 0  # the rank that keeps its keys and values, where each keeps those of its own requests
        self.seq = 0  # order of arrival, assigned when the request is added
        self.started = bool(message.output_token_ids)  # whether an output token was sent
        self.finished = False
        self.queued = False  # whether the request waits in its frontend's queue
        self.room = self.hold = 0  # latest estimates: free blocks needed to admit it, blocks that it will hold
        self.tables: list[list[int]] = []  # one block table per KV group
        self.digests: list[bytes] = []  # for each full block, the hash of the prefix that ends with it
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_cached_blocks = 0  # at the latest look-up in the prefix cache
        self.branch = 0  # at that look-up: tokens with cached keys and values, with or without recurrent state
        # Keys and values depend on more than the tokens. The salt, embeddings and adapter are hashed into the root of
        # the chain, each with a `person` of its own, so that no salt can be made to collide with another's chain.
        self.root = hashlib.blake2b(message.cache_salt.encode(), digest_size=16, key=salt, person=b"root").digest()

    def use_lora(self, lora: LoRAName) -> None:
        """Set the LoRA adapter. Must be called before the request is queued."""
        self.lora = lora
        self.root = hashlib.blake2b(self.root + lora.digest, digest_size=16, person=b"lora").digest()

    def use_embeds(self, embeds: np.ndarray, person: bytes, digest: bytes) -> None:
        """Set the embeddings of the prompt (person ``embeds``) or of the virtual tokens (``virtual``, fp32
        ``[num_virtual, hidden]``), with the digest of their content. Must be called before the request is queued."""
        self.embeds = embeds
        self.root = hashlib.blake2b(self.root + digest, digest_size=16, person=person).digest()

    def use_media(self, media: Sequence[MediaItem], spans: str) -> None:
        """Set the media items. Must be called before the request is queued. spans: see `MediaFacts`."""
        self.media = media
        if spans == "item":
            self.spans = [(one.offset, one.offset + one.length) for one in media]
        elif spans:  # keys and values of any token depend on the whole prompt, so none are looked up
            self.spans = [(0, self.prompt_len)]
            content = b"".join(one.digest for one in media)
            self.root = hashlib.blake2b(self.root + content, digest_size=16, person=b"media").digest()

    def cut_at_span(self, start: int, count: int) -> int:
        """How many of the next `count` tokens, from `start`, one step may compute so that it ends inside of no span;
        maybe 0."""
        for first, end in self.spans:
            if first < start + count < end:
                return max(0, first - start)
        return count

    @property
    def longest_span(self) -> int:
        return max((end - first for first, end in self.spans), default=0)

    def span_at(self, start: int) -> int:
        """Tokens of the span that begins at `start`; 0: none does."""
        return next((end - first for first, end in self.spans if first == start), 0)

    @property
    def has_begun(self) -> bool:
        """Whether the request has run in this core or a previous one."""
        return self.admitted_at is not None or self.started

    @property
    def wants_scores(self) -> bool:
        """Whether log probabilities of prompt tokens are still to be sent."""
        return self.num_scored < self.prompt_len

    @property
    def looks_back(self) -> bool:
        """Whether the host must know all previous tokens before the next one can be chosen."""
        return self.processed or bool(self.functions) or self.sampling.looks_back

    @property
    def is_plain(self) -> bool:
        """Whether the kernels alone can choose several tokens of the request, one after another: penalties and some log
        probabilities are a part of the choice, all other rules are the host's."""
        asked = self.sampling
        ruled = asked.logit_bias or asked.allowed_token_ids or asked.bad_words or asked.min_tokens
        return not (ruled or self.looks_back or self.pooling or asked.logprobs > MOST_LOGPROBS)

    @property
    def may_speculate(self) -> bool:
        """Whether one step may choose several tokens of the request. No rule for its logits may depend on previous
        tokens, and its prompt must be given as tokens."""
        stateless = not (self.looks_back or self.sampling.is_penalised or self.embeds is not None)
        return stateless and self.sampling.logprobs <= MOST_LOGPROBS

    def sequence(self) -> NewSequence:
        """The record that tells the worker about the request when it gets a slot."""
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
            self.encoded,
        )

    @property
    def most_cached(self) -> int:
        """The largest prefix-cache hit, in tokens. At least one token must be computed, and so must each token whose
        logits or hidden state the request needs."""
        if self.keeps_rows or (self.spans and self.spans[0] == (0, self.prompt_len)):
            return 0
        return min(len(self.tokens), self.num_scored if self.wants_scores else len(self.tokens)) - 1

    def extend_digests(self, tokens: np.ndarray, num_tokens: int, block_size: int) -> None:
        """Hash the blocks that `tokens[:num_tokens]` fills and that are not hashed yet."""
        for start in range(len(self.digests) * block_size, num_tokens - block_size + 1, block_size):
            parent = self.digests[-1] if self.digests else self.root
            block = np.ascontiguousarray(tokens[start : start + block_size]).tobytes()
            # Placeholders are equal for all items. Positions behind an item depend on it through the parent's name.
            within = b"".join(
                one.digest + (one.offset - start).to_bytes(8, "little", signed=True) + one.length.to_bytes(8, "little")
                for one in self.media
                if one.offset < start + block_size and start < one.offset + one.length
            )
            person = b"media" if within else b""
            self.digests.append(hashlib.blake2b(parent + block + within, digest_size=16, person=person).digest())
