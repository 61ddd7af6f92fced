"""A core in this process serves prompts with images of real tiny models: the tokens are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import run_core
from mainspring.benchmarks import architectures_media as media
from mainspring.core.loop import EngineCore
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from mainspring.ipc.messages import AddRequest, MediaItem, Sampling

MODELS = ("llava", "gemma3", "paligemma", "qwen2_5_vl")  # rows; spans of items; a span of the prompt; 3-D positions
SHARED = pytest.mark.parametrize(
    "name", [MODELS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in MODELS[1:])]
)


class Served:
    """A tiny model, its requests, and the tokens that transformers gives."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.set_num_threads(1)
        self.model, self.requests, self.expected = media._diverse(name)
        self.model.save_pretrained(folder)
        self.handles = range(name == "paligemma", len(self.requests))  # whose prompts all have images
        self.folder = folder

    def core(self, budget: int = 48, **fields: Any) -> EngineCore:
        core = EngineCore(
            EngineConfig(
                model_config=ModelConfig(model=str(self.folder), skip_tokenizer_init=True),
                cache_config=CacheConfig(num_gpu_blocks_override=100, block_size=8),
                scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget),
                device_config=DeviceConfig(device="cpu"),
                **fields,
            )
        )
        core.connect(0)
        return core

    def send(self, core: EngineCore, handle: int, number: int) -> None:
        request = self.requests[number]
        items = [MediaItem(digest_of(one), one.modality, one.offset, one.length) for one in request.items]
        core.add_request(
            0, AddRequest(handle, "", request.tokens[: request.prompt_len], Sampling(media.MAX_TOKENS), media=items)
        )

    def bring(self, core: EngineCore) -> int:
        """Bring the items that the core lacks. Returns how many."""
        items = {digest_of(item): item for request in self.requests for item in request.items}
        lacking = decode_value(core.call("offer_media", encode_value([list(items)])))
        for digest in lacking:
            arrays = [np.ascontiguousarray(values.numpy()) for values in items[digest].inputs.values()]
            names = list(items[digest].inputs)
            core.call("put_media", encode_value([digest, items[digest].modality, names]), 0, arrays)
        return len(lacking)


def digest_of(item: media.Item) -> bytes:
    return item.number.to_bytes(16, "big")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Served] = {}

    def make(name: str) -> Served:
        if name not in made:
            made[name] = Served(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@SHARED
def test_prompts_with_and_without_images_give_the_tokens_of_transformers(name: str, served: Any) -> None:
    one = served(name)
    core = one.core()
    for handle in one.handles:
        one.send(core, handle, handle)
    ended: dict[Any, Any] = {}
    if 0 in one.handles:
        ended = run_core(core, until=lambda ended: (0, 0) in ended)  # the prompt without images waits for none
    assert one.bring(core) == 2
    ended |= run_core(core)
    assert [ended[0, handle][0] for handle in one.handles] == [one.expected[handle] for handle in one.handles]
    assert core.stats().encoded_items == 2
    assert core.stats().encoder_seconds > 0
    one.send(core, 9, 2)  # from the caches
    assert run_core(core)[0, 9][0] == one.expected[2]
    assert core.stats().encoded_items == 2
    core.close()


@SHARED
def test_images_are_encoded_again_when_the_weights_change(name: str, served: Any) -> None:
    one = served(name)
    core = one.core()
    one.bring(core)
    for handle in one.handles:
        one.send(core, handle, handle)
    while not core.stats().num_running or core.stats().encoded_items < 2:
        core.step()
    key = next(name for name, weight in one.model.named_parameters() if "norm" in name and "language" in name)
    values = one.model.get_parameter(key).detach().numpy()  # as they are
    assert decode_value(core.call("update_weights", encode_value(["v", 0, [key], [0], True]), 0, [values])) is None
    assert core.stats().encoder_bytes == 0
    ended = run_core(core)
    assert core.stats().encoded_items == 4
    for handle in one.handles:
        tokens = ended[0, handle][0]
        assert tokens == one.expected[handle][-len(tokens) :]
    core.close()


def test_guesses_change_no_token_of_a_prompt_with_images(served: Any) -> None:
    one = served("llava")
    core = one.core(speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=3))
    one.bring(core)
    for handle in range(len(one.requests)):
        one.send(core, handle, handle)
    ended = run_core(core)
    assert [ended[0, handle][0] for handle in range(len(one.requests))] == one.expected
    core.close()
