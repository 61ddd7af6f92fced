"""Decodes images, animations and sound of strangers within limits.

A file's type is what its content says, never a name or a MIME type. Sizes are read from the header and checked before
anything is decoded.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..ipc.errors import InvalidRequestError, MainspringError, NotSupportedError

if TYPE_CHECKING:
    from PIL import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
ANIMATED_FORMATS = ("GIF", "WEBP", "PNG")
MAX_FRAMES = 4096  # of an animation; each frame is decoded, because most build on the one before
MAX_SIDE = 65_500  # pixels of an image's longer side, as in JPEG
MAX_VIDEO_FRAMES = 90_000  # of a file of video, an hour at 25 per second; few of them are kept
VIDEO_FORMATS = "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,ogg"  # FFmpeg's names; others may open further files
MAX_SOUND_SECONDS = 3600.0
MAX_SOUND_SAMPLES = 3600 * 48_000  # of a channel, an hour at the rate of most files
MAX_SAMPLING_RATE = 384_000
_SINC_WIDTH = 24  # zero crossings on each side of the resampling filter
_BLOCK = 1 << 20  # samples, of all channels, that are decoded at once
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE  # format tags of WAV files


class Limits(NamedTuple):
    """Limits for one item."""

    pixels: int  # of an image, or of all frames of a video
    bytes: int  # of a file


class Frames(NamedTuple):
    """A decoded video."""

    pixels: np.ndarray  # uint8 [frames, height, width, 3]
    fps: float | None  # None: not known
    total: int  # frames of the whole video
    indices: list[int] | None  # of these frames in the whole video; None: these are all


Sampler = Callable[[int, float | None, int, int], Sequence[int]]  # (frames, fps, width, height) → indices to decode


@contextlib.contextmanager
def refusing(what: str, refused: str | None = None) -> Iterator[None]:
    """Turn any error of a decoder, or of a processor, into an `InvalidRequestError`, which begins with `refused`."""
    try:
        yield
    except MainspringError:
        raise
    except MemoryError:
        raise InvalidRequestError(f"{what} needs more memory than a media worker may use") from None
    except Exception as error:  # Pillow's decoders raise nearly any type: OSError, SyntaxError, struct.error, …
        text = refused or f"{what} can't be decoded"
        raise InvalidRequestError(f"{text}: {type(error).__name__}: {error!s:.300}") from None


def check_pixels(what: str, width: int, height: int, limits: Limits, frames: int = 1) -> None:
    if width < 1 or height < 1 or frames < 1:
        raise InvalidRequestError(f"{what} is empty: {width}×{height}, {frames} frames")
    if max(width, height) > MAX_SIDE:
        raise InvalidRequestError(f"{what} has {width}×{height} pixels; the limit of a side is {MAX_SIDE}")
    if width * height * frames > limits.pixels:
        shown = f"{width}×{height}" if frames == 1 else f"{frames} frames of {width}×{height}"
        raise InvalidRequestError(f"{what} has {shown} pixels; the limit is max_media_pixels, {limits.pixels}")


def check_bytes(what: str, size: int, limits: Limits) -> None:
    if size > limits.bytes:
        raise InvalidRequestError(f"{what} has {size} bytes; the limit is max_media_bytes, {limits.bytes}")
    if not size:
        raise InvalidRequestError(f"{what} is empty")


def raw_pixels(what: str, values: np.ndarray, dimensions: int, limits: Limits) -> np.ndarray:
    """Check an array of pixels: [height, width, 3], or [frames, height, width, 3]."""
    if values.dtype != np.uint8 or values.ndim != dimensions or values.shape[-1] != 3:
        shape = "[height, width, 3]" if dimensions == 3 else "[frames, height, width, 3]"
        raise InvalidRequestError(
            f"{what} is an array of {values.dtype} {list(values.shape)}; it must be uint8 {shape}"
        )
    *frames, height, width, _ = values.shape
    check_pixels(what, width, height, limits, *frames)
    return values


def _open(what: str, data: bytes, formats: tuple[str, ...], limits: Limits) -> Image.Image:
    """An image whose header was read, and whose size is within the limits. Its pixels are not decoded yet."""
    from PIL import Image, UnidentifiedImageError

    check_bytes(what, len(data), limits)
    Image.MAX_IMAGE_PIXELS = None  # it would only warn; `check_pixels` refuses
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":  # its decoder allocates the canvas when it opens a file
        check_pixels(what, *_webp_size(data), limits)
    try:
        image = Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        raise InvalidRequestError(f"{what} is none of these formats: {', '.join(formats)}") from None
    check_pixels(what, *image.size, limits)
    return image


def _webp_size(data: bytes) -> tuple[int, int]:
    head = data[:30].ljust(30, b"\0")
    if head[12:16] == b"VP8X":
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    if head[12:16] == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return struct.unpack_from("<H", head, 26)[0] & 0x3FFF, struct.unpack_from("<H", head, 28)[0] & 0x3FFF


def decode_image(what: str, data: bytes, limits: Limits) -> Image.Image:
    """The first frame of an image file, upright, in RGB. What is transparent becomes white, as in vLLM.

    Raises:
        InvalidRequestError: another format, a damaged file, or one over a limit.
    """
    from PIL import Image, ImageOps

    with refusing(what):
        image = _open(what, data, IMAGE_FORMATS, limits)
        image.load()
        check_pixels(what, *image.size, limits)
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        return image.convert("RGB")


def decode_video(what: str, data: bytes, sample: Sampler, limits: Limits) -> Frames:
    """Frames of an animation (GIF, WebP, PNG) or of a video file. `sample` chooses which.

    Raises:
        InvalidRequestError: another format, a damaged file, or one over a limit.
        NotSupportedError: a video file, and PyAV is not installed.
    """
    with refusing(what):
        animated = data[:4] == b"GIF8" or data[:8] == b"\x89PNG\r\n\x1a\n" or data[8:12] == b"WEBP"
        return _animation(what, data, sample, limits) if animated else _container(what, data, sample, limits)


def _animation(what: str, data: bytes, sample: Sampler, limits: Limits) -> Frames:
    from PIL import ImageSequence

    image = _open(what, data, ANIMATED_FORMATS, limits)
    frames, milliseconds = [], 0.0
    for number, frame in enumerate(ImageSequence.Iterator(image), 1):
        if number > MAX_FRAMES:
            raise InvalidRequestError(f"{what} has more than {MAX_FRAMES} frames")
        check_pixels(what, *frame.size, limits, number)
        frames.append(np.asarray(frame.convert("RGB")))
        milliseconds += frame.info.get("duration", 0) or 0
    if len({frame.shape for frame in frames}) > 1:
        raise InvalidRequestError(f"{what} has frames of different sizes")
    fps = len(frames) / milliseconds * 1000 if milliseconds > 0 else None
    height, width, _ = frames[0].shape
    indices = _checked(what, sample(len(frames), fps, width, height), len(frames))
    return Frames(np.stack([frames[at] for at in indices]), fps, len(frames), indices)


def _checked(what: str, indices: Sequence[int], total: int) -> list[int]:
    found = [int(at) for at in indices]
    if not found or not all(0 <= at < total for at in found) or len(found) > MAX_FRAMES:
        raise InvalidRequestError(f"{what} has {total} frames; {len(found)} can't be chosen of them as was asked")
    return found


def _container(what: str, data: bytes, sample: Sampler, limits: Limits) -> Frames:
    check_bytes(what, len(data), limits)
    try:
        import av
    except ImportError:
        raise NotSupportedError(
            f"{what} is no animated GIF, WebP or PNG; for video files install PyAV: pip install 'mainspring[video]'"
        ) from None
    allowed = {"protocol_whitelist": "pipe", "format_whitelist": VIDEO_FORMATS}
    with av.open(io.BytesIO(data), options=allowed) as file:
        if not file.streams.video:
            raise InvalidRequestError(f"{what} has no video stream")
        stream = file.streams.video[0]
        width, height = stream.codec_context.width, stream.codec_context.height
        check_pixels(what, width, height, limits)
        stream.codec_context.options = {"max_pixels": str(limits.pixels)}  # its frames may be larger than it says
        fps = float(stream.average_rate) if stream.average_rate else None
        total = stream.frames or _count_packets(data, allowed)  # some formats have no number of frames
        if not 1 <= total <= MAX_VIDEO_FRAMES:
            raise InvalidRequestError(f"{what} has {total} frames; it must have 1 to {MAX_VIDEO_FRAMES}")
        indices = _checked(what, sample(total, fps, width, height), total)
        check_pixels(what, width, height, limits, len(set(indices)))
        wanted, found = set(indices), dict[int, np.ndarray]()
        for at, frame in enumerate(file.decode(stream)):
            if (frame.width, frame.height) != (width, height):
                raise InvalidRequestError(f"{what} changes its size from {width}×{height}")
            if at in wanted:
                found[at] = frame.to_ndarray(format="rgb24")
            if at >= max(wanted):
                break
    kept = [at for at in indices if at in found]  # a header may promise more frames than there are
    if not kept:
        raise InvalidRequestError(f"{what} has none of the {total} frames that its header promises")
    return Frames(np.stack([found[at] for at in kept]), fps, total, kept)


def _count_packets(data: bytes, allowed: dict[str, str]) -> int:
    """The number of frames of a video, or one more than the limit. Nothing is decoded."""
    import av

    with av.open(io.BytesIO(data), options=allowed) as file:
        packets = (packet for packet in file.demux(file.streams.video[0]) if packet.size)
        return sum(1 for _ in itertools.islice(packets, MAX_VIDEO_FRAMES + 1))


def decode_sound(what: str, data: bytes, rate: int, limits: Limits) -> np.ndarray:
    """The samples of a sound file, one channel, at `rate` samples per second: float32 [samples].

    Raises:
        InvalidRequestError: another format, a damaged file, or one over a limit.
        NotSupportedError: no WAV file, and soundfile is not installed.
    """
    check_bytes(what, len(data), limits)
    with refusing(what):
        if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
            samples, own_rate = _wav(what, data)
        else:
            samples, own_rate = _sound_file(what, data)
        return resample(what, samples.mean(axis=1, dtype=np.float32), own_rate, rate)


def _check_sound(what: str, frames: int, rate: float) -> None:
    if not 1 <= rate <= MAX_SAMPLING_RATE:
        raise InvalidRequestError(f"{what} has {rate} samples per second; it must be 1 to {MAX_SAMPLING_RATE}")
    if frames > MAX_SOUND_SECONDS * rate:
        raise InvalidRequestError(f"{what} is {frames / rate:.0f} s long; the limit is {MAX_SOUND_SECONDS:.0f} s")
    if frames > MAX_SOUND_SAMPLES:
        raise InvalidRequestError(f"{what} has {frames} samples; the limit is {MAX_SOUND_SAMPLES}")
    if frames < 1:
        raise InvalidRequestError(f"{what} is empty")


def _wav(what: str, data: bytes) -> tuple[np.ndarray, int]:
    """Samples [frames, channels] and sampling rate of a WAV file with PCM or float samples."""
    at, form, body = 12, b"", None
    while at + 8 <= len(data) and body is None:
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt ":
            form = data[at + 8 : at + 8 + size]
        elif name == b"data":
            body = data[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    if len(form) < 16 or body is None:
        raise InvalidRequestError(f"{what} is a WAV file without a format or without samples")
    tag, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
    if tag == _EXTENSIBLE and len(form) >= 26:
        tag = int.from_bytes(form[24:26], "little")
    if not 1 <= channels <= 64 or (tag, bits) not in {(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32)}:
        raise InvalidRequestError(f"{what} is a WAV file of format {tag} with {bits} bits and {channels} channels")
    width = bits // 8
    frames = len(body) // (width * channels)
    _check_sound(what, frames, rate)
    samples: np.ndarray
    flat = np.frombuffer(body, np.uint8, frames * channels * width)
    if tag == _FLOAT:
        samples = flat.view("<f4").astype(np.float32)
        if not np.isfinite(samples).all():
            raise InvalidRequestError(f"{what} has samples that are no numbers")
    elif width == 1:
        samples = (flat.astype(np.float32) - 128) / 128
    else:
        wide = np.zeros((frames * channels, 4), np.uint8)
        wide[:, 4 - width :] = flat.reshape(-1, width)
        samples = wide.reshape(-1).view("<i4").astype(np.float32) / 2**31
    return samples.reshape(frames, channels), rate


def _sound_file(what: str, data: bytes) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except ImportError:
        raise NotSupportedError(
            f"{what} is no WAV file; for other formats install soundfile: pip install 'mainspring[audio]'"
        ) from None
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        rate, count, parts = int(file.samplerate), 0, []
        while len(block := file.read(_BLOCK // file.channels, dtype="float32", always_2d=True)):
            count += len(block)
            _check_sound(what, count, rate)
            parts.append(block.mean(axis=1, dtype=np.float32, keepdims=True))
    _check_sound(what, count, rate)
    return np.concatenate(parts), rate


def raw_sound(what: str, values: np.ndarray, own_rate: float, rate: int) -> np.ndarray:
    """Check an array of samples, and resample it."""
    if values.ndim != 1 or values.dtype.kind != "f":
        raise InvalidRequestError(f"{what} is an array of {values.dtype} {list(values.shape)}; it must be float32 [n]")
    _check_sound(what, len(values), own_rate)
    samples = values.astype(np.float32)
    if not np.isfinite(samples).all():
        raise InvalidRequestError(f"{what} has samples that are no numbers")
    return resample(what, samples, int(own_rate), rate)


def resample(what: str, samples: np.ndarray, old: int, new: int) -> np.ndarray:
    """Change the sampling rate with a windowed sinc, which cuts what the lower rate can't carry."""
    if old == new:
        return samples
    common = math.gcd(old, new)
    up, down = new // common, old // common
    count = -(-len(samples) * up // down)
    _check_sound(what, count, new)
    cutoff = min(1.0, new / old)  # in units of the old rate's band
    half = math.ceil(_SINC_WIDTH / cutoff)
    padded = np.pad(samples, half)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half)
    result = np.empty(count, np.float32)
    taps = np.arange(2 * half) - half + 1
    for phase in range(min(up, count)):  # outputs `up` apart have the same weights
        distance = taps - phase * down % up / up  # in old samples, from each output to its inputs
        shape = np.cos(np.pi / 2 * np.clip(distance / half, -1, 1)) ** 2
        weights = (cutoff * np.sinc(cutoff * distance) * shape).astype(np.float32)
        mine = result[phase::up]
        mine[:] = np.einsum("ij,j->i", windows[phase * down // up + 1 :: down][: len(mine)], weights)
    return result


def facts_of(frames: Frames) -> dict[str, Any]:
    """What a video processor may want to know of the frames."""
    fps = frames.fps or 24.0  # what transformers takes if it is not known
    return {
        "total_num_frames": frames.total,
        "fps": fps,
        "duration": frames.total / fps,
        "frames_indices": frames.indices or list(range(frames.total)),
        "height": frames.pixels.shape[1],
        "width": frames.pixels.shape[2],
    }
