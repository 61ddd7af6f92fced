"""What crosses between planner and worker: a step's plan goes down, its result comes up.

Both are plain data: arrays and small records, which `codec.py` writes to bytes. Neither side changes what the other
made. A running request is known to the worker by its slot alone: the plan that gives it the slot describes it
(`NewSequence`), later plans name the slot, and one of them releases it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from ...ipc.messages import Logprobs, Pooling, Sampling
from ..memory.updates import NO_COPIES, NO_STATE_COPIES, Copies, StateCopies, TableUpdate

PROMPT_LOGITS = 64  # rows of a step with logits beside the sampling rows, if prompts may be cut; at least one a request
IN_FLIGHT = -1  # a token id: the token that the slot sampled last, which only the worker knows yet
MOST_GUESS_ROWS = 32  # tokens of a step up to which guesses fill it; more rows cost more time than they may save


class SequenceMedia(NamedTuple):
    """A media item of a sequence. See `MediaItem`."""

    number: int  # that `KeepMedia` gave it
    offset: int
    length: int


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A request that got its slot."""

    slot: int
    tokens: np.ndarray  # int32 [n]: virtual tokens as 0, the prompt, the output so far
    prompt_len: int  # tokens, virtual ones included
    sampling: Sampling
    num_virtual: int = 0  # tokens of a prompt adapter before the prompt's own
    embeds: np.ndarray | None = None  # of the first tokens: [tokens, hidden]; float32, float16, or uint16 for bfloat16
    adapter: int = 0  # number of its LoRA adapter, see control.py; 0: none
    adapter_place: int = 0  # its place among the adapters of running requests, from 1
    grammar: int = 0  # number of its compiled grammar; 0: none
    functions: tuple[int, ...] = ()  # numbers of the user's functions that change its logits
    speculates: bool = False  # a draft model follows it
    pooling: Pooling | None = None
    keeps_rows: bool = False  # the hidden states of all its tokens are pooled, not the last one's alone
    media: tuple[SequenceMedia, ...] = ()  # of the prompt, all of them encoded


class PromptPart(NamedTuple):
    """Consecutive rows of a step whose logits are also wanted, for the log probabilities of a prompt's next tokens."""

    slot: int
    start: int  # index in the sequence of the token that the first row's logits are about
    num_rows: int
    row: int  # the first one, counted in `StepPlan.token_ids`


NO_STOPS = np.zeros((0, 2), np.int32)
NO_ITEMS = np.zeros(0, np.int32)


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. Row ``r`` computes tokens ``starts[r] : starts[r] + counts[r]`` of the sequence at ``slots[r]``.

    With `num_steps` above 1 every row computes one token and samples, and the worker makes up to so many steps, each
    over the tokens that the step before sampled. No step follows one that brought a token of `stops`, nor does one
    begin while `Worker.interrupt` is set.
    """

    id: int
    slots: np.ndarray  # int32 [rows], no slot twice
    starts: np.ndarray  # int32 [rows]
    counts: np.ndarray  # int32 [rows], at least 1
    token_ids: np.ndarray  # int32 [sum of counts]; IN_FLIGHT: what was sampled last at this slot
    samples: np.ndarray  # bool [rows]: the row's last token brings logits, and one new token
    guessed: np.ndarray  # int32 [rows]: how many of the row's last tokens are guesses; each brings one token more
    admitted: list[NewSequence]  # sequences that got their slot since the plan before
    released: np.ndarray  # int32: slots that nobody has had since the plan before; admitted ones are not among them
    tables: TableUpdate
    scored: list[PromptPart]
    copies: Copies = NO_COPIES  # between pool and host memory, before anything is computed
    states: StateCopies = NO_STATE_COPIES  # between slots of recurrent state, before and after
    num_steps: int = 1
    apart: bool = False  # each of several steps has a result of its own; else all have one together
    ruled: bool = False  # each of several steps is chosen by the host, as some row is not `Request.is_plain`
    stops: np.ndarray = NO_STOPS  # int32 [n, 2]: a row, and a token that ends the row's request
    homes: np.ndarray = NO_ITEMS  # int32 [rows]: the rank that computes each, if ranks have requests of their own
    encodes: np.ndarray = NO_ITEMS  # int32: numbers of media items to encode, before anything else is computed

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size)

    def choices(self) -> tuple[np.ndarray, np.ndarray]:
        """Each token that the step chooses, in the order of their positions: the row it is for, and how many tokens
        before the end of that row its logits stand (both int64 ``[choices]``)."""
        rows = np.flatnonzero(self.samples)
        if not self.guessed.any():
            return rows, np.zeros_like(rows)
        each = self.guessed[rows] + 1
        ends = np.cumsum(each)
        return np.repeat(rows, each), np.repeat(ends, each) - 1 - np.arange(int(ends[-1]))


class Step(NamedTuple):
    """A plan, and what the planner alone keeps of the step: for the journal, and to take in the result."""

    plan: StepPlan
    keys: np.ndarray  # uint64 [rows + waiting], of the requests, and of those that wait for media it encodes
    output_index: np.ndarray  # int64 [rows + waiting]: index in its request's output of the next token to come
    solo: bool = False  # the one row, or the media item, is of a suspect


class Scores(NamedTuple):
    """Log probabilities of some rows: the token itself first, then the likeliest ones in descending order."""

    rows: np.ndarray  # int64 [n]: which of the step's choices, or of a prompt part's rows
    token_ids: np.ndarray  # int32 [n, 1 + k]
    logprobs: np.ndarray  # float32 [n, 1 + k]
    ranks: np.ndarray  # int32 [n], of the token itself: 1 if none is likelier

    def message(self, rows: list[int], handle: int = -1, start: int = 0) -> Logprobs:
        token_ids, logprobs, ranks = (a.tobytes() for a in (self.token_ids, self.logprobs, self.ranks))
        return Logprobs(self.token_ids.shape[1], token_ids, logprobs, ranks, rows, handle, start)

    def only(self, chosen: np.ndarray) -> Scores:
        """Some of the rows: bool ``[n]``, or their indices."""
        return Scores(*(column[chosen] for column in self))


class RowError(NamedTuple):
    """Why a row's request can't go on. Others are not affected."""

    row: int
    error: str  # the error type's name on the wire
    text: str


class Encoded(NamedTuple):
    """A media item that a step encoded, or could not encode."""

    number: int
    num_bytes: int  # of memory that its rows take until it is dropped
    error: str = ""  # the error type's name on the wire
    text: str = ""
    seconds: float = 0.0  # that encoding took, for statistics


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step brought, or several of one plan: then `tokens` has those of one step after those of another."""

    id: int  # of the plan
    computed: np.ndarray  # int32 [rows]: tokens computed
    tokens: np.ndarray  # int64 [choices], in the order of `StepPlan.choices`
    errors: list[RowError] = []
    complete: list[int] = []  # rows whose grammar allows no further token: the one chosen does not count
    logprobs: list[Scores] = []  # of the choices that ask for them
    prompt_logprobs: list[Scores] = []  # one for each of the plan's prompt parts
    pooled: list[np.ndarray] | None = None  # a pooling model's vectors: float32, one for each row that samples
    guesses: np.ndarray | None = None  # int32 [sum of guessed]: a draft model's; None: those of the plan
    lack: str = ""  # why the device found no memory; then nothing was computed
    experts: np.ndarray | None = None  # of each token, if wanted: uint8 or uint16 [tokens, layers, experts of a token]
    first: int = 0  # which of the plan's steps it begins with
    num_steps: int = 1  # that it is of
    more: bool = False  # another result of the plan follows
    encoded: list[Encoded] = []  # one for each of the plan's `encodes`


def with_guesses(plan: StepPlan, guesses: np.ndarray) -> np.ndarray:
    """The plan's token ids with other `guesses` (int32 ``[sum of guessed]``) in their places."""
    back = np.repeat(np.cumsum(plan.counts), plan.counts) - np.arange(plan.num_tokens)  # 1: the last of its row
    token_ids = plan.token_ids.copy()
    token_ids[back <= np.repeat(plan.guessed, plan.counts)] = guesses
    return token_ids
