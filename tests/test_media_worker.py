"""Prompts with media: what is made of them is what the checkpoint's own processor makes."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mainspring.core.features.media_store import MediaStore
from mainspring.ipc.config import EngineConfig, ModelConfig, MultiModalConfig
from mainspring.ipc.errors import InvalidRequestError, MainspringError, UnsupportedModelError
from mainspring.ipc.media_client import MediaInput
from mainspring.media import local
from mainspring.media import preparer as preparers
from mainspring.media.decode import Limits, decode_sound
from mainspring.media.local import LocalMedia, deliver
from mainspring.media.preparer import Prepared, Preparer, _Kept
from mainspring.media.processor import Processor, Way
from mainspring.media.windows import window_ends
from media_folders import file_of, make_processor, picture, save_folder, tone, wav_of

IMAGES = ["llava", "llava_next", "qwen2_vl", "smolvlm", "gemma3", "paligemma"]
PLACEHOLDER = {"qwen2_vl": "<|image_pad|>", "gemma3": "<start_of_image>", "qwen2_audio": "<|AUDIO|>"}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("processors")
    return cache(lambda name: save_folder(name, base / name))


def config_of(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(model_config=ModelConfig(model=str(folder)), multimodal_config=MultiModalConfig(**fields))


def image(seed: int = 0, width: int = 90, height: int = 60) -> MediaInput:
    return MediaInput("image", file_of(picture(seed, width, height)))


@pytest.mark.parametrize("name", IMAGES)
def test_token_ids_and_arrays_are_those_of_the_processor(name: str, folders: Any) -> None:
    """Two images of different sizes in one text, and each one's arrays as the processor makes them alone."""
    placeholder = PLACEHOLDER.get(name, "<image>")
    pictures = [picture(1, 120, 60), picture(2, 64, 100)] if name != "paligemma" else [picture(1, 120, 60)]
    prompt = f"{placeholder * len(pictures)}What is it?" if name == "paligemma" else f"a {placeholder}\n{placeholder}?"
    processor, preparer = make_processor(name), Preparer(config_of(folders(name)))
    found = preparer.prepare(prompt, [MediaInput("image", file_of(each)) for each in pictures], {})
    expected = processor(text=[prompt], images=pictures, return_tensors="np" if len(pictures) == 1 else None)
    assert found.token_ids == list(np.asarray(expected["input_ids"]).reshape(-1))
    assert len(found.media) == len(pictures)
    token = preparer.processor.place("image").token_id
    covered = [at for item in found.media for at in range(item.offset, item.offset + item.length)]
    assert {at for at, one in enumerate(found.token_ids) if one == token} <= set(covered)
    assert len(covered) == len(set(covered))
    for item, one in zip(found.media, pictures, strict=True):
        assert {found.token_ids[at] for at in (item.offset, item.offset + item.length - 1)} == {token}
        text = placeholder if name != "paligemma" else prompt
        alone = processor(text=[text], images=[one], return_tensors="np")
        kept = preparer.arrays(item.digest)
        assert kept is not None
        assert kept.arrays
        for key, values in kept.arrays.items():
            np.testing.assert_array_equal(values, alone[key], key)


@pytest.mark.parametrize("name", ["llava", "smolvlm", "gemma3"])
def test_token_ids_are_expanded_like_text(name: str, folders: Any) -> None:
    preparer, placeholder = Preparer(config_of(folders(name))), PLACEHOLDER.get(name, "<image>")
    prompt = f"a {placeholder} b {placeholder} c"
    given = [image(1), image(2, 40, 80)]
    of_text = preparer.prepare(prompt, given, {})
    of_ids = preparer.prepare(preparer.processor.tokenize(prompt, add_special_tokens=True), given, {})
    assert of_ids == of_text


def test_sound_is_resampled_to_what_the_model_hears(folders: Any) -> None:
    preparer, processor = Preparer(config_of(folders("qwen2_audio"))), make_processor("qwen2_audio")
    prompt = "<|audio_bos|><|AUDIO|><|audio_eos|>What is said?"
    found = preparer.prepare(prompt, [MediaInput("audio", wav_of(tone(1.0, 44_100), 44_100))], {})
    expected = processor(text=[prompt], audio=[tone(1.0)], return_tensors="np", sampling_rate=16_000)
    assert found.token_ids == list(expected["input_ids"][0])
    kept = preparer.arrays(found.media[0].digest)
    assert kept is not None
    np.testing.assert_array_equal(kept.arrays["feature_attention_mask"], expected["feature_attention_mask"])
    # away from the ends of the sound, and above the floor of the logarithm
    loud = expected["input_features"][..., 5:90] > 0
    assert loud.any()
    difference = np.abs(kept.arrays["input_features"] - expected["input_features"])[..., 5:90][loud]
    assert difference.max() < 0.02
    raw = preparer.prepare(prompt, [MediaInput("audio", tone(0.5, 8_000), {"sampling_rate": 8_000})], {})
    assert raw.media[0].length < found.media[0].length


def test_raw_arrays_are_what_files_are(folders: Any) -> None:
    preparer = Preparer(config_of(folders("llava")))
    of_file = preparer.prepare("<image>", [image(3)], {})
    of_array = preparer.prepare("<image>", [MediaInput("image", np.asarray(picture(3)))], {})
    assert of_file.token_ids == of_array.token_ids
    assert of_file.media[0].digest != of_array.media[0].digest  # a name is of the bytes that came
    one, other = (preparer.arrays(found.media[0].digest) for found in (of_file, of_array))
    assert one is not None
    assert other is not None
    np.testing.assert_array_equal(one.arrays["pixel_values"], other.arrays["pixel_values"])


def test_a_digest_names_content_arguments_and_settings(folders: Any) -> None:
    preparer = Preparer(config_of(folders("llava")))
    digest = lambda given, **kwargs: preparer.prepare("<image>", [given], kwargs).media[0].digest  # noqa: E731
    assert digest(image(1)) == digest(image(1))
    assert digest(image(1)) != digest(image(2))
    assert digest(image(1)) != digest(image(1), do_normalize=False)
    other = Preparer(config_of(folders("llava"), mm_processor_kwargs={"do_normalize": False}))
    assert other.prepare("<image>", [image(1)], {}).media[0].digest == digest(image(1), do_normalize=False)
    third = Preparer(config_of(folders("gemma3")))
    assert third.prepare("<start_of_image>", [image(1)], {}).media[0].digest != digest(image(1))


def test_an_item_is_prepared_once_while_it_is_kept(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preparer, calls = Preparer(config_of(folders("llava"))), []
    expand = Processor.expand
    monkeypatch.setattr(Processor, "expand", lambda self, *args: calls.append(args) or expand(self, *args))
    preparer.prepare("<image><image>", [image(1), image(1)], {})
    preparer.prepare("b <image>", [image(1)], {})
    assert len(calls) == 1
    preparer.reset()
    preparer.prepare("b <image>", [image(1)], {})
    assert len(calls) == 2


def test_the_oldest_items_go_when_the_cache_is_full(folders: Any) -> None:
    preparer = Preparer(config_of(folders("llava"), mm_processor_cache_gb=2.5 * 3 * 56 * 56 * 4 / 2**30))
    digests = [preparer.prepare("<image>", [image(seed)], {}).media[0].digest for seed in range(3)]
    assert [preparer.arrays(digest) is None for digest in digests] == [True, False, False]


def test_items_of_one_prompt_are_kept_even_if_they_are_more_than_the_cache_holds(folders: Any) -> None:
    preparer = Preparer(config_of(folders("llava"), mm_processor_cache_gb=0.0))
    first = preparer.prepare("<image>" * 4, [image(seed) for seed in range(4)], {})
    assert all(preparer.arrays(item.digest) for item in first.media)
    second = preparer.prepare("<image>", [image(9)], {})
    assert [preparer.arrays(item.digest) is None for item in first.media + second.media] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("no place", 1), ("<image>", 2), ("<image> and <image>", 1), ([72, 259, 73, 259], 1), ([72], 1), ("<image>", 0)],
)
def test_each_item_needs_one_placeholder(prompt: Any, count: int, folders: Any) -> None:
    preparer = Preparer(config_of(folders("llava")))
    if not count:  # without items a text is a text
        assert preparer.prepare(prompt, [], {}).media == []
        return
    with pytest.raises(InvalidRequestError, match="'<image>'"):
        preparer.prepare(prompt, [image(seed) for seed in range(count)], {})


def test_text_with_tokens_of_an_expanded_item_is_refused(folders: Any) -> None:
    """Gemma 3 writes one text in a prompt, and another one in its expansion. A user may type the second."""
    preparer = Preparer(config_of(folders("gemma3")))
    with pytest.raises(InvalidRequestError, match="stand for parts of media items"):
        preparer.prepare("<start_of_image> and <image_soft_token>", [image()], {})


def test_items_of_another_kind_are_refused(folders: Any) -> None:
    preparer = Preparer(config_of(folders("llava")))
    with pytest.raises(UnsupportedModelError, match="takes no audio"):
        preparer.prepare("<audio>", [MediaInput("audio", wav_of(tone()))], {})
    content = tone()
    gone = weakref.ref(content)
    for _ in range(2):  # an error that is remembered keeps no content
        with pytest.raises(UnsupportedModelError):
            preparer.prepare("<audio>", [MediaInput("audio", content)], {})
    del content
    gc.collect()
    assert gone() is None
    with pytest.raises(InvalidRequestError, match="no modality"):
        preparer.prepare("<smell>", [MediaInput("smell", b"x")], {})


@pytest.mark.parametrize("name", ["images", "device", "return_tensors", "text"])
def test_arguments_that_the_engine_sets_are_refused(name: str, folders: Any) -> None:
    preparer = Preparer(config_of(folders("llava")))
    for kwargs in ({name: "http://127.0.0.1/"}, {"images_kwargs": {name: "http://127.0.0.1/"}}):
        with pytest.raises(InvalidRequestError, match=name):
            preparer.prepare("<image>", [image()], kwargs)


def test_a_processor_that_needs_the_whole_prompt_is_called_with_it(folders: Any) -> None:
    preparer = Preparer(config_of(folders("paligemma")))
    assert preparer.processor.place("image").way is Way.TOGETHER
    found = preparer.prepare("<image>caption", [image()], {})
    assert found.media[0].length == 4
    with pytest.raises(InvalidRequestError, match="needs the text"):
        preparer.prepare([259, 72], [image()], {})


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_special_tokens_are_added_alike_however_the_processor_is_called(
    add_special_tokens: bool, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, given = config_of(folders("llava")), [image(1), image(2)]
    prompt, others = "a <image> b <image>", (given, {}, add_special_tokens)
    alone = Preparer(config).prepare(prompt, *others).token_ids
    monkeypatch.setattr(Processor, "_way", lambda *args: Way.TOGETHER)
    preparer = Preparer(config)
    assert preparer.prepare(prompt, *others).token_ids == alone
    assert preparer.processor.tokenize("a", add_special_tokens=True)[0] == 256
    assert (alone[0] == 256) == add_special_tokens


def test_the_only_placeholder_may_be_missing_where_the_processor_writes_it(folders: Any) -> None:
    preparer = Preparer(config_of(folders("paligemma")))
    assert preparer.prepare("caption", [image()], {}) == preparer.prepare("<image>caption", [image()], {})
    for name, prompt, count in (("paligemma", "caption", 2), ("llava", "caption", 1), ("llava_next", "caption", 1)):
        with pytest.raises(InvalidRequestError, match=f"has 0 placeholders for {count} image items"):
            Preparer(config_of(folders(name))).prepare(prompt, [image(seed) for seed in range(count)], {})


def test_arrays_go_to_a_core_that_lacks_them(folders: Any) -> None:
    """An engine with the core in its process. What the core has is not sent; what is gone is prepared again."""
    core: dict[bytes, Any] = {}

    def call(method: str, *args: Any, arrays: Any = ()) -> Any:
        if method == "offer_media":
            return [digest for digest in args[0] if digest not in core]
        assert method == "put_media"
        digest, modality, names, shapes = args
        assert not shapes
        core[digest] = modality, {name: array.values for name, array in zip(names, arrays, strict=True)}
        return None

    media, given = LocalMedia(config_of(folders("qwen2_vl")), call), [image(1), image(2)]
    prepared = media.prepare("<|image_pad|> or <|image_pad|>", given, {}).result()
    media.reset_cache()
    media.deliver(prepared, given)
    assert set(core) == {item.digest for item in prepared.media}
    modality, arrays = core[prepared.media[0].digest]
    assert modality == "image"
    assert set(arrays) == {"pixel_values", "image_grid_thw"}

    media.deliver(prepared, given)
    media.forget(prepared)
    with pytest.raises(InvalidRequestError, match="placeholders"):
        media.prepare("none", given, {}).result()


def test_a_content_is_blamed_for_no_other_content_of_its_prompt(folders: Any) -> None:
    """A processor that gets the whole prompt is called in the name of all items; each is decoded in its own name."""
    blamed: list[bytes] = []

    @contextlib.contextmanager
    def guard(digest: bytes) -> Iterator[None]:
        blamed.append(digest)
        yield

    preparer = Preparer(config_of(folders("paligemma")), guard=guard)
    alone = []
    for seed in (1, 2):
        preparer.prepare("<image>caption", [image(seed)], {})
        alone.append(blamed[0])
        blamed.clear()
    with contextlib.suppress(MainspringError):  # maybe it takes one item only
        preparer.prepare("<image><image>caption", [image(1), image(2)], {})
    assert blamed[:2] == alone
    assert len(blamed) == 3
    assert blamed[2] not in alone


def test_items_of_a_prompt_that_failed_leave_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be more than the cache holds, and the next prompt would find no memory."""
    monkeypatch.setattr(preparers, "EXTRA_BYTES", 5 * preparers.ITEM_BYTES)
    kept = _Kept(0)
    for number in range(20):
        kept.put(bytes([number]), Prepared("image", "", 0, {}))
    assert all(kept.get(bytes([number])) for number in range(20))
    kept.begin()
    assert [kept.get(bytes([number])) is not None for number in range(20)] == [False] * 15 + [True] * 5


def test_items_without_many_bytes_are_limited_too() -> None:
    kept = _Kept(8 * (preparers.ITEM_BYTES + 8))
    for number in range(100):
        kept.begin()
        kept.put(bytes([number]), Prepared("text", "", 0, {"input_ids": np.zeros(1, np.int64)}))
    assert sum(kept.get(bytes([number])) is not None for number in range(100)) == 8


def test_what_is_offered_is_sent_even_if_other_items_take_its_place_meanwhile(folders: Any) -> None:
    preparer, sent = Preparer(config_of(folders("llava"), mm_processor_cache_gb=0.0)), []

    def call(method: str, *args: Any, arrays: Any = ()) -> Any:
        if method == "put_media":
            sent.append(args[0])
            return None
        preparer.prepare("<image>", [image(2)], {})  # of another frontend, while the core is in a step
        return args[0]

    wanted = [item.digest for item in preparer.prepare("<image>", [image(1)], {}).media]
    assert deliver(call, preparer, wanted) == []
    assert sent == wanted


def test_arrays_that_are_too_large_for_a_frame_go_in_parts(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PART_BYTES", 5000)
    preparer, store = Preparer(config_of(folders("qwen2_vl"))), MediaStore(["image"], 1 << 30)
    sizes: list[int] = []

    def call(method: str, *args: Any, arrays: Any = ()) -> Any:
        if method == "offer_media":
            return store.offer(*args)
        sizes.extend(array.values.nbytes for array in arrays)
        return store.put([array.values for array in arrays], *args).result()

    (media,) = preparer.prepare("<|image_pad|>", [image(1)], {}).media
    assert deliver(call, preparer, [media.digest]) == []
    assert max(sizes) <= 5000
    (item,), made = list(store), preparer.arrays(media.digest)
    assert made is not None
    assert sum(sizes) == made.num_bytes - len(made.text) - preparers.ITEM_BYTES > 5000
    for name, array in zip(item.names, item.arrays or (), strict=True):
        np.testing.assert_array_equal(array, made.arrays[name])
        assert array.dtype == made.arrays[name].dtype


def test_windows_of_a_sound_end_where_it_is_quiet() -> None:
    sound = tone(5.0)
    quiet = [1.55, 3.3]  # seconds; at each one tenth of silence
    for at in quiet:
        sound[int((at - 0.05) * 16_000) : int((at + 0.05) * 16_000)] = 0
    ends = window_ends(sound, 32_000, 16_000)
    assert [end / 16_000 for end in ends] == [*quiet, 5.0]
    assert window_ends(sound[:32_000], 32_000, 16_000) == [32_000]
    assert window_ends(sound[:32_001], 32_000, 16_000) == [int(1.55 * 16_000), 32_001]
    short = window_ends(np.ones(10, np.float32), 3, 8)
    assert short[-1] == 10
    assert all(0 < end - begin <= 3 for begin, end in zip([0, *short], short, strict=False))


@pytest.mark.parametrize("rate", [16_000, 8_000])
def test_each_window_of_a_sound_is_prepared_as_a_sound_of_its_own(folders: Any, rate: int) -> None:
    file, preparer = wav_of(tone(5.0, rate), rate), Preparer(config_of(folders("whisper")))
    whole = decode_sound("x", file, 16_000, Limits(1, 1 << 20))
    ends = window_ends(whole, 32_000, 16_000)
    assert len(ends) > 2

    def window(number: Any, prompt: list[int] | None = None) -> Any:
        return preparer.prepare(prompt or [], [MediaInput("audio", file, {"window": number})], {})

    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        found = window(number, [259, 260])
        assert (found.token_ids, found.windows) == ([259, 260], [at / 16_000 for at in ends])
        alone = MediaInput("audio", whole[begin:end], {"sampling_rate": 16_000})
        one, other = (
            preparer.arrays(prepared.media[0].digest) for prepared in (found, preparer.prepare([], [alone], {}))
        )
        assert one is not None
        assert other is not None
        assert one.arrays.keys() == other.arrays.keys()
        assert all(np.array_equal(one.arrays[name], other.arrays[name]) for name in one.arrays)
        assert window(number).windows == found.windows  # of an item that is kept
    for wrong in (len(ends), -1, "0", True, None, 1.0):
        with pytest.raises(InvalidRequestError, match="window is"):
            window(wrong)


def test_a_sound_is_decoded_once_for_all_its_windows(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preparer, file, calls = Preparer(config_of(folders("whisper"))), wav_of(tone(5.0)), []

    def decoded(*args: Any) -> Any:
        calls.append(1)
        return decode_sound(*args)

    monkeypatch.setattr(preparers, "decode_sound", decoded)
    for number in range(3):
        preparer.prepare([], [MediaInput("audio", file, {"window": number})], {})
    assert len(calls) == 1
