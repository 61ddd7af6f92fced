"""Prompts with media through a worker: what a model's own front makes of them, put into steps that others share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mainspring.benchmarks.architectures_media import (
    Driver,
    Item,
    Request,
    generate_alone,
    judge,
    requests_for,
    worker_of,
)
from mainspring.benchmarks.tiny_media import IMAGE, build
from mainspring.core.memory.updates import TableUpdate
from mainspring.core.model.media.door import Door
from mainspring.core.model.media.features import EncodedItem, encode_item, join_inputs, join_outputs
from mainspring.core.model.media.merge import MergedPrompt, Merger, reach_of
from mainspring.core.plan.control import DropMedia, KeepMedia
from mainspring.core.plan.step import NewSequence, SequenceMedia, StepPlan
from mainspring.core.worker.generation_worker import GenerationWorker
from mainspring.ipc.errors import UnsupportedModelError
from mainspring.ipc.messages import Sampling
from mainspring.kernels.native.weights import PanelWeight

FEW = 6  # tokens to generate
SAMPLING = Sampling(max_tokens=FEW)
# one of each kind: rows alone (and a model that runs as a whole); positions on three axes; rows for the first layers;
# items that see both ways; prompts that do; embeddings by token id in each layer
KINDS = ["llava", "qwen2_vl", "qwen3_vl", "gemma3", "paligemma", "gemma4"]
SPANS = {"gemma3": "item", "gemma4": "item", "paligemma": "prompt"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Served:
    def __init__(self, folder: Path, kind: str) -> None:
        self.model, _ = build(kind)
        self.model.save_pretrained(folder)
        self.kind, self.folder = kind, folder
        self.worker = worker_of(folder)

    def requests(self) -> list[Request]:
        every = requests_for(self.model, self.kind)
        return every[1:3] if self.kind == "paligemma" else every

    def serve(self, requests: list[Request], budget: int = 24, preempt: int = -1) -> list[list[int]]:
        driver = Driver(self.worker, budget)
        tokens = driver.serve(requests, FEW, preempt)
        for number in driver.encoded:
            self.worker.control(DropMedia(number))
        return tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Served] = {}

    def of(kind: str) -> Served:
        if kind not in made:
            made[kind] = Served(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return of


def test_a_model_with_positions_of_several_axes_runs_as_a_whole(served: Any) -> None:
    model = served("qwen2_vl").worker.model
    assert model.position_axes == 3
    assert model.whole is not None


@pytest.mark.parametrize("kind", ["llava", "qwen3_5_moe"])
def test_the_first_prompt_with_media_unpacks_one_weight_at_a_time(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Served(tmp_path, kind)
    assert here.worker.model.whole is not None
    made: list[StorageWeakRef] = []
    unpack = PanelWeight.unpack

    def noted(self: PanelWeight) -> torch.Tensor:
        out = unpack(self)
        made.append(StorageWeakRef(out.untyped_storage()))
        live.append(sum(not each.expired() for each in made))
        return out

    live: list[int] = []
    monkeypatch.setattr(PanelWeight, "unpack", noted)
    here.serve([here.requests()[1]])
    assert len(live) > 4 * here.worker.model.config.num_hidden_layers
    assert max(live) <= 2
    assert all(packed.unpack().numel() for packed in here.worker.model.parameters.packed.values())


def test_encoders_write_no_scores_to_memory(served: Any) -> None:
    model = served("qwen2_vl").worker.model.model
    assert model.base_model.visual.config._attn_implementation == "sdpa"
    assert model.get_decoder().config._attn_implementation != "sdpa"


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_generate_in_shared_steps_and_after_preemption(served: Any, kind: str) -> None:
    here = served(kind)
    expected = [generate_alone(here.model, request, FEW) for request in here.requests()]
    assert here.worker.facts.media.spans == SPANS.get(kind, "")
    assert here.serve(here.requests(), preempt=1) == expected
    assert any("verified: logits of a prompt with image" in line for line in here.worker._explained)


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "gemma3"])
def test_logits_have_the_same_bits_alone_and_in_other_chunks(
    served: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = served(kind)
    rows: list[torch.Tensor] = []
    forward = type(here.worker.runner).forward

    def noted(self: Any, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, *more: Any) -> torch.Tensor:
        logits = forward(self, slots, starts, counts, *more)
        if self is here.worker.runner:
            rows.extend(logits.clone())
        return logits

    monkeypatch.setattr(type(here.worker.runner), "forward", noted)
    found = []
    for others, budget in ((False, 64), (True, 24), (True, 17)):
        rows.clear()
        request = here.requests()[2]
        before = here.requests()[:2] if others else []
        here.serve([*before, request], budget)
        found.append({tuple(row.tolist()) for row in rows})
    assert found[0] <= found[1]
    assert found[0] <= found[2]


def test_a_prompt_with_another_image_gives_other_tokens(served: Any) -> None:
    here = served("llava")
    one, other = here.requests()[1], requests_for(here.model, "llava", seed=2)[1]
    assert here.serve([one])[0] != here.serve([other])[0]


def test_an_item_that_can_not_be_encoded_is_an_error_of_its_own(served: Any) -> None:
    worker = served("llava").worker
    worker.control(KeepMedia(70, "image", ["pixel_values"], [np.zeros((1, 3, 5, 5), np.float32)]))
    worker.control(KeepMedia(71, "sound", ["input_features"], [np.zeros((1, 4), np.float32)]))
    worker.control(KeepMedia(72, "image", ["pixels"], [np.zeros((1, 3, 28, 28), np.float32)]))
    worker.control(KeepMedia(73, "image", ["pixel_values"], [np.zeros((1, 3, 28, 28), np.float32)]))
    worker.beat = Mock()
    found = worker._media.encode([70, 71, 72, 73, 74], worker.beat)
    assert worker.beat.call_count == 5  # the watchdog need not wait for all
    assert [each.number for each in found] == [70, 71, 72, 73, 74]
    assert [bool(each.error) for each in found] == [True, True, True, False, True]
    assert "takes no sound" in found[1].text
    assert "gave no 'pixel_values'" in found[2].text
    assert found[3].num_bytes >= 4 * 64 * 4  # four rows
    worker.control(DropMedia(73))
    assert not worker._media._encoded.keys() & {70, 71, 72, 73, 74}


def test_a_prompt_whose_placeholders_do_not_fit_ends_alone(served: Any) -> None:
    here = served("llava")
    text, one = here.requests()[:2]
    bad = Request([5, IMAGE, IMAGE, 6, 7], [Item(90, "image", one.items[0].inputs, 1, 2)])
    errors = step_of(here.worker, [bad, text])
    assert [error.row for error in errors] == [0]
    assert errors[0].error == "UnsupportedModelError"
    assert "could not merge" in errors[0].text


def step_of(worker: GenerationWorker, requests: list[Request]) -> Any:
    """The errors of one step that admits these requests at the first slots and computes all their tokens."""
    driver = Driver(worker)
    new, encodes = [], list[int]()
    for slot, request in enumerate(requests):
        encodes += driver._keep(request)
        media = tuple(SequenceMedia(item.number, item.offset, item.length) for item in request.items)
        tokens = np.array(request.tokens, np.int32)
        new.append(NewSequence(slot, tokens, len(tokens), SAMPLING, media=media))
    counts = [len(request.tokens) for request in requests]
    tables = [(0, slot, column, 1 + 9 * slot + column) for slot in range(len(requests)) for column in range(3)]
    plan = StepPlan(
        1,
        *(np.array(x, np.int32) for x in (range(len(counts)), [0] * len(counts), counts)),
        np.concatenate([sequence.tokens for sequence in new]),
        np.ones(len(counts), bool),
        np.zeros(len(counts), np.int32),
        new,
        np.zeros(0, np.int32),
        TableUpdate(*np.array(tables, np.int32).T),
        [],
        encodes=np.array(encodes, np.int32),
    )
    errors = worker.launch(plan).wait().errors
    for number in driver.encoded:
        worker.control(DropMedia(number))
    return errors


def test_a_class_that_merges_media_otherwise_is_refused_when_it_is_first_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Served(tmp_path, "qwen2_vl")
    merge = Merger.merge

    def shifted(self: Merger, ids: Any, items: Any) -> Any:
        merged = merge(self, ids, items)
        assert merged.positions is not None
        return merged._replace(positions=merged.positions[::-1].copy())

    monkeypatch.setattr(Merger, "merge", shifted)
    for _ in range(2):
        (error,) = step_of(here.worker, [here.requests()[1]])
        assert error.error == "UnsupportedModelError"
        assert "gives other logits for a prompt with image than alone" in error.text
    text = here.requests()[0]
    assert here.serve([text]) == [generate_alone(here.model, text, FEW)]  # text alone is served


@pytest.mark.parametrize("kind", ["mllama", "blip-2"])
def test_a_class_without_a_door_is_refused_at_load(tmp_path: Path, kind: str) -> None:
    model, _ = build(kind)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError):
        worker_of(tmp_path)


@pytest.mark.parametrize("kind", ["qwen2_audio", "llama4"])
def test_a_model_that_encodes_inside_of_its_own_forward_or_is_its_own_base_is_exact(kind: str) -> None:
    assert judge(kind).outcome == "exact"


@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_the_thinker_of_a_checkpoint_with_a_talker_writes_the_text(kind: str) -> None:
    assert judge(kind).outcome == "exact"


def test_encoders_keep_their_attention(served: Any) -> None:
    model = served("llava").worker.model.model
    assert model.get_decoder().config._attn_implementation == "mainspring"
    assert model.model.vision_tower.config._attn_implementation in ("eager", "sdpa")


def test_the_reach_of_tokens_is_read_from_the_mask_alone() -> None:
    group = torch.tensor([-1, 0, 0, 0, -1, -1, 1, 1])

    def mask(_b: Any, _h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) | ((group[query] == group[key]) & (group[key] >= 0))

    seen = reach_of(mask, 8, torch.device("cpu"))
    assert seen is not None
    assert seen.tolist() == [0, 3, 3, 3, 4, 5, 7, 7]
    assert reach_of(lambda _b, _h, query, key: key <= query, 8, torch.device("cpu")) is None


def test_the_mask_of_a_long_audio_is_kept_because_positions_depend_on_it() -> None:
    model = build("qwen2_5_omni")[0].thinker
    frames = 9000
    arrays = {
        "input_features": torch.zeros(1, model.config.audio_config.num_mel_bins, frames),
        "feature_attention_mask": torch.ones(1, frames, dtype=torch.int64),
    }
    inputs = encode_item(model, "audio", arrays).inputs
    assert inputs["feature_attention_mask"].sum() == frames
    assert inputs["input_features"].untyped_storage().nbytes() == 4


def test_items_are_joined_as_if_the_processor_had_made_them_together() -> None:
    big = torch.zeros(()).expand(2, 3, 1000, 1000)
    one = EncodedItem("image", [torch.ones(2, 4)], {"mask": torch.ones(1, 3), "pixels": big})
    other = EncodedItem("image", [torch.zeros(1, 4)], {"mask": torch.ones(1, 5), "pixels": big})
    inputs = join_inputs([one, other])
    assert inputs["mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert inputs["pixels"].shape == (4, 3, 1000, 1000)
    assert [len(part) for part in join_outputs([one.output, other.output])] == [2, 1]
    assert one.num_bytes == 8 * 4 + 3 * 4 + 4


def test_only_steps_inside_a_prompt_with_media_run_without_a_graph() -> None:
    door = Door(1, False)
    slots = np.array([0, 3])
    assert not door.computes(slots, np.array([0, 0]))
    door.admit(3, MergedPrompt(5, {}, None, None, 0, (None, None)))
    assert door.computes(slots, np.array([9, 4]))
    assert not door.computes(slots, np.array([0, 5]))
    door.release(3)
    assert not door.computes(slots, np.array([9, 4]))
