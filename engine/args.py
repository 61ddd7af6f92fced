"""`EngineArgs`: the flat form of the configuration, as users and the command line set it.

ipc/config.py defines each field with its default and its doc. The lines here repeat the type for editors.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, get_origin

import msgspec

from ..compat.forms import takes_vllm_fields
from ..demo import MODEL_PATH
from ..ipc import config
from ..ipc.config import (
    MODALITIES,
    AttentionBackend,
    EngineConfig,
    FieldInfo,
    ParallelConfig,
    PoolerConfig,
    Quantization,
    Section,
    SpeculativeConfig,
    StructuredOutputsConfig,
)
from ..ipc.errors import InvalidArgumentError, ModelNotFoundError, NotSupportedError, shown, suggests_names
from ..ipc.processor_names import names_of

if TYPE_CHECKING:
    import argparse

FIELDS: dict[str, FieldInfo] = {info.name: info for info in config.fields() if not info.set_by_core}


def all_names() -> tuple[str, ...]:
    """The names of all fields, also of those that only vLLM has."""
    from ..compat.engine_fields import KNOWN

    return (*FIELDS, *KNOWN)


def _default(name: str) -> Any:
    return FIELDS[name].default


@takes_vllm_fields
@suggests_names
@dataclass
class EngineArgs:
    """Everything a user can set of an engine. `mainspring generate --help` explains each. Fields that only vLLM has are
    accepted as compat/engine_fields.py says.

    Raises:
        UnknownArgumentError: no such argument. The message names the nearest one.
    """

    model: str | None = _default("model")
    tokenizer: str | None = _default("tokenizer")
    tokenizer_mode: Literal["auto", "hf", "mistral"] = _default("tokenizer_mode")
    skip_tokenizer_init: bool = _default("skip_tokenizer_init")
    trust_remote_code: bool = _default("trust_remote_code")
    revision: str | None = _default("revision")
    tokenizer_revision: str | None = _default("tokenizer_revision")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _default("dtype")
    quantization: Quantization | None = _default("quantization")  # noqa: RUF009
    seed: int = _default("seed")
    max_model_len: int | None = _default("max_model_len")
    max_logprobs: int = _default("max_logprobs")
    config_format: Literal["auto", "hf", "mistral"] = _default("config_format")
    hf_overrides: dict[str, Any] = field(default_factory=_default("hf_overrides").copy)
    generation_config: str = _default("generation_config")
    override_generation_config: dict[str, Any] = field(default_factory=_default("override_generation_config").copy)
    served_model_name: str | None = _default("served_model_name")
    runner: Literal["auto", "generate", "pooling"] = _default("runner")
    task: Literal["auto", "generate", "embed", "encode", "classify", "score", "reward"] = _default("task")
    enable_return_routed_experts: bool = _default("enable_return_routed_experts")
    logits_processors: list[str | type] = field(default_factory=_default("logits_processors").copy)
    load_format: Literal["auto", "safetensors", "dummy", "sharded_state", "mistral"] = _default("load_format")
    download_dir: str | None = _default("download_dir")
    use_tqdm_on_load: bool = _default("use_tqdm_on_load")
    block_size: Literal[8, 16, 32, 64] = _default("block_size")
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3"] = _default("kv_cache_dtype")
    gpu_memory_utilization: float = _default("gpu_memory_utilization")
    kv_cache_memory_bytes: int | None = _default("kv_cache_memory_bytes")
    num_gpu_blocks_override: int | None = _default("num_gpu_blocks_override")
    enable_prefix_caching: bool = _default("enable_prefix_caching")
    kv_offloading_size: float | None = _default("kv_offloading_size")
    swap_space: float | None = _default("swap_space")
    cpu_offload_gb: float = _default("cpu_offload_gb")
    max_num_batched_tokens: int = _default("max_num_batched_tokens")
    max_num_seqs: int = _default("max_num_seqs")
    enable_chunked_prefill: bool = _default("enable_chunked_prefill")
    long_prefill_token_threshold: int = _default("long_prefill_token_threshold")
    stream_interval: int = _default("stream_interval")
    scheduling_policy: Literal["fcfs", "priority"] = _default("scheduling_policy")
    max_num_queued_requests: int | None = _default("max_num_queued_requests")
    max_requests_in_flight: int | None = _default("max_requests_in_flight")
    max_tokens_in_flight: int | None = _default("max_tokens_in_flight")
    max_requests_per_frontend: int | None = _default("max_requests_per_frontend")
    max_tokens_per_frontend: int | None = _default("max_tokens_per_frontend")
    async_scheduling: bool | None = _default("async_scheduling")
    max_restarts: int = _default("max_restarts")
    restart_window: float = _default("restart_window")
    watchdog_timeout: float = _default("watchdog_timeout")
    frontend_timeout: float = _default("frontend_timeout")
    slow_frontend_timeout: float = _default("slow_frontend_timeout")
    salt_per_frontend: bool = _default("salt_per_frontend")
    tensor_parallel_size: int = _default("tensor_parallel_size")
    enable_expert_parallel: bool = _default("enable_expert_parallel")
    sum_parts: int = _default("sum_parts")
    ordered_sums: bool = _default("ordered_sums")
    disable_custom_all_reduce: bool = _default("disable_custom_all_reduce")
    pipeline_parallel_size: int = _default("pipeline_parallel_size")
    data_parallel_size: int = _default("data_parallel_size")
    distributed_executor_backend: str = _default("distributed_executor_backend")
    worker_extension_cls: str = _default("worker_extension_cls")
    nnodes: int = _default("nnodes")
    node_rank: int = _default("node_rank")
    master_addr: str = _default("master_addr")
    master_port: int = _default("master_port")
    rank_key_file: str | None = _default("rank_key_file")
    enable_lora: bool = _default("enable_lora")
    max_loras: int = _default("max_loras")
    max_lora_rank: int = _default("max_lora_rank")
    max_cpu_loras: int | None = _default("max_cpu_loras")
    enable_prompt_adapter: bool = _default("enable_prompt_adapter")
    max_prompt_adapters: int = _default("max_prompt_adapters")
    max_prompt_adapter_token: int = _default("max_prompt_adapter_token")
    device: Literal["auto", "cpu", "cuda"] = _default("device")
    attention_backend: AttentionBackend = _default("attention_backend")  # noqa: RUF009
    deterministic: bool = _default("deterministic")
    enforce_eager: bool = _default("enforce_eager")
    cudagraph_capture_sizes: list[int] | None = field(default=_default("cudagraph_capture_sizes"))
    kernels_dir: str | None = _default("kernels_dir")
    disable_log_stats: bool = _default("disable_log_stats")
    otlp_traces_endpoint: str | None = _default("otlp_traces_endpoint")
    metrics_port: int | None = _default("metrics_port")
    speculative_config: SpeculativeConfig | dict[str, Any] | None = None
    structured_outputs_config: StructuredOutputsConfig | dict[str, Any] = StructuredOutputsConfig()  # noqa: RUF009
    pooler_config: PoolerConfig | dict[str, Any] | None = None
    limit_mm_per_prompt: dict[str, int] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    allowed_media_domains: list[str] = field(default_factory=list)
    allowed_local_media_path: str = _default("allowed_local_media_path")
    media_workers: int = _default("media_workers")
    mm_processor_cache_gb: float = _default("mm_processor_cache_gb")
    mm_encoder_cache_gb: float = _default("mm_encoder_cache_gb")
    max_media_bytes: int = _default("max_media_bytes")
    max_media_pixels: int = _default("max_media_pixels")

    def create_engine_config(self, usage_context: Any = None) -> EngineConfig:
        """Check every value and group them into the configuration that travels to the core. `usage_context` is without
        effect.

        Raises:
            InvalidArgumentError: a value is of the wrong type or out of range, or two contradict each other.
            NotSupportedError: a value asks for a feature that does not exist yet.
            ModelNotFoundError: `model` or `tokenizer` names a folder that is not there.
        """
        return _with_values(EngineConfig(), {name: getattr(self, name) for name in FIELDS})

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each field; see `add_flags`."""
        add_flags(parser, FIELDS.values())
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Arguments from parsed flags; what was not given keeps its default."""
        names = {*all_names(), *(one.name for one in dataclasses.fields(cls))}
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def checked(given: EngineConfig) -> EngineConfig:
    """The checked form of a configuration that was not made by `EngineArgs.create_engine_config`.

    Raises: as that.
    """
    for name, kind in config.SECTIONS.items():
        part = getattr(given, name)
        if not isinstance(part, kind) and not (part is None and name in ("speculative_config", "pooler_config")):
            raise InvalidArgumentError(f"{name} is {shown(part)}; it must be a {kind.__name__}")
    owners = {name: getattr(given, info.section) if info.section else given for name, info in FIELDS.items()}
    return _with_values(given, {name: getattr(owner, name) for name, owner in owners.items()})


def _with_values(base: EngineConfig, given: dict[str, Any]) -> EngineConfig:
    """`base` with the values of all fields that users set, after a check of each."""
    given = {**given, "logits_processors": names_of(given["logits_processors"])}
    values = {name: typed(info, given[name]) for name, info in FIELDS.items()}
    _check_ranges(values)
    if values["speculative_config"] is not None:
        values["speculative_config"] = _checked_speculation(values["speculative_config"])
    values["model"] = _located("model", values["model"] or str(MODEL_PATH))
    if values["tokenizer"] is not None:
        values["tokenizer"] = _located("tokenizer", values["tokenizer"])
    several = values["tensor_parallel_size"] * values["pipeline_parallel_size"] > 1
    if several and values["distributed_executor_backend"] == "uni":
        values["distributed_executor_backend"] = "mp"  # each rank is a process
    parts: dict[str, Any] = {}
    for section, members in itertools.groupby(FIELDS.values(), lambda info: info.section):
        own = {info.name: values[info.name] for info in members}
        parts |= {section: msgspec.structs.replace(getattr(base, section), **own)} if section else own
    return msgspec.structs.replace(base, **parts)


def add_flags(parser: argparse.ArgumentParser, fields: Iterable[FieldInfo]) -> None:
    """A flag for each field, grouped by section. A flag that is not given sets no attribute."""
    import argparse

    from ..compat.engine_fields import SHORT, VALUES

    for section, members in itertools.groupby(fields, lambda info: info.section):
        group = parser.add_argument_group(section.replace("_", " ") or "others")
        for name, kind, default, doc in ((f.name, f.type, f.default, f.doc) for f in members):
            text = f"{doc} (default: {'none' if default is None else default})".replace("%", "%%")
            flags, how = [f"--{name.replace('_', '-')}", *filter(None, [SHORT.get(name)])], _flag_of(kind)
            if own := how.get("choices"):  # vLLM's values are accepted too; the help shows ours
                how["metavar"] = f"{{{','.join(map(str, own))}}}"
                how["choices"] = (*own, *filter(None, VALUES.get(name, ())))
            group.add_argument(*flags, help=text, default=argparse.SUPPRESS, **how)


def add_vllm_flags(parser: argparse.ArgumentParser, arguments: Iterable[str]) -> None:
    """Add a flag, which the help does not show, for each field that only vLLM has and that `arguments` give."""
    import argparse

    from ..compat.engine_fields import KNOWN, is_flag

    for name in (text[2:].partition("=")[0].removeprefix("no-").replace("-", "_") for text in arguments):
        flag = f"--{name.replace('_', '-')}"
        if name in KNOWN and flag not in parser._option_string_actions:
            how: dict[str, Any] = (
                {"action": argparse.BooleanOptionalAction} if is_flag(name) else {"type": _json_or_text}
            )
            parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)


def nearest_flag(parser: argparse.ArgumentParser, given: str) -> str | None:
    """The flag, of this parser or of vLLM, that is most similar to one that does not exist."""
    import difflib

    from ..compat.engine_fields import KNOWN

    theirs = [f"--{name.replace('_', '-')}" for name in KNOWN if "--max-model-len" in parser._option_string_actions]
    near = difflib.get_close_matches(given.partition("=")[0], [*parser._option_string_actions, *theirs], 1)
    return near[0] if near else None


def dashed(arguments: Iterable[str]) -> list[str]:
    """The arguments with ``--max-tokens`` for ``--max_tokens``, as vLLM's command line takes them."""
    given = list(arguments)
    end = given.index("--") if "--" in given else len(given)  # only positional ones follow
    return [re.sub(r"^--[^=]+", lambda flag: flag[0].replace("_", "-"), text) for text in given[:end]] + given[end:]


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _flag_of(kind: Any) -> dict[str, Any]:
    """The arguments of `add_argument` for a field of this type."""
    import argparse

    if type(None) in get_args(kind):
        (kind,) = (option for option in get_args(kind) if option is not type(None))
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind), "type": type(get_args(kind)[0])}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if _is_table(kind):
        return {"type": _reads(json.loads, "JSON"), "metavar": "JSON"}
    if kind == list[int]:
        read = _reads(lambda text: [int(part) for part in text.split(",")], "a list like 1,2,4")
        return {"type": read, "metavar": "INT,INT,..."}
    if kind == list[str]:
        return {"nargs": "+", "metavar": "NAME"}
    read = _reads(_whole_number, "a number like 1024, 16k or 16K") if kind is int else kind
    return {"type": read, "metavar": kind.__name__.upper()}


def _whole_number(text: str) -> int:
    """``16k`` is 16,000 and ``16K`` is 16,384, as in vLLM."""
    head, power = text[:-1], "kmgt".find(text[-1:].lower() or " ") + 1
    if not power:
        return int(text)
    return int(float(head) * 1000**power) if text[-1].islower() else int(head) << 10 * power


def _is_table(kind: Any) -> bool:
    return get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, Section))


def _reads(convert: Callable[[str], Any], form: str) -> Callable[[str], Any]:
    """`convert` as a type of `add_argument`; what it can't convert is said not to be of this form."""
    import argparse

    def read(text: str) -> Any:
        try:
            return convert(text)
        except (ValueError, OverflowError, RecursionError) as error:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {form}: {error}") from None

    return read


def typed(info: FieldInfo, value: Any) -> Any:
    """The value as the field's type, or `InvalidArgumentError`."""
    try:
        found = msgspec.convert(value, info.type)
    except Exception as error:  # also errors raised by methods of the value
        why = f" ({error})" if isinstance(value, dict) else ""
        raise InvalidArgumentError(f"{info.name} is {shown(value)}; it must be {_described(info.type)}{why}") from None
    try:
        msgspec.json.encode(found)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgumentError(f"{info.name} is {shown(value)}, which cannot be sent to a core: {error}") from None
    return found


def _described(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(option) for option in get_args(kind))
    if _is_table(kind):
        return "a dict"
    return _NAMES.get(kind) or " or ".join(map(_described, get_args(kind)))


_NAMES = {
    int: "an int",
    float: "a number",
    str: "a str",
    bool: "True or False",
    list[int]: "a list of ints",
    list[str]: "a list of strs",
    type(None): "None",
}
_AT_LEAST = {
    -1: "max_logprobs",
    0: "sum_parts kv_offloading_size swap_space cpu_offload_gb max_prompt_adapter_token long_prefill_token_threshold "
    "max_num_queued_requests max_restarts restart_window frontend_timeout "
    "slow_frontend_timeout mm_processor_cache_gb mm_encoder_cache_gb",
    1: "media_workers max_media_bytes max_media_pixels max_model_len max_num_batched_tokens max_num_seqs "
    "stream_interval kv_cache_memory_bytes num_gpu_blocks_override max_requests_in_flight max_tokens_in_flight "
    "max_requests_per_frontend max_tokens_per_frontend max_loras max_lora_rank max_cpu_loras max_prompt_adapters "
    "tensor_parallel_size pipeline_parallel_size data_parallel_size nnodes",
}
MOST_GUESSES = 16  # num_speculative_tokens
MOST_PROCESSES = 1024  # ranks of an engine or daemon, those of all cores together
_SO_FAR = {  # field → the values that are supported
    "distributed_executor_backend": ("uni", "mp", "ray", "external_launcher"),
    "node_rank": (0,),
}


def check_least(name: str, value: float | None, least: int) -> None:
    """Raise `InvalidArgumentError` unless the value is None, or finite and at least `least`."""
    if value is not None and not least <= value < math.inf:
        finite = " and finite" if isinstance(value, float) else ""
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be at least {least}{finite}")


def check_url(name: str, url: str | None) -> None:
    if url is not None and not re.match(r"https?://[^/]", url):
        raise InvalidArgumentError(f"{name} is {shown(url)}; it must begin with http:// or https:// and name a host")


def check_port(name: str, port: int | None) -> None:
    if port is not None and not 0 <= port <= 65_535:
        raise InvalidArgumentError(f"{name} is {port}; it must be in 0 to 65535 (0: any free one)")


def _check_ranges(values: dict[str, Any]) -> None:
    for least, names in _AT_LEAST.items():
        for name in names.split():
            check_least(name, values[name], least)
    for size in values["cudagraph_capture_sizes"] or ():
        check_least("a size in cudagraph_capture_sizes", size, 1)
    share = values["gpu_memory_utilization"]
    if not 0 < share <= 1:
        raise InvalidArgumentError(f"gpu_memory_utilization is {share}; it must be above 0 and at most 1")
    if values["watchdog_timeout"]:
        # an idle core gives a sign of life once a second
        check_least("watchdog_timeout", values["watchdog_timeout"], 2)
    for name, supported in _SO_FAR.items():
        if values[name] not in supported:
            only = " and ".join(map(repr, supported))
            verb = "are" if len(supported) > 1 else "is"
            raise NotSupportedError(f"{name} is {shown(values[name])}; only {only} {verb} supported so far")
    _check_pipeline(values)
    _check_media(values)
    if values["tensor_parallel_size"] > 1 and values["cpu_offload_gb"]:
        raise NotSupportedError(
            f"cpu_offload_gb is {values['cpu_offload_gb']} and tensor_parallel_size {values['tensor_parallel_size']}; "
            "weights stay in host memory only with one rank so far"
        )
    for name in ("tensor_parallel_size", "data_parallel_size", "nnodes"):
        if values[name] > MOST_PROCESSES:
            raise InvalidArgumentError(f"{name} is {values[name]}; it may be at most {MOST_PROCESSES}")
    ranks, stages, machines = (values[n] for n in ("tensor_parallel_size", "pipeline_parallel_size", "nnodes"))
    copies = values["data_parallel_size"]
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
    homes = ParallelConfig(**{name: values[name] for name in sizes}).homes
    if homes * ranks * stages % machines:
        more = f" and pipeline_parallel_size {stages}" if stages > 1 else ""
        more += f" and data_parallel_size {homes}" if homes > 1 else ""
        raise InvalidArgumentError(
            f"tensor_parallel_size is {ranks}{more}, which can't be divided among {machines} nnodes"
        )
    if copies > homes and values["distributed_executor_backend"] == "ray":
        raise NotSupportedError(
            f"data_parallel_size is {copies}, but ranks are placed by Ray: start an engine or a "
            "daemon for each copy of the model"
        )
    check_port("master_port", values["master_port"])
    parts = values["sum_parts"]
    if parts and (parts & (parts - 1) or parts % ranks):
        raise InvalidArgumentError(
            f"sum_parts is {parts}; it must be a power of 2 and a multiple of tensor_parallel_size, {ranks}"
        )
    if not values["ordered_sums"] and (parts or values["deterministic"]):
        raise InvalidArgumentError(
            f"ordered_sums is False, and {'sum_parts' if parts else 'deterministic'} needs a fixed order of sums"
        )
    if parts and (values["enable_lora"] or values["quantization"]):
        raise NotSupportedError("sum_parts is set, which does not go with enable_lora or quantization")
    check_port("metrics_port", values["metrics_port"])
    check_url("otlp_traces_endpoint", values["otlp_traces_endpoint"])
    kept, most = values["max_cpu_loras"], values["max_loras"]
    if kept is not None and kept < most:
        raise InvalidArgumentError(f"max_cpu_loras is {kept}, less than max_loras, {most}: those must be in memory")
    budget, longest = values["max_num_batched_tokens"], values["max_model_len"]
    if not values["enable_chunked_prefill"] and longest is not None and budget < longest:
        raise InvalidArgumentError(
            f"max_num_batched_tokens is {budget}, less than max_model_len, {longest}: without chunked prefill "
            "a prompt must fit in one step"
        )


def _check_media(values: dict[str, Any]) -> None:
    for modality, most in values["limit_mm_per_prompt"].items():
        if modality not in MODALITIES:
            known = ", ".join(MODALITIES)
            raise InvalidArgumentError(f"limit_mm_per_prompt names {shown(modality)}; there are {known}")
        check_least(f"limit_mm_per_prompt of {modality}", most, 0)
    for host in values["allowed_media_domains"]:
        if not re.fullmatch(r"([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d+)?", host):
            raise InvalidArgumentError(
                f"allowed_media_domains holds {shown(host)}; give names of hosts, without https://"
            )
    folder = values["allowed_local_media_path"]
    if folder and not (Path(folder).is_absolute() and Path(folder).is_dir()):
        raise InvalidArgumentError(
            f"allowed_local_media_path is {shown(folder)}; it must be the whole path of a folder"
        )


def _check_pipeline(values: dict[str, Any]) -> None:
    stages, speculation = values["pipeline_parallel_size"], values["speculative_config"]
    if stages == 1:
        return
    from ..ipc.journal import STEPS  # brings numpy

    if stages > STEPS:
        raise InvalidArgumentError(f"pipeline_parallel_size is {stages}; it may be at most {STEPS}")
    others = ("cpu_offload_gb", "enable_return_routed_experts")
    drafts = speculation is not None and speculation.model is not None
    for name in [*(other for other in others if values[other]), *(["speculative_config with a draft model"] * drafts)]:
        raise NotSupportedError(f"pipeline_parallel_size is {stages}, which does not go with {name} so far")


def _checked_speculation(given: SpeculativeConfig) -> SpeculativeConfig:
    """The configuration with its method filled in."""
    most, shortest, longest = given.num_speculative_tokens, given.prompt_lookup_min, given.prompt_lookup_max
    if not 1 <= most <= MOST_GUESSES:
        raise InvalidArgumentError(f"num_speculative_tokens is {most}; it must be in 1 to {MOST_GUESSES}")
    if not 1 <= shortest <= longest:
        raise InvalidArgumentError(
            f"prompt_lookup_min is {shortest} and prompt_lookup_max {longest}; both must be at least 1, in that order"
        )
    if given.method == "ngram":
        if given.model is not None:
            raise InvalidArgumentError(f"speculative_config names the model {given.model!r}; method 'ngram' uses none")
        return given
    if given.model is None:
        raise InvalidArgumentError("speculative_config names no draft model: give `model`, or the method 'ngram'")
    model = _located("the model of speculative_config", given.model)
    return msgspec.structs.replace(given, method="draft_model", model=model)


def _located(field: str, name: str) -> str:
    """A folder's absolute path, or a hub id as it is."""
    try:
        folder = Path(name).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFoundError(f"{field} is {shown(name)}, which names nothing: {error!s:.80}") from None
    if is_folder:
        return str(folder.resolve())
    if exists:
        raise ModelNotFoundError(f"{field} is {name!r}, which is a file; give the folder that holds the checkpoint")
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"{field} is {name!r}, but there is no such folder")
    return name
