"""The messages on the wire: msgpack arrays, fields only ever appended, with defaults. No inheritance, no pickle.

A message travels as two or more ZeroMQ frames: a fixed header, the msgpack body, then one frame for each tensor the
body refers to (codec.py). Frontend to core: Hello, AddRequest, Abort, UtilityCall, Bye; StatusCall without a Hello.
Core to frontend: Ready or Refused, then Outputs, UtilityResult, Fault and Probe; Status; Bye.
"""

from typing import Annotated, Literal

import msgspec

from .config import EngineConfig

PROTOCOL_VERSION = 1

FinishReason = Literal["stop", "length", "abort", "error"]


class Tensor(msgspec.Struct, array_like=True, frozen=True):
    """An array that travels as its own frame: which one, and how to read it."""

    frame: int  # index among the tensor frames
    dtype: str  # numpy name, or "bfloat16"
    shape: list[int]


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """The part of the sampling parameters that the core needs. Text and stop strings never leave the frontend."""

    max_tokens: int
    seed: int = 0  # 64 bits, signed; fixed by the frontend before the first send
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []  # end-of-sequence tokens included, unless ignored
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = -1  # of each token, and so many of the likeliest ones; -1: none
    prompt_logprobs: int = -1  # likewise, of the prompt's tokens but the first
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []  # none: all
    bad_words: list[list[int]] = []  # sequences of tokens whose last one is never chosen after the others
    grammar: list[str] = []  # what the output has to be: kind and text, see ipc/structured.py

    @property
    def is_penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def looks_back(self) -> bool:
        """Whether its next token can only be chosen when the host knows the one before."""
        return bool(self.grammar) or any(len(words) > 1 for words in self.bad_words)


class Pooling(msgspec.Struct, array_like=True, frozen=True):
    """What a request wants of its prompt's hidden states, in place of tokens."""

    task: str
    dimensions: int = 0  # of the vector, the first ones; 0: all
    activate: bool | None = (
        None  # normalise an embedding, apply softmax or sigmoid to scores; none: as the model has it
    )
    second: int = 0  # where the second text of a pair begins; 0: there is none


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """What changes the model for one request. Its number belongs to the frontend that chose it."""

    number: int
    name: str
    path: str  # a folder on the core's machine
    num_virtual_tokens: int = 0  # of a prompt adapter


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """A frontend introduces itself. Nothing else is sent before the answer."""

    protocol_version: int
    token: bytes  # shared secret of an embedded core
    client_name: str
    weight: float = 1.0  # share of the core among frontends that compete
    session: bytes = b""  # 16 random bytes, kept over reconnections: what was under way under it is forgotten


class ModelFacts(msgspec.Struct, array_like=True, frozen=True):
    """What a frontend must know of the model."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: list[int] = []
    fingerprint: str = ""  # equal for cores that would give the same tokens
    files_digest: str = ""  # of the tokenizer's files, which the method "tokenizer_files" gives
    tasks: list[str] = []  # what it can be asked for; none: to generate


class Ready(msgspec.Struct, array_like=True, frozen=True):
    """The core accepts the frontend. Again in the same epoch: the model's facts have changed."""

    instance_id: bytes  # random per supervisor
    epoch: int  # grows at every core start
    model: ModelFacts
    config: bytes  # EngineConfig as the core filled it in, JSON
    capabilities: list[str] = []  # "admin": may change the engine for everyone


class Refused(msgspec.Struct, array_like=True, frozen=True):
    """The core does not accept the frontend."""

    error: str  # name of the error type
    reason: str


class AddRequest(msgspec.Struct, array_like=True, frozen=True):
    """One completion to compute. `output_token_ids` is empty but for a resumption: what was already sent."""

    handle: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # chosen by the frontend, never reused in a connection
    request_id: str  # the user's; for logs only
    prompt_token_ids: list[int]
    sampling: Sampling
    priority: int = 0
    output_token_ids: list[int] = []
    cache_salt: str = ""
    prompt_embeds: Tensor | None = None  # [prompt tokens, hidden]; prompt_token_ids then holds zeros
    age_s: float = 0.0  # seconds since it was first sent: a resumed request keeps its place
    resumed: bool = False  # sent before, to a core that is gone or over a connection that is
    pooling: Pooling | None = None  # in place of tokens; `sampling` is then of no use
    lora: Adapter | None = None
    prompt_adapter: Adapter | None = None
    patient: bool = False  # nobody looks at its tokens before it has ended: they may come several steps' at a time


class Abort(msgspec.Struct, array_like=True, frozen=True):
    """End these requests. Each still ends with a finish reason; unknown handles are ignored."""

    handles: list[int]


class UtilityCall(msgspec.Struct, array_like=True, frozen=True):
    """Call a method of the core's fixed table."""

    call_id: int
    method: str
    args: msgspec.Raw = msgspec.Raw(b"\x90")  # msgpack array
    tensors: list[Tensor] = []  # more arguments


class Bye(msgspec.Struct, array_like=True, frozen=True):
    """The sender is leaving; everything of its is to be forgotten."""

    reason: str = ""


class Started(msgspec.Struct, array_like=True, frozen=True):
    """Said once of a request, with its first token."""

    handle: int
    queued_s: float  # seconds from arrival at the core to the first step
    first_token_s: float  # seconds from that step's scheduling to the token
    num_cached_tokens: int  # prompt tokens found in the prefix cache


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """Said once of a request, with its last token or without one."""

    handle: int
    reason: FinishReason
    stop_token: int | None = None  # the stop token that ended it
    num_preemptions: int = 0
    error: str = ""  # name of the error type, for reason "error"
    error_text: str = ""


class Stats(msgspec.Struct, array_like=True, frozen=True):
    """State of the core after a step. Counters count from the core's start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of blocks in use
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of these, found
    num_preemptions: int = 0
    num_steps: int = 0
    chunked_prefills: int = 0  # steps' shares that left a prompt unfinished
    mixed_steps: int = 0  # steps with both a prompt's tokens and a decode
    prompt_tokens: int = 0  # computed
    generation_tokens: int = 0
    frontends_connected: int = 0
    epoch: int = 1
    requests_recovered: int = 0  # begun under a core that is gone or over a connection that is, and gone on with here
    requests_quarantined: int = 0  # refused, for cores died of them; under all cores of the supervisor
    malformed_frames: int = 0
    draft_tokens: int = 0  # guessed, to be checked by the model
    accepted_tokens: int = 0  # of these, what the model would have written
    sleep_level: int = 0
    host_hits: int = 0  # prompt tokens of `prefix_hits` that were in host memory
    running_loras: list[str] = []  # names
    waiting_loras: list[str] = []


class Pooled(msgspec.Struct, array_like=True, frozen=True):
    """What a pooling request brought. The request ends with it."""

    handle: int
    shape: list[int]
    values: bytes  # float32, little-endian


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of some tokens, in fp32, of the unchanged logits. Row by row: the token itself, then the
    likeliest ones in descending order. Arrays as bytes, little-endian, ``[rows, width]`` and for ranks ``[rows]``."""

    width: int
    token_ids: bytes  # int32
    logprobs: bytes  # float32
    ranks: bytes  # int32, of the first of each row: 1 if none is likelier
    rows: list[int] = []  # which of the outputs' tokens
    handle: int = -1  # of a prompt instead: whose
    start: int = 0  # and where in it the first row stands


class Outputs(msgspec.Struct, array_like=True, frozen=True):
    """All that a step brought one frontend, column-wise: token `token_ids[i]` belongs to request `handles[i]`.

    A request that got several tokens stands several times, in order."""

    handles: list[int]
    token_ids: list[int]
    started: list[Started] = []
    finished: list[Finished] = []
    stats: Stats | None = None
    logprobs: list[Logprobs] = []
    pooled: list[Pooled] = []


class UtilityResult(msgspec.Struct, array_like=True, frozen=True):
    """Answer to a `UtilityCall`."""

    call_id: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")  # msgpack value, nil on an error
    error: str = ""  # name of the error type, empty if it succeeded
    error_text: str = ""


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """A frame of this session was dropped."""

    error: str  # name of the error type
    error_text: str


class Probe(msgspec.Struct, array_like=True, frozen=True):
    """Nothing: sent to see whether somebody is there. To be ignored."""


class StatusCall(msgspec.Struct, array_like=True, frozen=True):
    """Ask how the core is. Answered without a Hello, and while the model loads."""

    token: bytes = b""


class FrontendStatus(msgspec.Struct, frozen=True):
    """One frontend, as a status shows it."""

    id: int
    name: str
    weight: float
    num_running: int = 0
    num_waiting: int = 0
    tokens_in_flight: int = 0  # most tokens, prompt and output, that its requests can come to
    generation_tokens: int = 0
    slow: bool = False  # does not read what it is sent, so nothing is computed for it


class Latency(msgspec.Struct, frozen=True):
    """Percentiles of the latest observations, in seconds; zeros without any."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class CoreStatus(msgspec.Struct, frozen=True):
    """How a core is. The one message encoded as maps, for people and scripts read it."""

    epoch: int
    core_pid: int
    supervisor_pid: int
    phase: str
    model: str = ""
    restarts: int = 0
    last_crash: str = ""
    uptime_s: float = 0.0
    num_blocks: int = 0
    tokens_per_s: float = 0.0  # generated, over the last seconds
    time_to_first_token: Latency = Latency()
    inter_token_latency: Latency = Latency()
    stats: Stats = Stats()
    frontends: list[FrontendStatus] = []
    malformed_frames: int = 0


class Distribution(msgspec.Struct, array_like=True, frozen=True):
    """Observations, counted by size."""

    name: str
    bounds: list[float]  # upper ones of the buckets, inclusive, ascending
    counts: list[int]  # one a bucket, and one for what is above the last bound
    sum: float = 0.0


class Measured(msgspec.Struct, array_like=True, frozen=True):
    """What was counted of requests since the core's start."""

    prompt_tokens: int = 0  # of requests that have brought a token
    generation_tokens: int = 0
    ended: list[int] = []  # requests, by finish reason: stop, length, abort, error
    distributions: list[Distribution] = []


class Status(msgspec.Struct, array_like=True, frozen=True):
    """Answer to a `StatusCall`."""

    core: CoreStatus
    measured: Measured = Measured()


class StartReport(msgspec.Struct, array_like=True, frozen=True):
    """A starting core's first line to its supervisor, over a pipe: empty error if it is ready."""

    error: str = ""
    error_text: str = ""
    config: EngineConfig | None = None  # as the core filled it in: the next start repeats it
    decisions: msgspec.Raw = msgspec.Raw(b"\xc0")  # of fusing: as well


class HeldAdapter(msgspec.Struct, array_like=True, frozen=True):
    """A LoRA adapter that a frontend asked a core to keep."""

    owner: bytes  # the frontend's session
    adapter: Adapter
    pinned: bool = False


class DesiredState(msgspec.Struct, array_like=True, frozen=True):
    """A core's further lines to its supervisor: what users have set, for the next core to begin with."""

    paused: bool = False
    asleep: list[str] = []  # of "scheduling", "weights" and "kv_cache"
    sleep_level: int = 0
    weights_version: str | None = None  # of weights that took the checkpoint's place
    fingerprint: str = ""  # of the model with these
    adapters: list[HeldAdapter] = []


# The kind byte in a header. Numbers are never reused.
KINDS: dict[int, type[msgspec.Struct]] = {
    1: Hello,
    2: Ready,
    3: Refused,
    4: AddRequest,
    5: Abort,
    6: UtilityCall,
    7: UtilityResult,
    8: Outputs,
    9: Bye,
    10: Fault,
    11: Probe,
    12: StatusCall,
    13: Status,
}
KIND_OF: dict[type[msgspec.Struct], int] = {cls: kind for kind, cls in KINDS.items()}
