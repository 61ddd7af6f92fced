"""From a folder or hub id to a `PagedModel`: config, checks, weights, dry run, verification."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_accelerate_available

from ....ipc.config import LoadConfig, ModelConfig, with_overrides
from ....ipc.errors import InvalidArgumentError, ModelNotFoundError, UnsupportedModelError
from ....ipc.mistral_params import read_params
from ....kernels.contract import AttentionSpec, Backend
from ....kernels.lazy_weight import Pack
from ....kernels.reference.reference_backend import ReferenceBackend
from ...parallel.cuts import Cut
from ...parallel.parallel_backend import ParallelBackend
from ...parallel.sharded_model import Shards, route
from ...parallel.stage_model import StagePart, stages_of
from ...parallel.stage_twin import choose_part
from ...parallel.stages import Stages
from ...parallel.twin import choose_plan
from ...worker.device import device_for
from ..learn.fuse import Decision, Fusion, fuse_model
from ..learn.index_probe import learn_indexers
from ..learn.latent_probe import learn_latents
from ..learn.own_probe import learn_attention
from ..learn.recurrent_probe import learn_states
from ..learn.row_invariant import RoutedProducts, check_rows, has_kernels_only, isolate_rows, turn_weights
from ..learn.verify import own_logits, verify
from ..media.encoder_decoder import decoder_of
from ..media.merge import Merger, merger_of
from ..run.paged_model import PagedModel
from ..run.positions import longest_sequence
from ..run.streamed_layers import StreamedLayers, stream_layers
from .frozen_rope import freeze_rope
from .kept_decisions import KeptDecisions
from .mistral_weights import mistral_files, read_mistral
from .quantized import (
    EXPANDED,
    already_quantized,
    has_integers,
    read_experts,
    read_quantized,
    settle_quantization,
)
from .quantized_forms import SUPPORTED, Form
from .refuse import refuse_config, refuse_stateful, settle_temperature, trial_run
from .sharded_state import read_parts
from .sliced_reading import CutsOf, reading

logger = logging.getLogger(__name__)

Prepare = Callable[[Sequence[AttentionSpec], torch.dtype], None]
ENCODER_DECODER: tuple[Any, ...] = (AutoModelForSpeechSeq2Seq, AutoModelForSeq2SeqLM)
_QUANTIZED = re.compile(r"weight_(scale|packed)|_proj_scale|qweight$|SCB$")  # tensors beside quantized weights
_UNPICKLING: Any = torch.serialization.pickle.UnpicklingError  # type: ignore[attr-defined]  # of damaged .bin files
MAPPED = ("auto", "safetensors")  # load formats of files that are mapped
PROGRESS_DELAY_S = 2.0  # a load shorter than this shows no bar


def load_model(
    model_config: ModelConfig,
    load_config: LoadConfig,
    device: torch.device,
    max_model_len: int | None = None,
    backend: Backend | None = None,
    decisions: Mapping[str, Decision] | KeptDecisions | None = None,
    prepare: Prepare | None = None,
    offload: int = 0,
    whole_experts: bool = False,
    stages: Stages | None = None,
) -> PagedModel:
    """Load a checkpoint and make sure that the paged path computes what the model computes alone.

    `max_model_len`, or the model's own limit, settles what depends on the length of a sequence (see frozen_rope.py).
    The check runs on `backend`, by default the reference. `decisions` of fusing are an earlier load's. `prepare` gets
    the attention and the dtype before any kernel of `backend` runs. `offload`: bytes of a GPU's memory to save by
    weights that stay in the host's (see streamed_layers.py). If `backend` is one of several ranks, only this rank's
    part of the model is loaded; `whole_experts`: see `plans_of`. With `stages` only this stage's layers are. Raises
    `ModelNotFoundError` when there is no such checkpoint and `UnsupportedModelError` when it can't be served rightly.
    """
    config = read_config(model_config, load_config)
    name = model_config.model or ""
    form = settle_quantization(
        model_config.quantization, config, name, backend or ReferenceBackend(),
        model_config.revision or "main", load_config.download_dir,
    )  # fmt: skip
    refuse_config(config, name)
    auto = auto_class(config)
    model_class = _model_class(config, model_config, auto)
    if auto is not AutoModelForCausalLM and (stages is not None or isinstance(backend, ParallelBackend)):
        raise UnsupportedModelError(f"{name!r} takes media, and such a model can't be divided over several ranks")
    shards = shards_of(config, name, backend, whole_experts)
    part: StagePart | None = None
    if stages is not None:
        how, part = choose_part(config, name, stages)
    if form is not None and load_config.load_format != "dummy":
        if model_class is None:
            raise UnsupportedModelError(f"{name!r} is quantized and brings its own code; only one may be")
        pack = backend.pack if backend is not None and backend.packs_integers else None
        with reading(shards.cuts_of if shards else None, part) if shards or part else nullcontext():
            model = _quantized_model(form, config, model_class, model_config, load_config, pack)
        if not has_integers(model):
            model = cast("Any", model).to(device)
            logger.warning("%s", EXPANDED)
    else:
        first = torch.device("cpu") if offload else device
        cuts_of = shards.cuts_of if shards else None
        place = _place(backend, stages)
        rounds = model_config.quantization is not None
        model = build_model(config, model_config, load_config, first, auto, cuts_of, part, place, rounds)
    if form is not None and isinstance(decisions, KeptDecisions):
        decisions.thorough = True  # the final form has other weights
    if part is not None:
        part.finish(model)
    model.requires_grad_(False)
    if shards is not None:
        shards.finish(model)
    streamed, note = stream_layers(model, offload, device_for(device)) if offload else (None, "")
    with nullcontext() if stages is None else stages.silence():
        paged = page(model, max_model_len, backend, decisions, prepare, streamed)
    if paged.merger is None and auto is not AutoModelForCausalLM:
        why = next((line for line in paged.notes if line.startswith("media: ")), "").removeprefix("media: not served: ")
        raise UnsupportedModelError(
            why or f"{type(model).__name__} has no method that encodes media apart from its prompt"
        )
    if stages is not None:
        stages.agree(paged.dtype)
    paged.is_quantized = has_integers(model)
    if part is not None:
        paged.parameters.others, paged.parameters.moved = part.others, part.moved
        paged.notes.insert(0, f"{part.describe()}, {how}")
    if shards is not None:
        paged.parameters.cuts = shards.sharding.cuts
        paged.parameters.tied = getattr(model, "all_tied_weights_keys", {})
        paged.notes.insert(0, shards.note)
    if streamed is not None:
        paged.notes.insert(0, note)
    return paged


def page(
    model: PreTrainedModel,
    max_model_len: int | None = None,
    backend: Backend | None = None,
    decisions: Mapping[str, Decision] | KeptDecisions | None = None,
    prepare: Prepare | None = None,
    streamed: StreamedLayers | None = None,
    merger: Merger | None = None,
) -> PagedModel:
    """Make a `PagedModel` of a built model: refuse, freeze, learn its attention, fuse, verify. `merger`: of the model
    that it is a part of; None: its own, if it has one."""
    name = type(model).__name__
    model.eval()
    backend = backend or ReferenceBackend()
    group = backend.group if isinstance(backend, ParallelBackend) else None
    with (
        trial_run(name),
        RoutedProducts(backend.linear) if model.device.type == "cpu" else nullcontext(),
        group.silence() if group else nullcontext(),
    ):
        limit = max_model_len or longest_sequence(model.config.get_text_config())
        decoder = decoder_of(model)
        if streamed is not None and decoder is not None:
            raise UnsupportedModelError(f"cpu_offload_gb is set, and {name} has an encoder, whose weights must stay")
        given = merger or decoder
        merges, no_media = merger_of(model) if given is None else (given, [])
        notes = freeze_rope(model, limit) if limit else []
        settle_temperature(model, limit)
        learn_indexers(model)
        states = learn_states(model)
        if states is not None:
            states.scans = backend.scans
        if stages_of(model) is None:  # another stage may have the state
            refuse_stateful(model)
        calls = learn_attention(model, limit)
        if streamed is None:
            calls = learn_latents(model, calls, backend)
        if not calls and states is None and stages_of(model) is None:
            raise UnsupportedModelError(f"{name} made no attention call that could be served")
        if streamed is not None and streamed.unseen:
            raise UnsupportedModelError(f"cpu_offload_gb is set, and {name} runs layers without calling them")
        if prepare is not None:
            prepare([call.spec for call in calls], model.dtype)
        kept = None
        if streamed is not None or decoder is not None:
            # what is joined is copied, so streamed layers stay as they are, and the others too; an encoder is not seen
            decisions = {}
        elif isinstance(decisions, KeptDecisions):
            kept, decisions = decisions, decisions.find(model, backend)
        thorough = kept is None or kept.thorough or not kept.can_keep
        fused = _fused(model, backend, decisions, "" if merges is None else merges.layered, thorough)
        notes += [*no_media, *fused.lines()]
        if streamed is None and model.device.type == "cpu":
            turn_weights(model.modules())
        notes += isolate_rows(model, backend, fused.stack)
        paged = PagedModel(model, calls, fused, notes, merges)
        if streamed is not None:
            paged.streamed, paged.parameters.packed = streamed, streamed.weights
    with trial_run(name), RoutedProducts(backend.linear) if model.device.type == "cpu" else nullcontext():
        if kept is not None and kept.verified is not None:  # the caller compares logits
            notes += kept.verified.notes
            return paged
        if not thorough and has_kernels_only(model, fused.stack):  # the caller compares these
            paged.own = own_logits(paged)
            return paged
        verdict = [verify(paged, backend)]
        if backend.deterministic and not has_kernels_only(model, fused.stack):
            verdict += check_rows(model, refuse=model.device.type == "cuda")
        notes += verdict
        paged.verdict = verdict
        if kept:
            kept.keep(fused.decisions)
    return paged


def _fused(
    model: PreTrainedModel,
    backend: Backend,
    decisions: Mapping[str, Decision] | None,
    layered: str,
    thorough: bool,
) -> Fusion:
    """`fuse_model`. Of several ranks the first one decides, because measurements differ from rank to rank."""
    if not isinstance(backend, ParallelBackend):
        return fuse_model(model, backend, decisions=decisions, layered=layered, thorough=thorough)
    group, fused = backend.group, None
    if group.leads:
        fused = fuse_model(model, backend, decisions=decisions)
    made = group.from_leader(None if fused is None else msgspec.msgpack.encode(fused.decisions))
    if fused is None:
        fused = fuse_model(model, backend, decisions=msgspec.msgpack.decode(made, type=dict[str, Decision]))
    route(model, backend)
    return fused


def shards_of(
    config: PreTrainedConfig,
    name: str,
    backend: Backend | None,
    whole_experts: bool = False,
    auto: Any = AutoModelForCausalLM,
) -> Shards | None:
    """This rank's part of the model that transformers' class `auto` makes of `config`; None: there is one rank. Errors
    as `choose_plan`."""
    if not isinstance(backend, ParallelBackend):
        return None
    how, plan = choose_plan(config, name, backend, whole_experts, auto)
    adds = "" if backend.group.ordered else "; the library adds their sums"
    return Shards(plan, backend, f"one of {backend.group.size} ranks, by {how}{adds}")


def read_config(model_config: ModelConfig, load_config: LoadConfig) -> PreTrainedConfig:
    """The config of the checkpoint's model that writes text, with `hf_overrides` merged in."""
    name = model_config.model
    if not name:
        raise InvalidArgumentError("model is empty; give a folder or a Hugging Face id")
    folder = Path(name).expanduser()
    params = read_params(name, model_config.config_format, model_config.revision, load_config.download_dir)
    if params is not None:
        return _config_of_params(name, with_overrides(params, model_config.hf_overrides))
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"the folder {name!r} holds no config.json")
    if folder.is_file():
        raise ModelNotFoundError(f"{name!r} is a file; give the folder with config.json and files of safetensors")
    if not folder.is_dir() and (folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1):
        raise ModelNotFoundError(f"there is no folder {name!r}")
    where: dict[str, Any] = {"revision": model_config.revision, "cache_dir": load_config.download_dir}
    try:
        raw, _ = PreTrainedConfig.get_config_dict(str(folder), **where)
        model_type, own_code = raw.get("model_type"), "AutoConfig" in raw.get("auto_map", {})
        if model_type not in CONFIG_MAPPING and not (own_code and model_config.trust_remote_code):
            hint = "; trust_remote_code=True would run the code that comes with it" if own_code else ""
            raise UnsupportedModelError(f"transformers does not know the model_type {model_type!r} of {name!r}{hint}")
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder), trust_remote_code=model_config.trust_remote_code, **where
        )
        if model_config.hf_overrides:
            config = type(config).from_dict(with_overrides(raw, model_config.hf_overrides))
    except OSError as error:
        missing = f"{name!r} is neither a folder here nor a model that the Hugging Face hub gave"
        what = f"config.json of {name!r} can't be read" if folder.is_dir() else missing
        raise ModelNotFoundError(f"{what}: {_first_line(error)}") from error
    except UnsupportedModelError:
        raise
    except Exception as error:  # each config class validates in its own way
        raise UnsupportedModelError(f"config.json of {name!r} is not valid: {_first_line(error)}") from error
    return _of_the_thinker(config)


def _of_the_thinker(config: PreTrainedConfig) -> PreTrainedConfig:
    """A checkpoint may hold a model that speaks what another one in it thinks. The latter writes the text; transformers
    finds its weights by its class."""
    thinker: PreTrainedConfig | None = getattr(config, "thinker_config", None)
    if thinker is None:
        return config
    thinker.dtype = thinker.dtype or config.dtype
    if quantized := getattr(config, "quantization_config", None):
        thinker.quantization_config = quantized
    return thinker


def _config_of_params(name: str, fields: dict[str, Any]) -> PreTrainedConfig:
    try:
        return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    except Exception as error:
        raise UnsupportedModelError(f"params.json of {name!r} is not valid: {_first_line(error)}") from error


def auto_class(config: PreTrainedConfig) -> Any:
    """The mapping of transformers that has the class of a checkpoint: that of models which take media, if the config
    names its class or if there is no other; or that of encoder-decoder models."""
    causal, media = AutoModelForCausalLM._model_mapping, AutoModelForMultimodalLM._model_mapping
    if config.is_encoder_decoder and type(config) not in media:
        for auto in ENCODER_DECODER:
            if type(config) in auto._model_mapping:
                return auto
    if type(config) not in media:
        return AutoModelForCausalLM
    if type(config) not in causal:
        return AutoModelForMultimodalLM
    kind: Any = media[type(config)]
    named = kind is not causal[type(config)] and kind.__name__ in (config.architectures or ())
    return AutoModelForMultimodalLM if named else AutoModelForCausalLM


def heads_of(config: PreTrainedConfig) -> list[Any]:
    """The classes of transformers that a checkpoint's config names. Most are in the package of its model; to look
    for a name in all packages takes a tenth of a start."""
    package = type(config).__module__.rpartition(".")[0]
    own = importlib.import_module(package) if package.startswith("transformers.models.") else None
    names = config.architectures or ()
    heads = (getattr(own, name, None) or getattr(transformers, name, None) for name in names)
    return [head for head in heads if head is not None]


def _model_class(
    config: PreTrainedConfig, model_config: ModelConfig, auto: Any = AutoModelForCausalLM
) -> type[PreTrainedModel] | None:
    """The class that `auto` has for this config; None where the checkpoint brings its own code."""
    if model_config.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return None
    known = auto._model_mapping
    other = next((head.__name__ for head in heads_of(config) if not issubclass(head, GenerationMixin)), None)
    if type(config) not in known or other is not None:
        kind = other or config.model_type
        raise UnsupportedModelError(f"{model_config.model!r} is a {kind}, which is not a causal language model")
    if config.is_encoder_decoder and auto not in ENCODER_DECODER:  # its decoder alone would be built, or see no media
        raise UnsupportedModelError(f"{model_config.model!r} is an encoder-decoder model for images; none is supported")
    return cast("type[PreTrainedModel]", known[type(config)])


def build_model(
    config: PreTrainedConfig,
    model_config: ModelConfig,
    load_config: LoadConfig,
    device: torch.device,
    auto: Any = AutoModelForCausalLM,
    cuts_of: CutsOf | None = None,
    part: StagePart | None = None,
    place: tuple[int, int] = (0, 1),
    rounds: bool = False,
) -> PreTrainedModel:
    """The model that transformers' class `auto` makes of a checkpoint, or the parts of it that `cuts_of` and `part`
    name. place: this rank's number, and the number of ranks. rounds: its weights will be quantized. Errors as
    `load_model`."""
    is_part = cuts_of is not None or part is not None
    with _reading_weights(model_config, load_config) as path:
        own = mistral_files(model_config, load_config)
        experts = None
        if rounds and not own and type(config) in auto._model_mapping and load_config.load_format in MAPPED:
            experts = read_experts(path, model_config.revision or "main", load_config.download_dir)
        if load_config.load_format == "sharded_state" or own or experts:
            if type(config) not in auto._model_mapping:
                form = "mistral" if own else "sharded_state"
                raise UnsupportedModelError(f"load_format {form!r} is for models of transformers' own classes")
            tensors = experts or (read_mistral(own, config) if own else read_parts(Path(path), *place))
            with reading(cuts_of, part) if is_part else nullcontext():
                kind = auto._model_mapping[type(config)]
                found = model_of_tensors(path, kind, config, tensors, model_config, load_config)
            return cast("PreTrainedModel", found.to(device))
    if load_config.load_format != "dummy":
        with (
            _reading_weights(model_config, load_config, _loads_by_own_code(config, auto)) as path,
            reading(cuts_of, part) if is_part else nullcontext(),
        ):
            loaded: Any = auto.from_pretrained(
                path,
                config=config,
                dtype=model_config.dtype,
                revision=model_config.revision or "main",
                cache_dir=load_config.download_dir,
                use_safetensors=True if load_config.load_format == "safetensors" else None,
                trust_remote_code=model_config.trust_remote_code,
                attn_implementation="eager",
                # straight to the device where accelerate is installed, which transformers needs for that
                device_map={"": device} if device.type != "cpu" and is_accelerate_available() else None,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_complete` names them
            )
        return cast("PreTrainedModel", _complete(path, *loaded).to(device))
    dtype = config.dtype or torch.float32 if model_config.dtype == "auto" else getattr(torch, model_config.dtype)
    first = torch.device("meta") if is_part else device
    with _quiet(load_config.use_tqdm_on_load), torch.random.fork_rng(), first:
        torch.manual_seed(model_config.seed)
        model = auto.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=model_config.trust_remote_code
        )
    if part is not None:
        part.cut(model)
    if is_part:
        _fill(model, cuts_of(model) if cuts_of is not None else {}, device, model_config.seed)
    return cast("PreTrainedModel", model.eval())


def _place(backend: Backend | None, stages: Stages | None) -> tuple[int, int]:
    """This rank's number, and the number of ranks."""
    if stages is not None:
        return stages.rank, stages.world.size
    return (backend.group.rank, backend.group.size) if isinstance(backend, ParallelBackend) else (0, 1)


def _fill(model: PreTrainedModel, cuts: Mapping[str, Cut], device: torch.device, seed: int) -> None:
    """Give a model on the meta device the parts of its parameters, with random values. These are the same on all ranks,
    because what ranks hold whole must be."""
    for name, cut in cuts.items():
        path, _, attribute = name.rpartition(".")
        part = nn.Parameter(cut.of(model.get_parameter(name).detach()), requires_grad=False)
        model.get_submodule(path)._parameters[attribute] = part
    model.to_empty(device=device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.init_weights()


def _quantized_model(
    form: Form,
    config: PreTrainedConfig,
    model_class: Any,
    model_config: ModelConfig,
    load_config: LoadConfig,
    pack: Pack | None,
) -> PreTrainedModel:
    """The model of a quantized checkpoint. pack: see `read_quantized`."""
    with _reading_weights(model_config, load_config) as path:
        tensors = read_quantized(form, path, model_config.revision or "main", load_config.download_dir, pack)
        model: PreTrainedModel = model_of_tensors(path, model_class, config, tensors, model_config, load_config)
    if has_integers(model) and model_config.quantization not in (None, form.method):
        raise already_quantized(model_config.quantization, path, form)
    return model


def model_of_tensors(
    path: str,
    model_class: Any,
    config: PreTrainedConfig,
    tensors: Mapping[str, Any],
    model_config: ModelConfig,
    load_config: LoadConfig,
) -> Any:
    """The model that has these tensors as its parameters, with the checkpoint's generation config."""
    loaded = model_class.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=model_config.dtype,
        attn_implementation="eager",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # `_complete` names them
    )
    model = _complete(path, *loaded)
    if model.can_generate():
        where: dict[str, Any] = {"revision": model_config.revision or "main", "cache_dir": load_config.download_dir}
        with suppress(OSError):  # there is none
            model.generation_config = GenerationConfig.from_pretrained(path, **where)
    return model


def _loads_by_own_code(config: PreTrainedConfig, auto: Any) -> bool:
    """Whether a class that `auto` makes of this config may load weights in its own way: it replaces `from_pretrained`,
    or comes with the checkpoint."""
    known = auto._model_mapping
    usual = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    return type(config) not in known or known[type(config)].from_pretrained.__func__ is not usual


@contextmanager
def _reading_weights(model_config: ModelConfig, load_config: LoadConfig, own_code: bool = False) -> Iterator[str]:
    """The folder or hub id to read weights from. An error in this context becomes one that names it. own_code: see
    `_loads_by_own_code`."""
    name = str(Path(model_config.model or "").expanduser())
    try:
        with _quiet(load_config.use_tqdm_on_load), _WithoutSympy():
            yield name
    except (SafetensorError, EOFError, _UNPICKLING) as error:
        raise UnsupportedModelError(f"a weights file of {name!r} is damaged: {_damage(name, error)}") from error
    except AttributeError as error:
        if not own_code:
            raise
        raise UnsupportedModelError(f"the class of {name!r} loads weights by code of its own ({error})") from error
    except OSError as error:
        raise ModelNotFoundError(f"no weights of {name!r} could be read: {_first_line(error)}") from error
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        raise UnsupportedModelError(f"the weights of {name!r} could not be loaded: {_first_line(error)}") from error
    except KeyError as error:  # of an index file
        raise UnsupportedModelError(f"the weights of {name!r} could not be loaded: they lack {error}") from error


def _damage(name: str, error: Exception) -> str:
    """What is wrong with the first file of a folder that is no weights file."""
    for path in sorted(path for files in ("*.safetensors", "pytorch_model*.bin") for path in Path(name).glob(files)):
        with path.open("rb") as file:
            if file.read(12) == b"version http":
                return f"{path.name} is a pointer of Git LFS; `git lfs pull` gets the file itself"
        try:
            load_state_dict(str(path), "meta")
        except Exception as reason:
            return f"{path.name}: {_first_line(reason)}"
    return _first_line(error)


def _complete(name: str, model: Any, info: dict[str, Any]) -> Any:
    """A model for which `info` says how loading it went, unless its weights are not those of its config."""
    if packed := [key for key in sorted(info["unexpected_keys"]) if _QUANTIZED.search(key)]:
        raise UnsupportedModelError(
            f"the checkpoint {name!r} holds {packed[0]!r}, so it is quantized, and its config.json has no "
            f"quantization_config that says how; of quantized checkpoints {SUPPORTED} are read"
        )
    if info["mismatched_keys"]:
        key, found, wanted = min(info["mismatched_keys"])
        raise UnsupportedModelError(
            f"the weights of {name!r} could not be loaded: {key!r} has shape {list(found)}, and by its config it has "
            f"{list(wanted)}"
        )
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))  # of no use without a head
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnsupportedModelError(f"the checkpoint {name!r} lacks the parameter {missing[0]!r}{more}")
    if info["unexpected_keys"]:
        logger.warning("%d tensors of %s are not used by the model", len(info["unexpected_keys"]), name)
    return model


class _WithoutSympy(TorchFunctionMode):
    """Most operations on the meta device, where transformers builds a model, import sympy, a large part of a core's
    start. Here the usual ones do not run there: random values and frequencies of rotary embeddings. They may get lost
    between the two devices, which does no harm: weights are read later, and frequencies are made again then."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.normal_, nn.init.normal_) and (x := args[0] if args else kwargs["tensor"]).is_meta:
            return x
        if func is torch.arange and str(kwargs.get("device")) == "meta":
            kwargs["device"] = "cpu"
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if not any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves((args, kwargs))):
                raise
            args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, kwargs))  # it was of both devices
            return func(*args, **kwargs)


@contextmanager
def _quiet(show_progress: bool) -> Iterator[None]:
    """Keep transformers' own words off the terminal; its progress bar only where the load is long and wanted."""

    def progress_bar(factory: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return factory(*args, **{**kwargs, "delay": PROGRESS_DELAY_S, "disable": None if show_progress else True})

    verbosity = transformers_logging.get_verbosity()
    hook = transformers_logging.set_tqdm_hook(progress_bar)
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.set_tqdm_hook(hook)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
