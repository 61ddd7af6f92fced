"""Files of video, and of sound other than WAV, made by the libraries that decode them; and damaged or hostile ones."""

from __future__ import annotations

import io
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mainspring.ipc.errors import InvalidRequestError
from mainspring.ipc.media_client import MediaInput
from mainspring.ipc.media_remote import RemoteMedia
from mainspring.ipc.media_workers import MediaWorkers
from mainspring.ipc.transport import Endpoints
from mainspring.media import decode
from mainspring.media.decode import Limits, decode_sound, decode_video
from mainspring.media.preparer import Preparer
from media_folders import save_folder, tone
from test_media_worker import config_of

av = pytest.importorskip("av", reason="the extra `video` is not installed")
soundfile = pytest.importorskip("soundfile", reason="the extra `audio` is not installed")

LIMITS = Limits(pixels=1_000_000, bytes=8 << 20)
EVERY = lambda total, fps, width, height: range(total)  # noqa: E731
PATIENCE_S = 300  # a worker is nice, and waits for others on a busy machine
PROMPT = "<|audio_bos|><|AUDIO|><|audio_eos|>What is said?"


def video(
    kind: str = "mp4", codec: str = "mpeg4", frames: int = 10, width: int = 32, height: int = 24, rate: int = 10
) -> bytes:
    """Each frame is of one grey, 20 lighter than the one before."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            pixels = np.full((height, width, 3), number * 20 % 256, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


def sound(kind: str, samples: np.ndarray, rate: int = 16_000) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind.partition(" ")[0], subtype=kind.partition(" ")[2] or None)
    return buffer.getvalue()


# ------------------------------------------------------------------ video

VIDEOS = [
    ("mp4", "mpeg4"),
    ("mp4", "libx264"),
    ("matroska", "mpeg4"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"),
    ("mpegts", "mpeg2video"),
    ("mpeg", "mpeg2video"),
    ("flv", "flv"),
]


@pytest.mark.parametrize(("kind", "codec"), VIDEOS)
def test_each_format_gives_its_frames(kind: str, codec: str) -> None:
    """Some formats say how many frames there are, of others they are counted."""
    if codec not in av.codecs_available:
        pytest.skip(f"this build of PyAV has no {codec}")
    found = decode_video("video 0", video(kind, codec), EVERY, LIMITS)
    assert (found.fps, found.total, found.indices) == (10.0, 10, list(range(10)))
    assert found.pixels.shape == (10, 24, 32, 3)
    greys = found.pixels.mean((1, 2, 3))
    np.testing.assert_allclose(greys, np.arange(10) * 20, atol=5)
    chosen = decode_video("video 0", video(kind, codec), lambda *_: [1, 4, 9], LIMITS)
    np.testing.assert_array_equal(chosen.pixels, found.pixels[[1, 4, 9]])


@pytest.mark.parametrize("kind", ["mp4", "avi", "matroska"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_a_truncated_video_is_refused(kind: str, share: float) -> None:
    data = video(kind)
    with pytest.raises(InvalidRequestError):
        decode_video("video 0", data[: int(len(data) * share)], EVERY, LIMITS)


def test_a_video_that_is_cut_off_has_the_frames_that_are_there() -> None:
    data = video("matroska", frames=40)
    found = decode_video("video 0", data[: int(len(data) * 0.7)], EVERY, LIMITS)
    assert 10 < len(found.pixels) == found.total < 40


def promising(frames: int) -> bytes:
    """A file of one frame, whose header says that there are more."""
    data = bytearray(video(frames=1))
    at = data.index(b"stts")
    data[at + 12 : at + 16] = struct.pack(">I", frames)
    return bytes(data)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: video(frames=0), "is empty"),
        (lambda: video(frames=100_000, width=16, height=16), "100000 frames; it must have 1 to 90000"),
        (lambda: video("matroska", frames=100_000, width=16, height=16), "90001 frames; it must have 1 to 90000"),
        (lambda: promising(0x7FFFFFFF), "2147483647 frames"),
        (lambda: video(width=1600, height=1200, frames=1), "1600×1200 pixels; the limit is max_media_pixels"),
        (lambda: video(width=200, height=200, frames=40), "40 frames of 200×200 pixels; the limit is max_media_pixels"),
        (lambda: sound("FLAC", tone()), "can't be decoded"),
    ],
    ids=["no frames", "100,000", "100,000 to be counted", "a promise", "large", "large together", "a sound"],
)
def test_a_video_over_a_limit_is_refused_before_it_is_decoded(make: Callable[[], bytes], why: str) -> None:
    chosen: list[int] = []
    data = make()
    with pytest.raises(InvalidRequestError, match=why):
        decode_video("video 0", data, lambda total, *_: chosen.append(total) or range(total), LIMITS)
    assert chosen in ([], [40])


def test_a_header_that_promises_more_frames_than_there_are_is_not_believed() -> None:
    found = decode_video("video 0", promising(1000), lambda total, *_: [0, total - 1], LIMITS)
    assert (len(found.pixels), found.indices) == (1, [0])


def test_a_video_whose_frames_grow_is_refused_without_decoding_the_large_ones() -> None:
    small = video("mpegts", "mpeg2video", 60)
    large = video("mpegts", "mpeg2video", 3, 1600, 1200)
    with pytest.raises(InvalidRequestError, match="can't be decoded"):
        decode_video("video 0", small + large, EVERY, LIMITS)
    with pytest.raises(InvalidRequestError, match="changes its size"):
        decode_video("video 0", small + large, EVERY, LIMITS._replace(pixels=50_000_000))


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{}\n#EXT-X-ENDLIST\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{}'\n",
        '<?xml version="1.0"?><MPD><Period><AdaptationSet><Representation><BaseURL>{}</BaseURL></Representation>'
        "</AdaptationSet></Period></MPD>",
    ],
)
def test_a_file_that_names_another_one_does_not_open_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "secret.ts").write_bytes(video("mpegts", "mpeg2video"))
    with pytest.raises(InvalidRequestError, match="can't be decoded"):
        decode_video("video 0", text.format(tmp_path / "secret.ts").encode(), EVERY, LIMITS)


# ------------------------------------------------------------------ sound

SOUNDS = {"FLAC": 1e-4, "OGG VORBIS": 0.05, "OGG OPUS": 0.05, "MP3": 0.05, "AIFF": 1e-4}


@pytest.mark.parametrize("kind", SOUNDS)
def test_each_format_gives_its_samples(kind: str) -> None:
    two = np.stack([tone(1.0), np.zeros(16_000, np.float32)], axis=1)
    for samples, expected in ((tone(1.0), tone(1.0)), (two, tone(1.0) / 2)):
        found = decode_sound("audio 0", sound(kind, samples), 16_000, LIMITS)
        assert (found.dtype, found.shape) == (np.float32, (16_000,))
        np.testing.assert_allclose(found[1000:-1000], expected[1000:-1000], atol=SOUNDS[kind])


@pytest.mark.parametrize("kind", SOUNDS)
def test_a_damaged_sound_is_refused(kind: str) -> None:
    data = sound(kind, tone(1.0))
    for broken in (data[:20], sound(kind, np.zeros(0, np.float32)), data[:4] + b"\xff" * 2000):
        with pytest.raises(InvalidRequestError):
            decode_sound("audio 0", broken, 16_000, LIMITS)


@pytest.mark.parametrize("total", [0, 1 << 20, (1 << 36) - 1])
def test_a_header_with_a_wrong_length_reserves_no_memory(total: int) -> None:
    data = bytearray(sound("FLAC", tone(1.0)))
    data[21] = data[21] & 0xF0 | total >> 32
    data[22:26] = struct.pack(">I", total & 0xFFFFFFFF)
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match="can't be decoded"):
        decode_sound("audio 0", bytes(data), 16_000, LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_small_file_of_long_silence_is_read_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight channels are 12 MB for each second at 384 kHz, and as good as nothing in the file."""
    data = sound("FLAC", np.zeros((60 * 48_000, 8), np.float32), 48_000)
    assert len(data) < 1 << 20
    tracemalloc.start()
    assert len(decode_sound("audio 0", data, 48_000, LIMITS)) == 60 * 48_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 48 << 20  # of 92 MB in all channels
    monkeypatch.setattr(decode, "MAX_SOUND_SECONDS", 59.0)
    with pytest.raises(InvalidRequestError, match="the limit is 59 s"):
        decode_sound("audio 0", data, 48_000, LIMITS)
    monkeypatch.setattr(decode, "MAX_SOUND_SECONDS", 60.0)
    monkeypatch.setattr(decode, "MAX_SOUND_SAMPLES", 50 * 48_000)
    with pytest.raises(InvalidRequestError, match="the limit is 2400000"):
        decode_sound("audio 0", data, 48_000, LIMITS)


# ------------------------------------------------------------------ in their place


@pytest.fixture(scope="module")
def hears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder("qwen2_audio", tmp_path_factory.mktemp("processors") / "qwen2_audio")


def test_a_file_of_sound_is_prepared_as_its_samples_are(hears: Path) -> None:
    preparer = Preparer(config_of(hears))
    loud = (tone(1.0) * 32767).round().astype(np.int16)
    of_file = preparer.prepare(PROMPT, [MediaInput("audio", sound("FLAC", loud))], {})
    of_array = preparer.prepare(PROMPT, [MediaInput("audio", loud.astype(np.float32) / 32768)], {})
    assert of_file.token_ids == of_array.token_ids
    one, other = (preparer.arrays(found.media[0].digest) for found in (of_file, of_array))
    assert one is not None
    assert other is not None
    np.testing.assert_array_equal(one.arrays["input_features"], other.arrays["input_features"])


@pytest.fixture
def workers(hears: Path) -> Iterator[MediaWorkers]:
    made = MediaWorkers(config_of(hears), Endpoints("tcp://127.0.0.1:1234"))
    made.start()
    yield made
    made.close()


@pytest.mark.slow
def test_a_worker_outlives_damaged_files(workers: MediaWorkers) -> None:
    media = RemoteMedia([f"tcp://127.0.0.1:{place}" for place in workers.places])
    assert media.prepare(PROMPT, [MediaInput("audio", sound("FLAC", tone()))], {}).result(PATIENCE_S).media
    before = workers.pids
    for kind in SOUNDS:
        data = sound(kind, tone())
        for broken in (data[:20], data[:4] + b"\xff" * 2000, sound(kind, np.zeros(0, np.float32))):
            with pytest.raises(InvalidRequestError):
                media.prepare(PROMPT, [MediaInput("audio", broken)], {}).result(PATIENCE_S)
    assert workers.pids == before
    media.close()
