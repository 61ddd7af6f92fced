"""The messages of the wire protocol, encoded as msgpack arrays. New fields are only appended, and have defaults.

A message is sent as two or more ZeroMQ frames: a fixed header, the msgpack body, and one frame for each tensor that the
body refers to (codec.py). A frontend sends Hello, AddRequest, Abort, UtilityCall and Bye; StatusCall needs no Hello.
A core sends Ready or Refused, then Outputs, UtilityResult, Fault and Probe; also Status, and Bye.
"""

from typing import Annotated, Literal

import msgspec

from .config import EngineConfig

PROTOCOL_VERSION = 1
MAX_ABORTED = 65_536  # handles in one Abort
MAX_MEDIA_ITEMS = 4_096  # in one prompt
MAX_CORES = 64  # of a daemon

FinishReason = Literal["stop", "length", "abort", "error"]


class Tensor(msgspec.Struct, array_like=True, frozen=True):
    """A reference to an array that is sent in a frame of its own."""

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
    logprobs: int = -1  # number of likeliest tokens to report beside each token; -1: no log probabilities
    prompt_logprobs: int = -1  # likewise for the prompt's tokens, except the first
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] = []  # empty: all tokens
    bad_words: list[list[int]] = []  # token sequences that the output must not contain
    grammar: list[str] = []  # the form of the output as [kind, text], see ipc/structured.py; empty: free
    extra_args: bytes = b""  # for the classes of `logits_processors`: a msgpack map with names as keys; empty: none

    @property
    def is_penalised(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def looks_back(self) -> bool:
        """Whether the host must know all previous tokens before the next one can be chosen."""
        return bool(self.grammar) or any(len(words) > 1 for words in self.bad_words)


class Pooling(msgspec.Struct, array_like=True, frozen=True):
    """A request for pooled vectors of the prompt's hidden states instead of tokens."""

    task: str
    dimensions: int = 0  # number of leading dimensions of the vector to return; 0: all
    activate: bool | None = None  # normalise embeddings, apply softmax or sigmoid to scores; none: as the model has it
    second: int = 0  # index of the token at which the second text of a pair begins; 0: there is no second text


class Adapter(msgspec.Struct, array_like=True, frozen=True):
    """A LoRA or prompt adapter. Each frontend has its own adapter numbers."""

    number: int
    name: str
    path: str  # a folder on the core's machine
    num_virtual_tokens: int = 0  # of a prompt adapter


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """The first message of a frontend. It sends nothing else before the answer."""

    protocol_version: int
    token: bytes  # shared secret of an embedded core
    client_name: str
    weight: float = 1.0  # the frontend's weight in fair sharing
    session: bytes = b""  # 16 random bytes, kept over reconnections; a new Hello ends the session's older connection


class ModelFacts(msgspec.Struct, array_like=True, frozen=True):
    """Properties of the model that a frontend needs."""

    vocab_size: int
    hidden_size: int
    max_model_len: int
    dtype: str
    eos_token_ids: list[int] = []
    fingerprint: str = ""  # identifies the weights: cores with equal fingerprints give the same tokens
    files_digest: str = ""  # digest of the tokenizer's files, which the method "tokenizer_files" returns
    tasks: list[str] = []  # tasks of a pooling model; empty: the model generates
    media: list[str] = []  # what a prompt may have beside text: "image", "video", "audio"; or "text", for an encoder
    encoder_input: bool = False  # each prompt has one item, which an encoder reads and which has no tokens in it
    weights_lost: bool = False  # the core refuses requests until users send their weights again

    @property
    def lone_media(self) -> bool:
        """Whether a prompt is either a text or one item, as of a pooling model."""
        return bool(self.tasks and self.media)


class CorePlace(msgspec.Struct, array_like=True, frozen=True):
    """Where one of several cores listens: beside the core that sends this."""

    number: int
    place: str  # the name of its socket in the same folder, or its port on the same host


class Ready(msgspec.Struct, array_like=True, frozen=True):
    """The core accepts the frontend. A second Ready in the same epoch says that the model's facts or the list of cores
    have changed."""

    instance_id: bytes  # random per supervisor
    epoch: int  # grows at every core start
    model: ModelFacts
    config: bytes  # EngineConfig as the core completed it, in JSON
    capabilities: list[str] = []  # "admin": the frontend may change the engine for all frontends
    max_frame_bytes: int = 256 << 20  # that the frontend may send; a larger frame ends its connection
    number: int = 0  # of this core
    cores: list[CorePlace] = []  # all cores of the daemon that take requests, this one too; empty: it is the only one
    media: list[str] = []  # where its media workers listen, as in `CorePlace.place`; empty: there are none


class Refused(msgspec.Struct, array_like=True, frozen=True):
    """The core does not accept the frontend."""

    error: str  # name of the error type
    reason: str


class MediaItem(msgspec.Struct, array_like=True, frozen=True):
    """An image, a video or a sound in a prompt. A media worker sends its arrays to the core under the digest."""

    digest: bytes  # 16 bytes, of the content and of all that its preprocessing depends on
    modality: str  # of `ModelFacts.media`
    offset: int  # index in the prompt of its first placeholder
    length: int  # tokens up to its last placeholder, with what stands between them


class AddRequest(msgspec.Struct, array_like=True, frozen=True):
    """One completion to compute. A resumed request has its known output tokens in `output_token_ids`."""

    handle: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # chosen by the frontend, never reused in a connection
    request_id: str  # chosen by the user; for logs only
    prompt_token_ids: list[int]
    sampling: Sampling
    priority: int = 0
    output_token_ids: list[int] = []
    cache_salt: str = ""
    prompt_embeds: Tensor | None = None  # [prompt tokens, hidden]; prompt_token_ids then holds zeros
    age_s: float = 0.0  # seconds since it was first sent, so that a resumed request keeps its place in the queue
    resumed: bool = False  # whether it was sent before, to a previous core or over a lost connection
    pooling: Pooling | None = None  # asks for vectors instead of tokens; `sampling` is ignored then
    lora: Adapter | None = None
    prompt_adapter: Adapter | None = None
    patient: bool = False  # tokens are not needed before the request ends: one message may hold those of many steps
    moved_from: list[int] = []  # number and epoch of the core that had it before, if that was another one
    media: list[MediaItem] = []  # in the order of their offsets; prompt_token_ids then has placeholders


class Abort(msgspec.Struct, array_like=True, frozen=True):
    """End these requests. Each still ends with a finish reason; unknown handles are ignored."""

    handles: Annotated[list[int], msgspec.Meta(max_length=MAX_ABORTED)]


class UtilityCall(msgspec.Struct, array_like=True, frozen=True):
    """Call a method of the core's fixed table."""

    call_id: int
    method: str
    args: msgspec.Raw = msgspec.Raw(b"\x90")  # msgpack array
    tensors: list[Tensor] = []  # more arguments


class Bye(msgspec.Struct, array_like=True, frozen=True):
    """The sender leaves. The receiver forgets its session, requests and calls."""

    reason: str = ""


class Started(msgspec.Struct, array_like=True, frozen=True):
    """Sent once per request, with its first token."""

    handle: int
    queued_s: float  # seconds from arrival at the core to the first step
    first_token_s: float  # seconds from that step's scheduling to the token
    num_cached_tokens: int  # prompt tokens found in the prefix cache


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """Sent once per request, at its end, with or without a token."""

    handle: int
    reason: FinishReason
    stop_token: int | None = None  # the stop token that ended it
    num_preemptions: int = 0
    error: str = ""  # name of the error type, for reason "error"
    error_text: str = ""


class Stats(msgspec.Struct, array_like=True, frozen=True):
    """State of the core after a step. Counters start at 0 when the core starts."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of blocks in use
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # those of `prefix_queries` that were found
    num_preemptions: int = 0
    num_steps: int = 0
    chunked_prefills: int = 0  # prompt chunks that left their prompt unfinished
    mixed_steps: int = 0  # steps with both prefill and decode
    prompt_tokens: int = 0  # computed
    generation_tokens: int = 0
    frontends_connected: int = 0
    epoch: int = 1
    requests_recovered: int = 0  # requests resumed with output tokens of a previous core or a lost connection
    requests_quarantined: int = 0  # requests refused because cores died of them; of all cores of the supervisor
    malformed_frames: int = 0
    draft_tokens: int = 0  # speculative tokens that the model checked
    accepted_tokens: int = 0  # those of `draft_tokens` that the model accepted
    sleep_level: int = 0
    host_hits: int = 0  # prompt tokens of `prefix_hits` that were in host memory
    running_loras: list[str] = []  # names
    waiting_loras: list[str] = []
    core: int = 0  # number of the core
    encoder_queries: int = 0  # media items that requests named
    encoder_hits: int = 0  # those of `encoder_queries` that were encoded already
    encoded_items: int = 0
    encoder_seconds: float = 0.0  # that encoding took
    encoder_bytes: int = 0  # of memory for what is encoded


class Pooled(msgspec.Struct, array_like=True, frozen=True):
    """The vectors of a pooling request. The request ends with them."""

    handle: int
    shape: list[int]
    values: bytes  # float32, little-endian


class Routed(msgspec.Struct, array_like=True, frozen=True):
    """The experts that computed some tokens, from a core with `enable_return_routed_experts`: rows of request
    `handles[i]` for its tokens from index `starts[i]` on (prompt and output), `counts[i]` of them, one after another.

    The rows of a request come in order. A core that computes its tokens again, because the request was sent again,
    sends all its rows again."""

    handles: list[int]
    starts: list[int]
    counts: list[int]
    shape: list[int]  # of a row: layers of the model, experts of a token; zeros for a layer without experts
    dtype: str  # numpy name: "uint8" or "uint16"
    experts: bytes  # little-endian: [sum of counts, layers, experts of a token]


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of some tokens in fp32, computed from the model's unchanged logits. Each row has the token
    itself, then the likeliest tokens in descending order. Arrays are sent as little-endian bytes: ``[rows, width]``,
    and ``[rows]`` for ranks."""

    width: int
    token_ids: bytes  # int32
    logprobs: bytes  # float32
    ranks: bytes  # int32, rank of each row's first token; 1 is the likeliest
    rows: list[int] = []  # for output tokens: the index of each row's token in `Outputs.token_ids`
    handle: int = -1  # for prompt tokens: the request; -1: the rows are output tokens
    start: int = 0  # for prompt tokens: the position of the first row in the prompt


class Outputs(msgspec.Struct, array_like=True, frozen=True):
    """The results of steps for one frontend, in columns: token `token_ids[i]` belongs to request `handles[i]`.

    The handle of a request with several tokens occurs several times, in order."""

    handles: list[int]
    token_ids: list[int]
    started: list[Started] = []
    finished: list[Finished] = []
    stats: Stats | None = None
    logprobs: list[Logprobs] = []
    pooled: list[Pooled] = []
    routed: Routed | None = None


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
    """An empty message that the core sends to detect lost connections. The receiver ignores it."""


class StatusCall(msgspec.Struct, array_like=True, frozen=True):
    """Ask for the core's status. The core answers without a Hello, and also while the model loads."""

    token: bytes = b""


class FrontendStatus(msgspec.Struct, frozen=True):
    """One frontend, as a status shows it."""

    id: int
    name: str
    weight: float
    num_running: int = 0
    num_waiting: int = 0
    tokens_in_flight: int = 0  # sum of the largest lengths (prompt and output) of its requests
    generation_tokens: int = 0
    slow: bool = False  # it does not read its messages, so nothing is computed for it


class Latency(msgspec.Struct, frozen=True):
    """Percentiles of the latest observations, in seconds; zeros if there are none."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0


class CoreStatus(msgspec.Struct, frozen=True):
    """The status of a core. Its structs are encoded as maps, because people and scripts read them."""

    epoch: int
    core_pid: int
    supervisor_pid: int
    phase: str
    model: str = ""
    restarts: int = 0
    last_crash: str = ""
    uptime_s: float = 0.0
    num_blocks: int = 0
    tokens_per_s: float = 0.0  # generated tokens per second, averaged over the last seconds
    time_to_first_token: Latency = Latency()
    inter_token_latency: Latency = Latency()
    stats: Stats = Stats()
    frontends: list[FrontendStatus] = []
    malformed_frames: int = 0
    core: int = 0  # its number
    cores: list[CorePlace] = []  # as in `Ready`
    failed_start: str = ""  # when and why the last core that was added did not start


class Distribution(msgspec.Struct, array_like=True, frozen=True):
    """A histogram of observations."""

    name: str
    bounds: list[float]  # inclusive upper bounds of the buckets, ascending
    counts: list[int]  # observations per bucket; the last count is of those above all bounds
    sum: float = 0.0


class Measured(msgspec.Struct, array_like=True, frozen=True):
    """Counters and histograms of requests since the core's start."""

    prompt_tokens: int = 0  # of requests that have produced a token
    generation_tokens: int = 0
    ended: list[int] = []  # ended requests by finish reason: stop, length, abort, error
    distributions: list[Distribution] = []


class Status(msgspec.Struct, array_like=True, frozen=True):
    """Answer to a `StatusCall`."""

    core: CoreStatus
    measured: Measured = Measured()


class StartReport(msgspec.Struct, array_like=True, frozen=True):
    """The first message of a starting core to its supervisor, over a pipe. `error` is empty if the core is ready."""

    error: str = ""
    error_text: str = ""
    config: EngineConfig | None = None  # as the core completed it; the next core starts with it
    decisions: msgspec.Raw = msgspec.Raw(b"\xc0")  # the worker's `Decisions`; the next core reuses them
    media: list[str] = []  # of the model, as in `ModelFacts`


class HeldAdapter(msgspec.Struct, array_like=True, frozen=True):
    """A LoRA adapter that a frontend asked a core to keep."""

    owner: bytes  # the frontend's session
    adapter: Adapter
    pinned: bool = False


class DesiredState(msgspec.Struct, array_like=True, frozen=True):
    """The later messages of a core to its supervisor: the state that users have set, for the next core."""

    paused: bool = False
    asleep: list[str] = []  # some of "scheduling", "weights" and "kv_cache"
    sleep_level: int = 0
    weights_version: str | None = None  # of the weights that users have sent; None: the checkpoint's weights
    fingerprint: str = ""  # of the model with these weights
    adapters: list[HeldAdapter] = []
    weights_label: str = "default"  # what users call the weights that are served, or served last
    num_cores: int | None = None  # an order, in one message: cores that the daemon is to have; None: no order


class Listening(msgspec.Struct, array_like=True, frozen=True):
    """A core of a group, and where it listens."""

    number: int
    address: str
    admin_address: str = ""


class News(msgspec.Struct, array_like=True, frozen=True):
    """What a supervisor tells a core of a group while it runs, over a pipe."""

    number: int  # counts the messages to this core
    cores: list[Listening] = []  # those that take requests
    over: dict[int, int] = {}  # number of a core → last epoch that has ended and whose suspects are known
    suspects: dict[int, int] = {}  # further suspects: key → position, see `CoreLaunch`
    harmless: list[int] = []  # keys of earlier suspects
    quarantined: dict[int, str] = {}  # further ones: key → reason
    failed_start: str = ""  # as in `CoreStatus`


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
