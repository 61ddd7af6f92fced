"""Every class of transformers that takes media in its prompts, or has an encoder for text or sound, tiny and random,
through the worker: `make architectures-media`.

Each is *exact* (greedy fp32 tokens equal to ``model.generate`` for requests with no, one and two items that share steps
of at most 24 tokens, one of them preempted, and one that begins with blocks of another), *refused* with a reason, *not
constructible* (`tiny_media.py` has no tiny config and inputs that transformers itself can run), or *wrong*.

    python -P benchmarks/architectures_media.py                   # all of them, printed
    python -P benchmarks/architectures_media.py --write           # also into docs/models.md
    python -P benchmarks/architectures_media.py llava qwen2_vl    # some
"""

from __future__ import annotations

import inspect
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from mainspring.benchmarks import architectures_readers as readers
from mainspring.benchmarks.architectures import Result, compared, one_line, sweep, write_table
from mainspring.benchmarks.tiny_media import AUDIO, END, IMAGE, START, TINY, VIDEO, Inputs, build
from mainspring.core.memory.updates import TableUpdate
from mainspring.core.model.load.loader import _model_class, auto_class, refuse_config
from mainspring.core.model.media.features import MODALITIES, feature_methods
from mainspring.core.plan.control import KeepMedia
from mainspring.core.plan.step import NewSequence, SequenceMedia, StepPlan
from mainspring.core.worker.generation_worker import GenerationWorker
from mainspring.ipc.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from mainspring.ipc.errors import ModelNotFoundError, UnsupportedModelError
from mainspring.ipc.messages import Sampling

ENOUGH = 60
CPU_LIMIT_S = 240
MEMORY_LIMIT_BYTES = 16 << 30
TIMEOUT_S = 400
WORKERS = 2
MAX_TOKENS = 12
TOKEN_BUDGET = 24
BLOCK_SIZE = 16
GAINS = [(0.3, 1.5), (0.3, 3.0), (1.0, 0.8), (0.3, 0.4), (0.3, 6.0)]
DIVERSE = 9  # distinct tokens among all outputs
CLASSES = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **readers.READERS}
# Parts of a checkpoint that write its text, by the checkpoint's type.
THINKERS = {
    "qwen2_5_omni": "qwen2_5_omni_thinker",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
}  # by the checkpoint they are in
TYPES = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")


class Failed(Exception):
    """A request or an item ended with this error."""


# --- The worker, driven in process ----------------------------------------------------------------


class Item(NamedTuple):
    number: int
    modality: str
    inputs: Inputs
    offset: int
    length: int


class Request:
    def __init__(self, tokens: Sequence[int], items: Sequence[Item] = (), prefix: int = 0) -> None:
        """prefix: tokens that are in the cache already, as those of the request before."""
        self.tokens, self.items, self.prefix = list(tokens), list(items), prefix
        self.prompt_len = len(self.tokens)
        self.slot, self.computed, self.preempted = -1, 0, False
        self.tables = np.zeros((0, 0), np.int32)  # of each group


def worker_of(folder: Path, **device: Any) -> GenerationWorker:
    return GenerationWorker(
        EngineConfig(
            model_config=ModelConfig(model=str(folder)),
            cache_config=CacheConfig(num_gpu_blocks_override=400, block_size=BLOCK_SIZE),
            scheduler_config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
            device_config=DeviceConfig(device="cpu", **device),
        )
    )


class Driver:
    """Serves requests as a scheduler would, with steps of at most `budget` tokens and shuffled blocks."""

    def __init__(self, worker: GenerationWorker, budget: int = TOKEN_BUDGET) -> None:
        self.worker, self.budget = worker, budget
        media = worker.facts.media
        self.spans = media.spans if media is not None else ""
        self.groups = [group for group in worker.facts.groups if group.kind != "recurrent"]
        self.free = list(range(1, worker.facts.num_blocks))
        random.Random(0).shuffle(self.free)
        self.encoded: set[int] = set()
        self.slots = list(range(8))
        self.released: list[int] = []
        self.steps = 0

    def serve(self, requests: Sequence[Request], max_tokens: int = MAX_TOKENS, preempt: int = -1) -> list[list[int]]:
        """Greedy tokens of each request. One more request begins in each step. preempt: the request that loses its
        slot once, when it has three tokens."""
        waiting, running = list(requests), list[Request]()
        for request in requests:
            columns = -(-(len(request.tokens) + max_tokens) // BLOCK_SIZE)
            request.tables = np.array([[self.free.pop() for _ in range(columns)] for _ in self.groups], np.int32)
        for before, request in pairwise(requests):
            shared = request.prefix // BLOCK_SIZE
            request.tables[:, :shared] = before.tables[:, :shared]
        while waiting or running:
            admitted: list[Request] = []
            if waiting and (not waiting[0].prefix or waiting[0].prefix <= self._before(requests, waiting[0]).computed):
                admitted = [waiting.pop(0)]
            self._step(running, admitted)
            for request in list(running):
                done = len(request.tokens) == request.prompt_len + max_tokens
                again = preempt == requests.index(request) and len(request.tokens) - request.prompt_len == 3
                if done or (again and not request.preempted):
                    running.remove(request)
                    self.released.append(request.slot)
                    self.slots.append(request.slot)
                    if not done:
                        request.preempted, request.computed = True, 0
                        waiting.insert(0, request)
        return [request.tokens[request.prompt_len :] for request in requests]

    @staticmethod
    def _before(requests: Sequence[Request], request: Request) -> Request:
        return requests[list(requests).index(request) - 1]

    def _step(self, running: list[Request], admitted: list[Request]) -> None:
        new, tables, encodes = [], [], list[int]()
        for request in admitted:
            request.slot = self.slots.pop(0)
            if not request.preempted:
                request.computed = request.prefix // BLOCK_SIZE * BLOCK_SIZE
            encodes += self._keep(request)
            media = tuple(SequenceMedia(item.number, item.offset, item.length) for item in request.items)
            tokens = np.array(request.tokens, np.int32)
            sampling = Sampling(max_tokens=100)
            new.append(NewSequence(request.slot, tokens, request.prompt_len, sampling, media=media))
            tables += [
                (group, request.slot, column, block)
                for group, row in enumerate(request.tables.tolist())
                for column, block in enumerate(row)
            ]
            running.append(request)
        chosen, counts, left = [], [], self.budget
        for request in running:
            count = self._count(request, left)
            if count > 0:
                chosen.append(request)
                counts.append(count)
                left -= count
        starts = [request.computed for request in chosen]
        for request, count in zip(chosen, counts, strict=True):
            request.computed += count
        samples = [request.computed == len(request.tokens) for request in chosen]
        ids = [t for r, s, n in zip(chosen, starts, counts, strict=True) for t in r.tokens[s : s + n]]
        self.steps += 1
        in_use = {request.slot for request in running}
        plan = StepPlan(
            self.steps,
            *(np.array(x, np.int32) for x in ([r.slot for r in chosen], starts, counts, ids)),
            np.array(samples, bool),
            np.zeros(len(chosen), np.int32),
            new,
            np.array([slot for slot in self.released if slot not in in_use], np.int32),
            TableUpdate(*np.array(tables or np.zeros((0, 4)), np.int32).T),
            [],
            encodes=np.array(encodes, np.int32),
        )
        self.released = []
        result = self.worker.launch(plan).wait()
        for encoded in result.encoded:
            if encoded.error:
                raise Failed(f"{encoded.error}: {encoded.text}")
        for error in result.errors:
            raise Failed(f"{error.error}: {error.text}")
        for request, token in zip((r for r, s in zip(chosen, samples, strict=True) if s), result.tokens, strict=True):
            request.tokens.append(int(token))

    def _keep(self, request: Request) -> list[int]:
        new = [item for item in request.items if item.number not in self.encoded]
        for item in new:
            arrays = [x.numpy() for x in item.inputs.values()]
            self.worker.control(KeepMedia(item.number, item.modality, list(item.inputs), arrays))
            self.encoded.add(item.number)
        return [item.number for item in new]

    def _count(self, request: Request, left: int) -> int:
        start, end = request.computed, min(request.computed + left, len(request.tokens))
        if self.spans == "prompt" and request.items and start < request.prompt_len:
            return len(request.tokens) - start if left == self.budget or len(request.tokens) - start <= left else 0
        for item in request.items if self.spans == "item" else ():
            first, behind = item.offset, item.offset + item.length
            if first < end < behind:  # the item is computed whole, or later
                end = first if first > start else behind if behind - start <= max(left, self.budget) else start
        return end - start


# --- Requests -------------------------------------------------------------------------------------


def requests_for(model: PreTrainedModel, model_type: str, seed: int = 0) -> list[Request]:
    """A text, a prompt with one item, one with two, and one that begins like that."""
    tiny = TINY[model_type]
    inputs = [tiny.make(seed + 1), tiny.make(seed + 2)]
    lengths = [len(rows_of(model, tiny.modality, each)) for each in inputs]
    token = (
        getattr(model.config, f"{tiny.modality}_token_id", None)
        or {"image": IMAGE, "video": VIDEO, "audio": AUDIO}[tiny.modality]
    )

    def prompt(*parts: int) -> tuple[list[int], list[Item]]:
        """parts: lengths of texts, and between them the items."""
        ids, items = list[int](), list[Item]()
        for number, length in enumerate(parts):
            if number:
                ids.append(START)
                items.append(Item(seed * 10 + number, tiny.modality, inputs[number - 1], len(ids), lengths[number - 1]))
                ids += [token] * lengths[number - 1] + [END]
            generator = torch.Generator().manual_seed(10 * length + number)
            ids += torch.randint(2, 299, (length,), generator=generator).tolist()
        return ids, items

    two, items = prompt(3, 9, 4)
    return [
        Request(*prompt(30)),
        Request(*prompt(5, 6)),
        Request(two, items),
        Request([*two, 7, 8, 9], items, prefix=len(two) - 1),
    ]


@torch.inference_mode()
def rows_of(model: PreTrainedModel, modality: str, inputs: Inputs) -> torch.Tensor:
    """Features of items: ``[rows, hidden]``."""
    name = f"get_{modality}_features"
    method = getattr(model.base_model, name, None) or getattr(model, name)
    accepted = inspect.signature(method).parameters
    output = method(**{k: v for k, v in inputs.items() if k in accepted}, return_dict=True)
    rows = output.get("pooler_output")
    if rows is None and "deepstack_features" in output:  # of the first layer that gets some
        rows = output["deepstack_features"][0][1]
    rows = output.last_hidden_state if rows is None else rows
    parts = rows if isinstance(rows, list | tuple) else [rows]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def generate_alone(model: PreTrainedModel, request: Request, max_tokens: int = MAX_TOKENS) -> list[int]:
    """Greedy tokens of transformers alone."""
    ids = torch.tensor([request.tokens[: request.prompt_len]])
    inputs: dict[str, Any] = {}
    if request.items:
        inputs = dict(joined(request.items, TINY[model.config.model_type].axis))
        kinds = torch.zeros_like(ids)
        if model.config.model_type != "paligemma":  # whose processor says that a prompt is of one kind
            for item in request.items:
                kinds[0, item.offset : item.offset + item.length] = 1 + MODALITIES.index(item.modality)
        methods = model.forward, model.prepare_inputs_for_generation
        inputs |= {name: kinds for name in TYPES if any(name in inspect.signature(m).parameters for m in methods)}
    for module in (model, model.base_model):
        if hasattr(module, "rope_deltas"):
            module.rope_deltas = None  # of the request before
    model.generation_config.eos_token_id = None
    output: Any = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, **inputs
    )
    return output[0, -max_tokens:].tolist()  # type: ignore[no-any-return]


# --- One architecture -----------------------------------------------------------------------------


def judge(model_type: str, built: Callable[[], None] = lambda: None) -> Result:
    """built: called when transformers has made all that is compared."""
    torch.set_num_threads(1)
    if model_type in readers.READERS:
        return judge_reader(model_type, built)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model, requests, expected = _diverse(THINKERS.get(model_type, model_type))
            model.save_pretrained(folder)
            if model_type in THINKERS:
                join_talker(folder, model_type)
        except Exception as error:
            return _refused_unbuilt(model_type) or _refused_without_inputs(model_type, folder, one_line(error))
        built()
        try:
            worker = worker_of(folder)
            if worker.facts.media is None:
                return _without_media(worker)
            if worker.model.states is not None:  # a prefix would need a snapshot of the state
                requests, expected = requests[:3], expected[:3]
            if worker.facts.media.spans == "prompt":  # no prefix is shared, and `generate` has no causal text
                requests, expected = requests[1:3], expected[1:3]
            note = ""
            if not _encodes_alone(model, requests):
                note = "with one item; of several, transformers makes other features than of each alone"
                chosen = [len(request.items) < 2 for request in requests]
                requests, expected = ([x for x, c in zip(y, chosen, strict=True) if c] for y in (requests, expected))
            tokens = Driver(worker).serve(requests, preempt=1)
        except ModelNotFoundError as error:  # transformers writes less than it reads
            return Result("not constructible", one_line(error))
        except Exception as error:
            return _result_of(error, folder)
    return compared(tokens, expected, note)


def join_talker(folder: Path, model_type: str) -> None:
    """Make a checkpoint of a model that thinks one that also holds a model that speaks, of which only a tensor is
    written."""
    config = CONFIG_MAPPING[model_type](thinker_config=json.loads((folder / "config.json").read_text()))
    config.architectures = [CLASSES[model_type]]
    config.save_pretrained(folder)
    weights = folder / "model.safetensors"
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(weights).items()}
    save_file({**tensors, "talker.codec_head.weight": torch.ones(2, 2)}, weights, {"format": "pt"})


def _result_of(error: Exception, folder: Path) -> Result:
    """The result of a model that an error kept from being served."""
    text, unsupported = str(error).replace(str(folder), "the checkpoint"), "UnsupportedModelError: "
    if isinstance(error, UnsupportedModelError) or (isinstance(error, Failed) and text.startswith(unsupported)):
        return Result("refused", text.removeprefix(unsupported))
    return Result("wrong", text if isinstance(error, Failed) else "raised " + one_line(error))


def judge_reader(model_type: str, built: Callable[[], None]) -> Result:
    """As `judge`, of an encoder-decoder model."""
    refused = _refused_unbuilt(model_type)
    if refused is not None:
        return refused
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            readers.build(model_type, GAINS[0], folder)
        except Exception as error:
            return Result("not constructible", one_line(error))
        try:
            worker_of(folder)
        except ModelNotFoundError as error:
            return Result("not constructible", one_line(error))
        except UnsupportedModelError as error:
            return Result("refused", str(error).replace(str(folder), "the checkpoint"))
        try:
            model, requests, expected = _diverse_reader(model_type, folder)
            model.save_pretrained(folder)
        except Exception as error:
            return Result("not constructible", one_line(error))
        built()
        try:
            tokens = Driver(worker_of(folder)).serve(requests, preempt=1)
        except Exception as error:
            return _result_of(error, folder)
    return compared(tokens, expected, "")


def _diverse_reader(model_type: str, folder: Path) -> tuple[PreTrainedModel, list[Request], list[list[int]]]:
    """As `_diverse`, of an encoder-decoder model."""
    best: Any = None
    for gains in GAINS:
        model = readers.build(model_type, gains, folder)
        items = [Item(seed, *readers.encoder_inputs(model, seed), 0, 0) for seed in (1, 2)]
        long = readers.prompt(20)
        requests = [
            Request(readers.prompt(1), items[:1]),
            Request(readers.prompt(30), items[1:]),
            Request(long, items[1:]),
            Request([*long, 7, 8, 9], items[1:], prefix=len(long) - 1),
        ]
        expected = [readers.generate(model, r.items[0].inputs, r.tokens, MAX_TOKENS) for r in requests]
        other = readers.generate(model, items[0].inputs, long, MAX_TOKENS) != expected[2]
        distinct = len({token for text in expected for token in text})
        if best is None or (other, distinct) > best[0]:
            best = (other, distinct), model, requests, expected
        if best[0] >= (True, DIVERSE):
            break
    if not best[0][0]:
        raise ValueError("its tokens do not depend on the encoder's input, whatever the gains")
    return best[1:]  # type: ignore[no-any-return]


@torch.inference_mode()
def _encodes_alone(model: PreTrainedModel, requests: Sequence[Request]) -> bool:
    """Whether the model's features of two items are those of each alone."""
    items = next(request.items for request in requests if len(request.items) > 1)
    modality, axis = items[0].modality, TINY[model.config.model_type].axis
    joint = rows_of(model, modality, joined(items, axis))
    alone = torch.cat([rows_of(model, modality, item.inputs) for item in items])
    return joint.shape == alone.shape and torch.allclose(joint, alone, atol=1e-4 * float(alone.abs().max()))


def joined(items: Sequence[Item], axis: int) -> Inputs:
    """What a processor gives for several items. axis: see `Tiny`."""
    names = items[0].inputs
    found = {n: torch.cat([item.inputs[n] for item in items], axis if n == "pixel_values" else 0) for n in names}
    if "image_token_pooling" in found:  # numbers of patches, which go on from item to item
        patches = items[0].inputs["pixel_values"].shape[:2].numel()
        parts = [item.inputs["image_token_pooling"] + patches * number for number, item in enumerate(items)]
        found["image_token_pooling"] = torch.cat(parts)
    return found


def _diverse(model_type: str) -> tuple[PreTrainedModel, list[Request], list[list[int]]]:
    """Build with the first gains that make tokens diverse, and dependent on the media."""
    best: Any = None
    for gains in GAINS:
        model, _ = build(model_type, gains)
        if not feature_methods(model):
            return model, [], []  # refused at load
        if model_type not in TINY:
            raise ValueError("no inputs are written for it")
        requests = requests_for(model, model_type)
        try:
            expected = [generate_alone(model, requests[0])]
        except Exception:  # such a model generates for images alone
            requests, expected = requests[1:], []
        expected += [generate_alone(model, request) for request in requests[len(expected) :]]
        distinct = len({token for text in expected for token in text})
        one = next(i for i, request in enumerate(requests) if request.items)
        other = generate_alone(model, requests_for(model, model_type, seed=2)[1]) != expected[one]
        if best is None or (other, distinct) > best[0]:
            best = (other, distinct), model, requests, expected
        if best[0] >= (True, DIVERSE):
            break
    if not best[0][0]:
        raise ValueError("its tokens do not depend on its media, whatever the gains")
    return best[1:]  # type: ignore[no-any-return]


def _refused_unbuilt(model_type: str) -> Result | None:
    config = CONFIG_MAPPING[model_type]()
    config.architectures = [CLASSES[model_type]]
    try:
        refuse_config(config, "the checkpoint")
        _model_class(config, ModelConfig(model="the checkpoint"), auto_class(config))
    except UnsupportedModelError as error:
        return Result("refused", str(error))
    return None


def _refused_without_inputs(model_type: str, folder: Path, why: str) -> Result:
    """Of a model for which there are no inputs that transformers itself can run: whether it is refused at load."""
    try:
        build(model_type)[0].save_pretrained(folder)
        worker = worker_of(folder)
    except UnsupportedModelError as error:
        if "could not be loaded" in str(error):  # transformers writes other weights than it reads
            return Result("not constructible", why)
        return Result("refused", str(error).replace(str(folder), "the checkpoint"))
    except Exception:
        return Result("not constructible", why)
    return Result("not constructible", why) if worker.facts.media is not None else _without_media(worker)


def _without_media(worker: GenerationWorker) -> Result:
    notes = [line.removeprefix("media: not served: ") for line in worker._explained if line.startswith("media: ")]
    return Result("refused", (notes or ["its class has no method that encodes media apart from its prompt"])[0])


# --- All of them ----------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    started, write = time.monotonic(), "--write" in arguments
    names = [name for name in arguments if name != "--write"]
    results = sweep(names or CLASSES, judge, CPU_LIMIT_S, TIMEOUT_S)
    counts = Counter(result.outcome for result in results.values())
    print(
        ", ".join(f"{outcome}: {count}" for outcome, count in counts.items()), f"({time.monotonic() - started:.0f} s)"
    )
    if write:
        write_table("architectures-media", results, CLASSES)
    return int(counts["wrong"] > 0 or (not names and counts["exact"] < ENOUGH))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
