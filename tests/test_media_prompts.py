"""The frontend's part of prompts with media: forms of items, parts of conversations, limits, names, ends.

A stand-in prepares the media here. test_media.py has real ones.
"""

from __future__ import annotations

import asyncio
import base64
import gc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from mainspring import AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from mainspring.demo import MODEL_PATH
from mainspring.engine.chat_methods import chat_prompt
from mainspring.engine.frontend import open_media
from mainspring.engine.request.input_processor import Ahead, EngineCoreRequest, InputProcessor, core_messages
from mainspring.engine.request.media_inputs import given_items
from mainspring.engine.request.prompt_media import PromptMedia, done
from mainspring.engine.text.tokenizer import Tokenizer, load_tokenizer
from mainspring.ipc.config import EngineConfig, MultiModalConfig
from mainspring.ipc.errors import (
    DuplicateRequestError,
    InvalidArgumentError,
    InvalidRequestError,
    MainspringError,
    NotSupportedError,
)
from mainspring.ipc.media_client import MediaInput, PreparedPrompt
from mainspring.ipc.messages import MediaItem, ModelFacts
from mainspring.ipc.request_check import RequestCheck
from mainspring.ipc.shared_client import FollowingClient, LeadingClient, Told
from stand_in_core import StandInOwner, stand_in

PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
PICTURE = Image.fromarray(PIXELS)
FILE = b"a file"
URL = "data:image/png;base64,AAAA"
FACTS = ModelFacts(vocab_size=1024, hidden_size=4, max_model_len=64, dtype="float32", media=["image", "audio"])


class StandInMedia:
    """A `MediaClient`: an item takes two tokens, 9, before the prompt's others."""

    def __init__(self, waits: bool = False) -> None:
        self.asked: list[tuple[Any, list[MediaInput], dict[str, Any], bool]] = []
        self.futures: list[Future[PreparedPrompt]] = []
        self.delivered: list[PreparedPrompt] = []
        self.forgotten: list[PreparedPrompt] = []
        self.waits, self.resets, self.closed = waits, 0, False

    def prepare(
        self, prompt: Any, inputs: Sequence[MediaInput], kwargs: dict[str, Any], add_special_tokens: bool = True
    ) -> Future[PreparedPrompt]:
        self.asked.append((prompt, list(inputs), kwargs, add_special_tokens))
        self.futures.append(Future())
        if not self.waits:
            self.answer(-1)
        return self.futures[-1]

    def answer(self, at: int) -> None:
        prompt, inputs, *_ = self.asked[at]
        items = [MediaItem(bytes([i]) * 16, given.modality, 2 * i, 2) for i, given in enumerate(inputs)]
        rest = prompt if isinstance(prompt, list) else [len(prompt)]
        if self.futures[at].set_running_or_notify_cancel():
            self.futures[at].set_result(PreparedPrompt([9] * 2 * len(inputs) + rest, items))

    def deliver(self, prepared: PreparedPrompt, inputs: Sequence[MediaInput], core: int = 0) -> None:
        self.delivered.append(prepared)

    def forget(self, prepared: PreparedPrompt) -> None:
        self.forgotten.append(prepared)

    def reset_cache(self) -> Future[None]:
        self.resets += 1
        return done(None)

    def close(self) -> None:
        self.closed = True


class Prompts:
    """An input processor with a stand-in."""

    def __init__(self, config: MultiModalConfig | None = None, waits: bool = False) -> None:
        self.client = StandInMedia(waits)
        self.media = PromptMedia(config or MultiModalConfig(), FACTS.media, lambda: self.client)
        self.processor = InputProcessor(load_tokenizer(MODEL_PATH), RequestCheck(FACTS), [2], media=self.media)

    def process(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> EngineCoreRequest:
        return self.processor.process_inputs("r", prompt, params or SamplingParams(), **options)


# ------------------------------------------------------------------ forms of items

CHANNELS_FIRST = torch.from_numpy(PIXELS).permute(2, 0, 1)
SOUND = np.array([0.0, 0.5, -0.5], np.float32)
FRAMES = np.stack([PIXELS, PIXELS + 1])


@pytest.mark.parametrize(
    ("modality", "given"),
    [("image", PIXELS), ("image", FRAMES), ("video", FRAMES), ("video", [PIXELS, PIXELS]), ("audio", SOUND)],
)
def test_an_item_is_as_it_was_given_if_the_caller_changes_its_array(modality: str, given: Any) -> None:
    own = [one.copy() for one in given] if isinstance(given, list) else given.copy()
    items = given_items({modality: own})
    for array in own if isinstance(own, list) else [own]:
        array[:] = 0
    for item, expected in zip(items, given_items({modality: given}), strict=True):
        assert item.input is not None
        assert expected.input is not None
        assert np.array_equal(item.input.content, expected.input.content)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("modality", "given", "contents"),
    [
        ("image", FILE, [FILE]),
        ("image", [bytearray(FILE), memoryview(FILE)], [FILE, FILE]),
        ("image", [URL, "https://x/y.png", "file:///a"], [URL, "https://x/y.png", "file:///a"]),
        ("image", PICTURE, [PIXELS]),
        ("image", (PICTURE, PICTURE.convert("RGBA")), [PIXELS, PIXELS]),
        ("image", PIXELS, [PIXELS]),
        ("image", np.stack([PIXELS, PIXELS]), [PIXELS, PIXELS]),
        ("image", torch.from_numpy(PIXELS), [PIXELS]),
        ("image", [CHANNELS_FIRST], [PIXELS]),
        ("video", FRAMES, [FRAMES]),
        ("video", [FRAMES, FILE], [FRAMES, FILE]),
        ("video", [PICTURE, Image.fromarray(PIXELS + 1)], [FRAMES]),
        ("video", torch.from_numpy(FRAMES).permute(0, 3, 1, 2), [FRAMES]),
        ("audio", SOUND, [SOUND]),
        ("audio", SOUND.tolist(), [SOUND]),
        ("audio", [SOUND, FILE], [SOUND, FILE]),
        ("audio", (SOUND * 32768).astype(np.int16), [SOUND]),
        ("audio", np.stack([SOUND, SOUND]).T, [SOUND]),
    ],
)
def test_each_form_of_an_item(modality: str, given: Any, contents: list[Any]) -> None:
    if modality == "audio" and getattr(given, "ndim", 1) == 2:
        given = [given]  # of two channels
    found = [item.input for item in given_items({modality: given})]
    assert len(found) == len(contents)
    for item, wanted in zip(found, contents, strict=True):
        assert item is not None
        assert item.modality == modality
        assert type(item.content) is type(wanted)
        if isinstance(wanted, np.ndarray):
            assert item.content.dtype == wanted.dtype  # type: ignore[union-attr]
            assert np.array_equal(item.content, wanted)
        else:
            assert item.content == wanted


def test_facts_of_raw_content_come_along() -> None:
    metadata = {"fps": 2.0, "frames_indices": np.array([0, 5]), "total_num_frames": 9, "video_backend": "opencv"}
    video, sound = given_items({"audio": (SOUND, 8000), "video": (FRAMES, metadata)})
    assert video.input is not None
    assert sound.input is not None
    assert video.input.facts == {"fps": 2.0, "frames_indices": [0, 5], "total_num_frames": 9}
    assert sound.input.facts == {"sampling_rate": 8000}
    two = given_items({"audio": [(SOUND, 8000), (SOUND, 16000)], "video": [(FRAMES, metadata), FRAMES]})
    facts = [dict(item.input.facts) for item in two if item.input]
    assert facts[1:] == [{}, {"sampling_rate": 8000}, {"sampling_rate": 16000}]
    (video,) = given_items({"video": (FRAMES, 2.0)})
    assert video.input is not None
    assert video.input.facts == {"fps": 2.0}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"image": "/etc/passwd"}, "a str must be a URL"),
        ({"image": 1}, r"image 0 of multi_modal_data is int64 \[\]"),
        ({"image": [FILE, PIXELS.astype(np.float32)]}, r"image 1 .* is float32 \[2, 4, 3\]; .* uint8 \[height, width"),
        ({"image": np.zeros((2, 2), np.uint8)}, "uint8"),
        ({"image": [[object()]]}, "give bytes, a URL"),
        ({"image": None, "audio": np.zeros((20, 30), np.float32)[None]}, r"must be floats \[samples\]"),
        ({"audio": np.zeros(3, bool)}, "give bytes"),
        ({"images": FILE}, "did you mean 'image'"),
        ([FILE], "multi_modal_data is .*must be a dict"),
        ({"image": [FILE, None]}, "image 1 of multi_modal_data is None"),
        ({"video": [PICTURE, PICTURE.resize((9, 9))]}, "all of one size"),
    ],
)
def test_an_item_of_no_form_is_refused(data: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        given_items(data)


def test_embeddings_of_media_and_wrong_uuids_are_refused() -> None:
    with pytest.raises(NotSupportedError, match="embeddings of media"):
        given_items({"image": {"image_embeds": PIXELS}})
    with pytest.raises(InvalidRequestError, match="2 names for 1 image items"):
        given_items({"image": FILE}, {"image": ["a", "b"]})
    with pytest.raises(InvalidRequestError, match=r"uuid of image 0 .* is 5"):
        given_items({"image": FILE}, {"image": [5]})
    assert given_items({"image": FILE}, {"image": ["a" * 256]})[0].uuid == "a" * 256
    with pytest.raises(InvalidRequestError, match=r"uuid of image 0 .* has 257 characters; the limit is 256"):
        given_items({"image": FILE}, {"image": ["a" * 257]})
    with pytest.raises(InvalidRequestError, match="is 5 for image"):
        given_items({"image": FILE}, {"image": 5})


# ------------------------------------------------------------------ prompts


def test_a_prompt_gets_the_expanded_tokens_and_its_items() -> None:
    prompts = Prompts()
    kwargs = {"size": 4}
    prompt = {"prompt": "<image>hello", "multi_modal_data": {"image": FILE}, "mm_processor_kwargs": kwargs}
    request = prompts.process(prompt, SamplingParams(n=2), tokenization_kwargs={"add_special_tokens": False})
    assert (request.prompt, request.prompt_token_ids) == ("<image>hello", [9, 9, 12])
    assert prompts.client.asked == [("<image>hello", [MediaInput("image", FILE)], kwargs, False)]
    first, second = core_messages(request, [1, 2])
    assert first.media == second.media == [MediaItem(bytes(16), "image", 0, 2)]
    request = prompts.process({"prompt_token_ids": [5, 6], "multi_modal_data": {"image": [FILE, FILE]}})
    assert request.prompt_token_ids == [9, 9, 9, 9, 5, 6]
    assert prompts.process({"prompt": "hello", "multi_modal_data": {"image": []}}).media is None
    assert prompts.process({"prompt": "hello", "multi_modal_data": {}}).media is None
    assert len(prompts.client.asked) == 2


def test_another_tokenizer_sends_tokens_instead_of_text() -> None:
    prompts = Prompts()
    prompts.processor.use_tokenizer(load_tokenizer(MODEL_PATH))
    prompts.process({"prompt": "hello", "multi_modal_data": {"image": FILE}})
    assert prompts.client.asked[0][0] == prompts.processor.encode("hello")


def test_limits_and_what_the_model_takes() -> None:
    prompts = Prompts(MultiModalConfig(limit_mm_per_prompt={"image": 1}))
    with pytest.raises(InvalidRequestError, match="has 2 image items; limit_mm_per_prompt allows 1"):
        prompts.process({"prompt": "x", "multi_modal_data": {"image": [FILE, FILE]}})
    with pytest.raises(InvalidRequestError, match="has 33 audio items; limit_mm_per_prompt allows 32"):
        prompts.process({"prompt": "x", "multi_modal_data": {"audio": [FILE] * 33}})
    with pytest.raises(NotSupportedError, match=r"multi_modal_data of 'video'; this model takes: text, image, audio"):
        prompts.process({"prompt": "x", "multi_modal_data": {"video": FILE}})
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens is 2"):
        prompts.process({"prompt": "x", "multi_modal_data": {"image": FILE}}, SamplingParams(truncate_prompt_tokens=2))
    with pytest.raises(InvalidRequestError, match="mm_processor_kwargs is 3"):
        prompts.process({"prompt": "x", "multi_modal_data": {"image": FILE}, "mm_processor_kwargs": 3})


def test_an_item_may_be_left_out_when_its_uuid_is_known() -> None:
    prompts = Prompts(MultiModalConfig(mm_processor_cache_gb=2148 / 2**30))
    ask = {"prompt": "x", "multi_modal_data": {"image": None}, "multi_modal_uuids": {"image": "a"}}
    again = [
        ask,
        {"prompt": "x", "multi_modal_uuids": {"image": ["a"]}},
        {**ask, "multi_modal_data": {"image": [None]}},
    ]
    for prompt in again:
        with pytest.raises(InvalidRequestError, match="image with uuid 'a' is not known"):
            prompts.process(prompt)
    prompts.process({**ask, "multi_modal_data": {"image": FILE}})
    for prompt in again:
        prompts.process(prompt)
    assert [asked[1] for asked in prompts.client.asked] == [[MediaInput("image", FILE)]] * 4
    with pytest.raises(InvalidRequestError, match="audio with uuid 'a'"):
        prompts.process({"prompt": "x", "multi_modal_uuids": {"audio": "a"}})
    prompts.process({"prompt": "x", "multi_modal_data": {"image": bytes(99)}, "multi_modal_uuids": {"image": ["b"]}})
    with pytest.raises(InvalidRequestError, match="uuid 'a' is not known"):  # the map is bounded
        prompts.process(ask)
    prompts.media.reset()
    assert prompts.client.resets == 1
    with pytest.raises(InvalidRequestError, match="uuid 'b' is not known"):
        prompts.process({**ask, "multi_modal_uuids": {"image": ["b"]}})


def test_processes_that_share_a_core_take_no_media() -> None:
    told = msgspec.msgpack.encode(Told(config=EngineConfig(), model=ModelFacts(1000, 8, 100, "float32")))
    for client in (
        FollowingClient(lambda _: told),
        LeadingClient(lambda: FollowingClient(lambda _: told), lambda told: b""),
    ):
        with pytest.raises(NotSupportedError, match="external_launcher"):
            open_media(client)


def test_the_client_forgets_what_no_request_has_any_more() -> None:
    prompts = Prompts()
    prompt = {"prompt": "x", "multi_modal_data": {"image": FILE}}
    gc.disable()  # nothing may wait for the collector, because items can be large
    try:
        request = prompts.process(prompt)
        kept = prompts.process(prompt)
        with pytest.raises(InvalidRequestError, match="max_model_len"):
            prompts.process({**prompt, "prompt_token_ids": [5] * 99})
        del request
        prompts.process(prompt)
        assert len(prompts.client.forgotten) == 2
        del kept
        prompts.process(prompt)
        assert len(prompts.client.forgotten) == 4
        prompts.client.waits = True
        begun = prompts.processor.prepare_media(prompt)
        assert begun is not None
        prompts.client.answer(-1)
        assert begun.result().media is not None
        prompts.client.futures.clear()
        del begun
        prompts.client.waits = False
        prompts.process(prompt)
        assert len(prompts.client.forgotten) == 6
    finally:
        gc.enable()


def test_a_batch_is_prepared_ahead() -> None:
    prompts = Prompts(waits=True)
    prompt = {"prompt": "x", "multi_modal_data": {"image": FILE}}
    wrong = {"prompt": "x", "multi_modal_data": {"image": 1}}
    batch = [prompt, "text", *[prompt] * 8, wrong, prompt]
    ahead = Ahead(prompts.processor, batch, None)
    first = prompts.processor.prepare_media(prompt)
    assert first is not None
    prompts.client.answer(0)
    prompts.client.waits = False
    assert ahead.prompt(0).media.prepared == first.result().media.prepared  # type: ignore[union-attr]
    assert len(prompts.client.asked) == 8, "one, and the seven of the first eight that have media"
    assert ahead.prompt(1) == "text"
    for at in range(2, 10):
        assert ahead.prompt(at).media is not None
    with pytest.raises(InvalidRequestError, match="image 0"):
        ahead.prompt(10)


# ------------------------------------------------------------------ conversations

READS_PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% elif p.type == 'image' or 'image' in p %}<img>{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
READS_TEXT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ONLY_TEXT_OF_PARTS = READS_PARTS.replace("<img>", "")


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(MODEL_PATH)
    tokenizer.media = {"image": "<image>", "audio": ""}
    return tokenizer


BASE64 = base64.b64encode(FILE).decode()


@pytest.mark.parametrize(
    ("part", "modality", "item"),
    [
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}}, "image", URL),
        ({"type": "image_url", "image_url": URL}, "image", URL),
        ({"type": "input_image", "image_url": URL}, "image", URL),
        ({"type": "image", "image": PICTURE}, "image", PICTURE),
        ({"type": "image", "url": URL}, "image", URL),
        ({"type": "image_pil", "image_pil": PICTURE}, "image", PICTURE),
        ({"image_url": {"url": URL}}, "image", URL),
        ({"image": FILE}, "image", FILE),
        ({"type": "audio_url", "audio_url": {"url": URL}}, "audio", URL),
        ({"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}, "audio", FILE),
    ],
)
def test_each_part_of_a_conversation_that_is_media(
    part: dict[str, Any], modality: str, item: Any, tokenizer: Tokenizer
) -> None:
    template = READS_PARTS.replace("'image'", f"'{modality}'")
    for content in ([{"type": "text", "text": "see "}, part, {"type": "text", "text": "!"}], part):
        prompt: Any = chat_prompt(tokenizer, [{"role": "user", "content": content}], chat_template=template)
        assert prompt["prompt"] == ("[user]see <img>!" if isinstance(content, list) else "[user]<img>")
        assert prompt["multi_modal_data"] == {modality: [item]}
        assert "multi_modal_uuids" not in prompt
    assert chat_prompt(tokenizer, [{"role": "user", "content": "x"}], chat_template=template) == "[user]x"


@pytest.mark.parametrize("template", [READS_TEXT, ONLY_TEXT_OF_PARTS])
def test_a_template_without_media_gets_the_models_placeholder(template: str, tokenizer: Tokenizer) -> None:
    parts = [{"type": "image", "image": FILE, "uuid": "u"}, {"type": "text", "text": "what?"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    prompt: Any = chat_prompt(tokenizer, messages, chat_template=template)
    assert prompt["prompt"] == "[system]be brief[user]<image>\nwhat?"
    assert prompt["multi_modal_uuids"] == {"image": ["u"]}
    sound = [{"role": "user", "content": [{"type": "audio_url", "audio_url": URL}]}]
    with pytest.raises(InvalidRequestError, match="reads only text"):
        chat_prompt(tokenizer, sound, chat_template=READS_TEXT)


def test_parts_that_cannot_be_used_are_refused(tokenizer: Tokenizer) -> None:
    def ask(part: dict[str, Any]) -> None:
        chat_prompt(tokenizer, [{"role": "user", "content": [part]}], chat_template=READS_PARTS)

    with pytest.raises(NotSupportedError, match=r"part of type 'video_url'; .* this model are: text, image, audio"):
        ask({"type": "video_url", "video_url": {"url": URL}})
    with pytest.raises(NotSupportedError, match="image_embeds"):
        ask({"type": "image_embeds", "image_embeds": "x"})
    with pytest.raises(InvalidRequestError, match="base64"):
        ask({"type": "input_audio", "input_audio": {"data": "?"}})
    with pytest.raises(InvalidRequestError, match="without content"):
        ask({"type": "image"})


# ------------------------------------------------------------------ engines


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StandInOwner]:
    with stand_in(address=f"ipc://{tmp_path}/core.sock") as owner:
        owner.kill()
        owner.restart(media=["image"])
        yield owner


PROMPT: Any = {"prompt_token_ids": [5], "multi_modal_data": {"image": FILE}}


def with_media(engine: Any, waits: bool) -> StandInMedia:
    client = StandInMedia(waits)
    engine._media._client = client
    return client


def test_the_engine_delivers_items_and_ends_with_its_media(daemon: StandInOwner) -> None:
    engine = LLMEngine.connect(daemon.address, skip_tokenizer_init=True)
    client = with_media(engine, waits=False)
    engine.add_request("a", PROMPT, SamplingParams(n=2, max_tokens=3))
    assert len(client.delivered) == 1
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].prompt_token_ids == [9, 9, 5]
    assert [request.media for request in daemon.core.added] == [client.delivered[0].media] * 2
    assert len(client.forgotten) == 1, "at the end of the request, because items can be large"
    engine.reset_mm_cache()
    assert client.resets == 1
    engine.add_request(
        "none", {"prompt_token_ids": [5], "multi_modal_data": {"image": []}}, SamplingParams(max_tokens=1)
    )
    while engine.has_unfinished_requests():
        assert engine.step()[0].prompt_token_ids == [5]
    with pytest.raises(InvalidRequestError, match="image 0"):
        engine.add_request("b", {**PROMPT, "multi_modal_data": {"image": 1}}, SamplingParams())
    assert not engine.has_unfinished_requests()
    engine.shutdown()
    assert client.closed


Waiting = Callable[[AsyncLLMEngine, StandInMedia], Any]


async def collected(stream: AsyncIterator[Any]) -> list[Any]:
    return [output async for output in stream]


def in_preparation(daemon: StandInOwner, test: Waiting) -> None:
    """Run `test` while the engine waits for the media of request ``a``."""

    async def main() -> None:
        async with AsyncLLMEngine.connect(daemon.address, skip_tokenizer_init=True) as engine:
            client = with_media(engine, waits=True)
            await test(engine, client)
            assert engine.get_num_unfinished_requests() == 0
            await engine.wait_for_requests_to_drain(1)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_others_go_on_while_media_are_prepared(daemon: StandInOwner) -> None:
    async def test(engine: AsyncLLMEngine, client: StandInMedia) -> None:
        first = asyncio.create_task(collected(engine.generate(PROMPT, SamplingParams(max_tokens=3), "a")))
        (*_, other) = await collected(engine.generate([1], SamplingParams(max_tokens=3), "b"))
        assert other.outputs[0].token_ids == [1, 2, 3]
        assert engine.get_num_unfinished_requests() == 1
        with pytest.raises(TimeoutError):
            await engine.wait_for_requests_to_drain(0.01)
        with pytest.raises(DuplicateRequestError):
            await collected(engine.generate(PROMPT, SamplingParams(), "a"))
        client.answer(0)
        nothing = {"prompt_token_ids": [7], "multi_modal_data": {"image": []}}
        (*_, other) = await collected(engine.generate(nothing, SamplingParams(max_tokens=1), "c"))
        assert other.outputs[0].token_ids == [7]
        (*_, last) = await first
        assert last.outputs[0].token_ids == [9, 10, 11]
        assert len(client.delivered) == 1

    in_preparation(daemon, test)


@pytest.mark.parametrize("beams", [False, True])
def test_an_abort_during_the_preparation_ends_the_stream(daemon: StandInOwner, beams: bool) -> None:
    params = SamplingParams(n=2, temperature=0, use_beam_search=True) if beams else SamplingParams()

    async def test(engine: AsyncLLMEngine, client: StandInMedia) -> None:
        task = asyncio.create_task(collected(engine.generate(PROMPT, params, "a")))
        while not client.futures:
            await asyncio.sleep(0)
        await engine.abort("a")
        (output,) = await task
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")
        while not client.futures[0].cancelled():
            await asyncio.sleep(0.01)
        assert daemon.core.added == []

    in_preparation(daemon, test)


def test_a_stream_that_is_closed_during_the_preparation_leaves_nothing(daemon: StandInOwner) -> None:
    async def test(engine: AsyncLLMEngine, client: StandInMedia) -> None:
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=1000), "a")
        task = asyncio.create_task(collected(stream))
        while not client.futures:
            await asyncio.sleep(0)
        await stream.aclose()
        client.answer(0)
        (output,) = await task
        assert (output.finished, output.outputs[0].finish_reason) == (True, "abort")

    in_preparation(daemon, test)


def test_a_drain_waits_for_a_request_that_begins_when_its_media_are_prepared(daemon: StandInOwner) -> None:
    async def test(engine: AsyncLLMEngine, client: StandInMedia) -> None:
        task = asyncio.create_task(collected(engine.generate(PROMPT, SamplingParams(max_tokens=20), "a")))
        while not client.futures:
            await asyncio.sleep(0)
        drain = asyncio.create_task(engine.wait_for_requests_to_drain(30))
        await asyncio.sleep(0)
        client.answer(0)
        await drain
        assert engine.get_num_unfinished_requests() == 0
        assert len((await task)[-1].outputs[0].token_ids) == 20

    in_preparation(daemon, test)


def test_a_task_that_is_cancelled_or_refused_during_the_preparation_leaves_nothing(daemon: StandInOwner) -> None:
    async def test(engine: AsyncLLMEngine, client: StandInMedia) -> None:
        task = asyncio.create_task(collected(engine.generate(PROMPT, SamplingParams(), "a")))
        while not client.futures:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not client.futures[0].cancelled():
            await asyncio.sleep(0.01)
        task = asyncio.create_task(collected(engine.generate(PROMPT, SamplingParams(), "a")))
        while len(client.futures) < 2:
            await asyncio.sleep(0)
        client.futures[1].set_exception(InvalidRequestError("no image"))
        with pytest.raises(InvalidRequestError, match="no image"):
            await task
        assert daemon.core.added == []

    in_preparation(daemon, test)


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"limit_mm_per_prompt": {"images": 1}}, InvalidArgumentError, "limit_mm_per_prompt names 'images'"),
        ({"limit_mm_per_prompt": {"image": -1}}, InvalidArgumentError, "limit_mm_per_prompt of image is -1"),
        ({"allowed_media_domains": ["https://a.b/"]}, InvalidArgumentError, "names of hosts"),
        ({"allowed_local_media_path": "media"}, InvalidArgumentError, "whole path of a folder"),
        ({"media_workers": 0}, InvalidArgumentError, "media_workers is 0"),
        ({"mm_encoder_cache_gb": -1.0}, InvalidArgumentError, "mm_encoder_cache_gb is -1"),
        ({"max_media_pixels": 0}, InvalidArgumentError, "max_media_pixels is 0"),
        ({"enable_mm_embeds": True}, NotSupportedError, "embeddings of media"),
        ({"mm_encoder_only": True}, NotSupportedError, "mm_encoder_only"),
        ({"video_pruning_rate": 0.5}, NotSupportedError, "video_pruning_rate"),
        ({"media_io_kwargs": {"video": {"num_frames": 4}}}, NotSupportedError, "num_frames and fps are mm_processor"),
    ],
)
def test_options_of_media_are_checked(given: dict[str, Any], error: type[MainspringError], words: str) -> None:
    with pytest.raises(error, match=words):
        EngineArgs(**given).create_engine_config()


def test_vllms_names() -> None:
    from mainspring.compat.vllm.multimodal import MultiModalDataDict
    from mainspring.compat.vllm.multimodal.image import convert_image_mode

    assert MultiModalDataDict is not None
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    assert np.asarray(convert_image_mode(clear, "RGB")).tolist() == [[[255, 255, 255], [10, 20, 30]]]
    assert convert_image_mode(PICTURE, "RGB") is PICTURE


def test_options_of_vllm_have_their_meaning(tmp_path: Path) -> None:
    def made(**given: Any) -> MultiModalConfig:
        return EngineArgs(**given).create_engine_config().multimodal_config

    none = {"image": 0, "video": 0, "audio": 0}
    assert made(language_model_only=True).limit_mm_per_prompt == none
    assert made(language_model_only=False, limit_mm_per_prompt=None, mm_processor_kwargs=None) == MultiModalConfig()
    sizes = {"image": {"count": 2, "width": 9, "height": 9}, "video": 1}
    assert made(limit_mm_per_prompt=sizes).limit_mm_per_prompt == {"image": 2, "video": 1}
    assert made(disable_mm_preprocessor_cache=True).mm_processor_cache_gb == 0
    assert made(allowed_local_media_path=str(tmp_path)).allowed_local_media_path == str(tmp_path)
    assert made(allowed_media_domains=["upload.wikimedia.org"]).allowed_media_domains == ["upload.wikimedia.org"]
    assert made(skip_mm_profiling=True, interleave_mm_strings=True, media_io_kwargs={}) == MultiModalConfig()
