"""The configuration: the type, default and doc of each field. CLI flags and the reference page are generated from it.

Users set the same fields in the flat `EngineArgs` (engine/args.py), which becomes one frozen `EngineConfig`. The core
fills in the values that it determines (`num_gpu_blocks`, the actual dtype, …) and sends the result back in READY.
"""

from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_type_hints

import msgspec

from .errors import ModelNotFoundError

Quantization = Literal[
    "int8", "int8-dynamic", "int4", "awq", "gptq", "bitsandbytes", "mxfp4", "fp8", "compressed-tensors", "modelopt"
]  # fmt: skip
SET_BY_CORE = object()  # marks, in a field's annotation, a field that the core sets and users can't


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the configuration."""

    nested: ClassVar[bool] = False  # whether users set the section as one dict, under its own name


class ModelConfig(Section, frozen=True, kw_only=True):
    """The model, its tokenizer, and the length of requests."""

    model: Annotated[str | None, "Folder or Hugging Face id of the checkpoint; none: the embedded model."] = None
    tokenizer: Annotated[str | None, "Folder or id of the tokenizer; none: the model's."] = None
    tokenizer_mode: Annotated[
        Literal["auto", "hf", "mistral"],
        "`auto`: the Rust tokenizer where a tokenizer.json exists; `hf`: transformers' AutoTokenizer; `mistral`: "
        "Mistral's own, of tekken.json or tokenizer.model.v*, which `auto` takes where there is no other.",
    ] = "auto"
    skip_tokenizer_init: Annotated[bool, "Load no tokenizer: token ids in, token ids out."] = False
    trust_remote_code: Annotated[bool, "Run Python code that comes with a checkpoint."] = False
    revision: Annotated[str | None, "Branch, tag or commit of the model on the hub."] = None
    tokenizer_revision: Annotated[str | None, "Branch, tag or commit of the tokenizer on the hub."] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "Dtype of weights and activations; `auto`: the checkpoint's own.",
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        "`int8`, `int8-dynamic`, `int4`, `bitsandbytes` (NF4, 4 bits): round the weights as they are loaded, for "
        "native kernels on a CPU. The inputs of int8 and int4 products are rounded to 8 bits as well, in groups of at "
        "most 128 values with a scale each; `int8-dynamic` has one scale for a row of inputs and one for a row of "
        "weights, which is faster and coarser. `awq`, `gptq`, `mxfp4`, `fp8`, `compressed-tensors`, `modelopt`: "
        "require such a checkpoint. Quantized checkpoints are recognised without this option, too.",
    ] = None
    seed: Annotated[int, "Seed of `load_format=dummy` weights."] = 0
    max_model_len: Annotated[int | None, "Most tokens of a request, prompt and output; none: the model's."] = None
    max_logprobs: Annotated[int, "Most log probabilities per token that a request may ask for; -1: no limit."] = 512
    config_format: Annotated[
        Literal["auto", "hf", "mistral"],
        "`hf`: config.json; `mistral`: Mistral's params.json; `auto`: config.json, or params.json in a folder that "
        "has only that.",
    ] = "auto"
    hf_overrides: Annotated[dict[str, Any], "Fields to replace in the checkpoint's config."] = {}
    generation_config: Annotated[
        str, "Where default sampling parameters come from: `auto` (the checkpoint), `none`, or a folder."
    ] = "auto"
    override_generation_config: Annotated[dict[str, Any], "Fields to replace in the generation config."] = {}
    served_model_name: Annotated[str | None, "What metrics and traces call the model; none: `model`."] = None
    runner: Annotated[
        Literal["auto", "generate", "pooling"], "Generate text or pool vectors; `auto`: as the architecture says."
    ] = "auto"
    task: Annotated[
        Literal["auto", "generate", "embed", "encode", "classify", "score", "reward"],
        "Older form of `runner`: `generate`, or the task of a pooling model.",
    ] = "auto"
    enable_return_routed_experts: Annotated[
        bool, "Give each completion `routed_experts`: which experts computed its tokens. For models with experts."
    ] = False
    logits_processors: Annotated[
        list[str], "Classes, as `package.module:Class`, that change the logits of every request; the core imports them."
    ] = []

    @property
    def shown_name(self) -> str:
        """The model's name in metrics and traces."""
        return self.served_model_name or self.model or ""

    @property
    def hf_config(self) -> Any:
        """The checkpoint's config as transformers has it, with `hf_overrides`. It is read, and transformers imported,
        at each use.

        Raises:
            ModelNotFoundError: the checkpoint is not on this machine, as with a daemon on another one.
        """
        from transformers import AutoConfig

        from .mistral_params import read_params

        params = read_params(str(self.model), self.config_format, self.revision)
        if params is not None:
            return AutoConfig.for_model(**with_overrides(params, self.hf_overrides))
        where: dict[str, Any] = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        try:
            found: Any = AutoConfig.from_pretrained(str(self.model), **where)
        except OSError as error:
            raise ModelNotFoundError(f"no config of {self.model!r} can be read here: {error}") from error
        return type(found).from_dict(with_overrides(found.to_dict(), self.hf_overrides)) if self.hf_overrides else found

    @property
    def hf_text_config(self) -> Any:
        """The part of `hf_config` that describes the language model."""
        return self.hf_config.get_text_config()


class LoadConfig(Section, frozen=True, kw_only=True):
    """How weights are loaded."""

    load_format: Annotated[
        Literal["auto", "safetensors", "dummy", "sharded_state", "mistral"],
        "`auto`: safetensors, else PyTorch files; `dummy`: random weights from `seed`; `sharded_state`: the files that "
        "`save_sharded_state` wrote; `mistral`: Mistral's consolidated*.safetensors, which `auto` reads from a folder "
        "that has no others.",
    ] = "auto"
    download_dir: Annotated[str | None, "Where hub downloads are kept; none: the hub library's cache."] = None
    use_tqdm_on_load: Annotated[bool, "Show a progress bar on long loads."] = True


class CacheConfig(Section, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: Annotated[Literal[8, 16, 32, 64], "Tokens per block."] = 16
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3"],
        "Dtype of keys and values in the cache; `auto`: the model's; `fp8` (`fp8_e4m3`): twice the blocks.",
    ] = "auto"
    gpu_memory_utilization: Annotated[float, "Share of the GPU's memory the core may use, in (0, 1]."] = 0.9
    kv_cache_memory_bytes: Annotated[
        int | None,
        "Size of the KV cache in bytes, on each rank; none: profiled on a GPU, a safe share of free memory on a CPU.",
    ] = None
    num_gpu_blocks_override: Annotated[int | None, "Number of blocks, instead of one that fits in memory."] = None
    enable_prefix_caching: Annotated[bool, "Keep finished blocks and reuse them for equal prefixes."] = True
    kv_offloading_size: Annotated[
        float | None,
        "GiB of host memory, of all ranks together, for cached blocks and snapshots that were evicted; none: 0.",
    ] = None
    swap_space: Annotated[float | None, "The older name of `kv_offloading_size`."] = None
    cpu_offload_gb: Annotated[
        float, "GiB of weights that stay in host memory and are sent to the GPU layer by layer."
    ] = 0.0
    num_gpu_blocks: Annotated[int | None, "Blocks in the pool.", SET_BY_CORE] = None
    num_cpu_blocks: Annotated[int | None, "Blocks in host memory.", SET_BY_CORE] = None


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """How requests share the steps."""

    max_num_batched_tokens: Annotated[int, "The token budget: most tokens computed in a step."] = 2048
    max_num_seqs: Annotated[int, "Most requests running at once."] = 256
    enable_chunked_prefill: Annotated[bool, "Let a prompt be computed over several steps."] = True
    long_prefill_token_threshold: Annotated[
        int, "Most tokens of one prompt computed in a step; 0: no limit but the budget."
    ] = 0
    stream_interval: Annotated[
        int, "Tokens between two outputs of a stream, after the first output; a request may override it."
    ] = 1
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], "`priority`: lower values first, arrival among equals."
    ] = "fcfs"
    max_num_queued_requests: Annotated[
        int | None, "Most requests of all frontends beyond `max_num_seqs`; further ones are refused at once."
    ] = None
    max_requests_in_flight: Annotated[int | None, "Most requests of all frontends, running and waiting."] = None
    max_tokens_in_flight: Annotated[int | None, "Most tokens, prompt and `max_tokens`, of all requests in flight."] = (
        None
    )
    max_requests_per_frontend: Annotated[int | None, "Most requests of one frontend in flight."] = None
    max_tokens_per_frontend: Annotated[int | None, "Most tokens of one frontend's requests in flight."] = None
    async_scheduling: Annotated[
        bool | None, "Launch a step before the tokens of the previous one are known; none: only on a GPU."
    ] = None


class ServiceConfig(Section, frozen=True, kw_only=True):
    """Crashes of the core, and frontends that are slow or gone."""

    max_restarts: Annotated[
        int, "Most restarts within `restart_window`; then the core stays down. A quarantine sets the count to 0."
    ] = 10
    restart_window: Annotated[float, "Seconds over which restarts are counted."] = 600.0
    watchdog_timeout: Annotated[
        float, "Seconds without progress, at least 2, after which a serving core is killed and restarted; 0: never."
    ] = 300.0
    frontend_timeout: Annotated[
        float,
        "Seconds without an answer from a frontend's machine after which it is disconnected; a frontend that died is "
        "disconnected at once.",
    ] = 10.0
    slow_frontend_timeout: Annotated[
        float, "Seconds for which a frontend may leave its messages unread before it is disconnected."
    ] = 60.0
    salt_per_frontend: Annotated[bool, "Let no frontend share cached prefixes with another."] = False


class ParallelConfig(Section, frozen=True, kw_only=True):
    """Several devices."""

    tensor_parallel_size: Annotated[
        int,
        "Ranks that compute the model together: processes that hold a part of each layer, on a GPU or on their share "
        "of the CPU's threads each.",
    ] = 1
    enable_expert_parallel: Annotated[bool, "Let each rank hold some experts whole, not a part of each."] = False
    sum_parts: Annotated[
        int,
        "Of how many products each sum over inputs is made, whatever the number of ranks, so that any "
        "`tensor_parallel_size` that divides it gives the same tokens; a power of 2; 0: one for each rank.",
    ] = 0
    ordered_sums: Annotated[
        bool,
        "Add the parts of ranks in a fixed order, so that a request's tokens do not depend on others in its steps; if "
        "false, the library adds them (NCCL, gloo), which moves fewer bytes.",
    ] = True
    disable_custom_all_reduce: Annotated[
        bool, "Let no sum read the memory of other GPUs, which is faster than NCCL for the few rows of decode steps."
    ] = False
    pipeline_parallel_size: Annotated[
        int, "Stages that the layers are divided among; each is of `tensor_parallel_size` ranks."
    ] = 1
    data_parallel_size: Annotated[
        int,
        "Cores that each hold a copy of the model; requests are spread over them. With `enable_expert_parallel`, and "
        "one rank for each copy: ranks of one core, which share the experts.",
    ] = 1
    distributed_executor_backend: Annotated[
        str,
        "`mp`: a process for each rank of `tensor_parallel_size`; `uni`: the same, and one process for one rank; "
        "`ray`: ranks are placed by Ray; `external_launcher`: torchrun starts them.",
    ] = "uni"
    worker_extension_cls: Annotated[
        str, "A class, as `package.module.Class`, whose methods `collective_rpc` can call, too."
    ] = ""
    nnodes: Annotated[
        int, "Machines that the ranks are divided among; on each but the first one, `mainspring rank` offers them."
    ] = 1
    node_rank: Annotated[int, "The number of this machine; the engine runs on number 0."] = 0
    master_addr: Annotated[str, "With several machines: the address of this one."] = "127.0.0.1"
    master_port: Annotated[
        int, "With several machines: the port at which ranks join; core N of several takes this port plus N."
    ] = 29501
    rank_key_file: Annotated[
        str | None, "With several machines: a file of `mainspring keys new`, of which each machine has a copy."
    ] = None
    data_parallel_rank: Annotated[int, "The number of this copy of the model.", SET_BY_CORE] = 0
    device_ids: Annotated[list[str], "GPUs of this machine that the core may use; none: all.", SET_BY_CORE] = []

    @property
    def homes(self) -> int:
        """Ranks that each keep the requests of their own and some of the experts; 1: requests are at home on all."""
        whole_layers = self.tensor_parallel_size == self.pipeline_parallel_size == 1
        return self.data_parallel_size if self.enable_expert_parallel and whole_layers else 1

    @property
    def num_copies(self) -> int:
        """Copies of the model."""
        return self.data_parallel_size // self.homes

    @property
    def num_local_ranks(self) -> int:
        """Ranks that the core starts on its machine, itself included."""
        elsewhere = self.distributed_executor_backend in ("ray", "external_launcher")
        return 1 if elsewhere else self.num_ranks // self.nnodes

    @property
    def rank_address(self) -> str:
        """Where the core takes in ranks of other machines. Of several cores, each listens at a port of its own."""
        own = self.data_parallel_rank if self.distributed_executor_backend == "mp" else 0
        return f"tcp://{self.master_addr}:{self.master_port + own}"

    @property
    def num_cores(self) -> int:
        """Copies of the model that the engine or daemon runs itself; a launcher starts an engine for each."""
        return 1 if self.distributed_executor_backend == "external_launcher" else self.num_copies

    @property
    def num_ranks(self) -> int:
        """Processes of a core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.homes


class LoRAConfig(Section, frozen=True, kw_only=True):
    """LoRA and prompt adapters."""

    enable_lora: Annotated[bool, "Let requests use LoRA adapters."] = False
    max_loras: Annotated[int, "Most LoRA adapters in one step."] = 1
    max_lora_rank: Annotated[int, "Largest rank of a LoRA adapter."] = 16
    max_cpu_loras: Annotated[int | None, "Most LoRA adapters kept in host memory; none: `max_loras`."] = None
    enable_prompt_adapter: Annotated[bool, "Let requests use prompt adapters."] = False
    max_prompt_adapters: Annotated[int, "Most prompt adapters kept."] = 1
    max_prompt_adapter_token: Annotated[int, "Most virtual tokens of a prompt adapter; 0: any number."] = 0


AttentionBackend = Literal["auto", "flashinfer", "native", "reference"]  # those of kernels/registry.py


class DeviceConfig(Section, frozen=True, kw_only=True):
    """Where and with which kernels the model runs."""

    device: Annotated[Literal["auto", "cpu", "cuda"], "`auto`: CUDA where there is a GPU."] = "auto"
    attention_backend: Annotated[
        AttentionBackend,
        "Kernel backend; `auto`: FlashInfer on a GPU, native C++ on a CPU, and where those can't run the reference.",
    ] = "auto"
    deterministic: Annotated[
        bool, "Make a request's tokens independent of the other requests in a step, on a GPU, too (a CPU always is)."
    ] = False
    enforce_eager: Annotated[bool, "Capture no CUDA graphs."] = False
    cudagraph_capture_sizes: Annotated[
        list[int] | None, "Batch sizes of decode steps to capture CUDA graphs for; none: chosen by `max_num_seqs`."
    ] = None
    kernels_dir: Annotated[
        str | None,
        "Folder of kernels that `mainspring kernels build` made; none: `$MAINSPRING_KERNELS`, else "
        "`~/.cache/mainspring/kernels`.",
    ] = None


class ObservabilityConfig(Section, frozen=True, kw_only=True):
    """What the engine tells about itself."""

    disable_log_stats: Annotated[bool, "Send no statistics with the outputs."] = False
    otlp_traces_endpoint: Annotated[
        str | None, "Where OpenTelemetry traces of requests are sent, as `http://HOST:PORT`; none: nowhere."
    ] = None
    metrics_port: Annotated[
        int | None, "Port on this machine where metrics are served in Prometheus' form; 0: any free one; none: not."
    ] = None


class SpeculativeConfig(Section, frozen=True, kw_only=True):
    """Speculative decoding: several next tokens are guessed, and the model checks them in one step."""

    nested = True

    method: Annotated[
        Literal["ngram", "draft_model"] | None,
        "`ngram`: guess by repetitions in the request; `draft_model`: by a smaller model; none: by `model`.",
    ] = None
    num_speculative_tokens: Annotated[int, "Most tokens guessed at once."] = 4
    model: Annotated[str | None, "The draft model: folder or Hugging Face id."] = None
    revision: Annotated[str | None, "Branch, tag or commit of the draft model on the hub."] = None
    prompt_lookup_max: Annotated[int, "`ngram`: longest suffix of the tokens to search for."] = 4
    prompt_lookup_min: Annotated[int, "`ngram`: shortest suffix to search for."] = 2


class PoolerConfig(Section, frozen=True, kw_only=True):
    """What a pooling model does, where the checkpoint is to be overruled."""

    nested = True

    task: Annotated[
        Literal["embed", "token_embed", "classify", "token_classify"] | None,
        "The task of requests that name none; `token_embed`: `LLM.embed` and `LLM.score` work on the vectors of "
        "tokens; none: the model's first one.",
    ] = None
    seq_pooling_type: Annotated[
        Literal["CLS", "LAST", "MEAN"] | None, "How an embedding is made of the tokens' vectors; none: the model's way."
    ] = None
    pooling_type: Annotated[Literal["CLS", "LAST", "MEAN"] | None, "The older name of `seq_pooling_type`."] = None


class StructuredOutputsConfig(Section, frozen=True, kw_only=True):
    """Structured outputs."""

    nested = True

    backend: Annotated[Literal["auto", "guidance"], "The grammar library; only llguidance is supported."] = "auto"


DecodingConfig = StructuredOutputsConfig  # its older name


def merged(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`raw` with `overrides` on top; a dict in both is merged, so that one field of a part can be replaced."""
    found = dict(raw)
    for key, value in overrides.items():
        inner = found.get(key)
        found[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found


def with_overrides(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's config with `hf_overrides`, see `merged`. Where it has `rope_parameters`, transformers takes an
    older `rope_scaling` in their place and passes over an older `rope_theta`, so these become a part of them."""
    given, rope = dict(overrides), raw.get("rope_parameters")
    if isinstance(rope, dict) and not any(isinstance(part, dict) for part in rope.values()):
        scaling = given.pop("rope_scaling", None) or {}
        older = {"rope_type" if name == "type" else name: value for name, value in scaling.items()}
        if "rope_theta" in given:
            older["rope_theta"] = given.pop("rope_theta")
        given["rope_parameters"] = {**older, **(given.get("rope_parameters") or {})}
    return merged(raw, given)


MODALITIES = ("image", "video", "audio")
ENCODER_TEXT = "text"  # the modality of a text that is the input of an encoder
MOST_ITEMS = 32  # of a modality in a prompt, unless `limit_mm_per_prompt` says otherwise


class MultiModalConfig(Section, frozen=True, kw_only=True):
    """Images, videos and sound in prompts."""

    limit_mm_per_prompt: Annotated[
        dict[str, int], "Most items of each modality in a prompt; a modality that is not named: 32."
    ] = {}
    mm_processor_kwargs: Annotated[dict[str, Any], "Arguments of the checkpoint's processor, for all requests."] = {}
    allowed_media_domains: Annotated[
        list[str], "Hosts from which media may be fetched, some with a port; none: no URLs."
    ] = []
    allowed_local_media_path: Annotated[str, "Folder that file:// URLs may name; none: no files."] = ""
    media_workers: Annotated[int, "Processes that decode and prepare media, started when there are some."] = 1
    mm_processor_cache_gb: Annotated[float, "GiB of prepared media that each media worker keeps."] = 1.0
    mm_encoder_cache_gb: Annotated[float, "GiB of encoded media that the core keeps."] = 1.0
    max_media_bytes: Annotated[int, "Most bytes of a media file."] = 32 << 20
    max_media_pixels: Annotated[int, "Most pixels of an image, or of all frames of a video."] = 50_000_000


class EngineConfig(Section, frozen=True, kw_only=True):
    """The whole configuration, as it travels to the core and back."""

    model_config: ModelConfig = ModelConfig()
    load_config: LoadConfig = LoadConfig()
    cache_config: CacheConfig = CacheConfig()
    scheduler_config: SchedulerConfig = SchedulerConfig()
    service_config: ServiceConfig = ServiceConfig()
    parallel_config: ParallelConfig = ParallelConfig()
    lora_config: LoRAConfig = LoRAConfig()
    device_config: DeviceConfig = DeviceConfig()
    observability_config: ObservabilityConfig = ObservabilityConfig()
    speculative_config: SpeculativeConfig | None = None
    structured_outputs_config: StructuredOutputsConfig = StructuredOutputsConfig()
    pooler_config: PoolerConfig | None = None
    multimodal_config: MultiModalConfig = MultiModalConfig()


SECTIONS: dict[str, type[Section]] = {
    field.name: next((kind for kind in get_args(field.type) if kind is not NoneType), field.type)
    for field in msgspec.structs.fields(EngineConfig)
}


class FieldInfo(NamedTuple):
    """One field, as the generators of flags and docs need it."""

    section: str  # the field's section, an attribute of EngineConfig; empty if the field is a section itself
    name: str
    type: Any
    default: Any
    doc: str
    set_by_core: bool


def fields() -> Iterator[FieldInfo]:
    """All fields in order. A nested section counts as a single field without a section."""
    for section in msgspec.structs.fields(EngineConfig):
        kind = SECTIONS[section.name]
        if kind.nested:
            yield FieldInfo("", section.name, section.type, section.default, str(kind.__doc__), False)
        else:
            yield from fields_of(kind, section.name)


def fields_of(section: type[Section], name: str) -> Iterator[FieldInfo]:
    """The fields of one section, whose name is `name`."""
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        kind, doc, *marks = get_args(hints[field.name])
        default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
        yield FieldInfo(name, field.name, kind, default, doc, SET_BY_CORE in marks)
