"""Files and URLs of people who mean harm: each is refused with a reason, before it costs much."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import socket
import ssl
import struct
import threading
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mainspring.engine.args import EngineArgs
from mainspring.ipc.config import MultiModalConfig
from mainspring.ipc.errors import InvalidRequestError, MainspringError, NotSupportedError
from mainspring.ipc.media_client import MediaInput
from mainspring.media import fetch
from mainspring.media.decode import (
    IMAGE_FORMATS,
    MAX_FRAMES,
    Limits,
    decode_image,
    decode_sound,
    decode_video,
    raw_pixels,
    raw_sound,
    resample,
)
from mainspring.media.fetch import Fetcher, is_global
from mainspring.media.preparer import check_inputs
from media_folders import file_of, picture, tone, wav_of

LIMITS = Limits(pixels=1_000_000, bytes=1 << 20)
EVERY = lambda total, fps, width, height: range(total)  # noqa: E731


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    chunk = lambda name, body: (  # noqa: E731
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def gif(width: int, height: int, frames: int = 1, side: int = 1) -> bytes:
    """An animation whose frames are one pixel each, or of another side."""
    head = b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    frame = b"\x21\xf9\x04\0\1\0\0\0" + b"\x2c" + struct.pack("<HHHH", 0, 0, side, side) + b"\0" + b"\2\2\x4c\1\0"
    return head + frame * frames + b"\x3b"


def webp(width: int, height: int) -> bytes:
    body = b"VP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + (width - 1).to_bytes(3, "little")
    body += (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def tiff(width: int, height: int) -> bytes:
    tags = [(256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (277, 3, 1)]
    tags += [(278, 4, height), (279, 4, width * height & 0xFFFFFFFF)]
    body = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + body + b"\0\0\0\0"


@pytest.mark.parametrize("make", [png, gif, webp, tiff])
@pytest.mark.parametrize("size", [(13_000, 13_000), (16_000, 16_000), (65_535, 1)])
def test_a_decompression_bomb_is_refused_by_its_header(make: Callable[..., bytes], size: tuple[int, int]) -> None:
    data = make(*size)
    tracemalloc.start()
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match="the limit"):
        decode_image("image 0", data, LIMITS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.monotonic() - began < 0.5
    assert peak < 8 << 20


@pytest.mark.parametrize("data", [png(0, 5), png(5, 0), gif(0, 0, side=0), tiff(0, 0)])
def test_an_image_without_pixels_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_image("image 0", data, LIMITS)


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_a_truncated_file_is_refused(kind: str, share: float) -> None:
    data = file_of(picture(), kind, **({"compression": "raw"} if kind == "TIFF" else {}))
    assert decode_image("image 0", data, LIMITS).size == (90, 60)
    with pytest.raises(InvalidRequestError):
        decode_image("image 0", data[: int(len(data) * share)], LIMITS)


SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/etc/passwd) (r) file\n%%EOF\n"


@pytest.mark.parametrize(
    "data", [SVG, EPS, b"%PDF-1.7\n", b"PK\3\4", b"\0" * 100, b"", b"RIFF\0\0\0\0WEBP", wav_of(tone())]
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_image("image 0", data, LIMITS)


def test_other_formats_of_pillow_are_refused() -> None:
    for kind in ("PPM", "TGA", "PCX", "ICO", "SGI", "DDS"):
        with pytest.raises(InvalidRequestError, match="none of these formats"):
            decode_image("image 0", file_of(picture(), kind), LIMITS)


def test_a_polyglot_is_only_an_image() -> None:
    """An archive behind the end of a PNG, and a PNG under a false name: the content says what it is."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("x.svg", SVG)
    found = decode_image("image 0", file_of(picture()) + archive.getvalue(), LIMITS)
    assert np.array_equal(np.asarray(found), np.asarray(picture()))
    url = "data:image/svg+xml;base64," + base64.b64encode(file_of(picture())).decode()
    data = Fetcher(MultiModalConfig()).get("image 0", url)
    assert decode_image("image 0", data, LIMITS).size == (90, 60)
    wrong = "data:image/png;base64," + base64.b64encode(SVG).decode()
    with pytest.raises(InvalidRequestError, match="none of these formats"):
        decode_image("image 0", Fetcher(MultiModalConfig()).get("image 0", wrong), LIMITS)


def test_a_frame_larger_than_its_canvas_is_refused() -> None:
    data = bytearray(gif(10, 10))
    at = data.index(b"\x2c", 20)
    data[at + 5 : at + 9] = struct.pack("<HH", 30_000, 30_000)
    with pytest.raises(InvalidRequestError):
        decode_image("image 0", bytes(data), LIMITS)


@pytest.mark.parametrize(
    ("data", "why"),
    [(gif(1, 1, 100_000), f"more than {MAX_FRAMES} frames"), (gif(300, 300, 1000), "max_media_pixels")],
)
def test_an_animation_with_too_many_frames_is_refused(data: bytes, why: str) -> None:
    limits = Limits(LIMITS.pixels, 4 << 20)
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=why):
        decode_video("video 0", data, EVERY, limits)
    assert time.monotonic() - began < 5
    assert decode_image("image 0", data, limits).size in ((1, 1), (300, 300))  # as an image it is its first frame


def test_frames_of_an_animation_are_chosen_by_the_sampler() -> None:
    frames = [picture(seed, 20, 10) for seed in range(5)]
    data = file_of(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=100, lossless=True)
    found = decode_video("video 0", data, lambda *asked: asked == (5, 10.0, 20, 10) and [0, 3], LIMITS)
    assert (found.total, found.indices, found.fps) == (5, [0, 3], 10.0)
    assert np.array_equal(found.pixels[1], np.asarray(frames[3]))
    with pytest.raises(InvalidRequestError, match="can't be chosen"):
        decode_video("video 0", data, lambda *_: [9], LIMITS)


def test_video_files_need_their_decoder() -> None:
    with pytest.raises((NotSupportedError, InvalidRequestError), match=r"PyAV|can't be decoded"):
        decode_video("video 0", b"\0\0\0\x18ftypmp42" + b"\0" * 64, EVERY, LIMITS)


def test_raw_arrays_are_checked() -> None:
    for values in (np.zeros((0, 5, 3), np.uint8), np.zeros((5, 5), np.uint8), np.zeros((5, 5, 3), np.float32)):
        with pytest.raises(InvalidRequestError):
            raw_pixels("image 0", values, 3, LIMITS)
    wide = np.broadcast_to(np.uint8(1), (20_000, 20_000, 3))
    with pytest.raises(InvalidRequestError, match="max_media_pixels"):
        raw_pixels("image 0", wide, 3, LIMITS)
    for sound in (np.zeros(0, np.float32), np.full(9, np.nan, np.float32), np.zeros((2, 9), np.float32)):
        with pytest.raises(InvalidRequestError):
            raw_sound("audio 0", sound, 16_000, 16_000)
    for rate in (0, -1, 1e12):
        with pytest.raises(InvalidRequestError):
            raw_sound("audio 0", tone(), rate, 16_000)


# ---------------------------------------------------------------------- sound


@pytest.mark.parametrize("size", [0, 10, 20, 43, 45])
def test_a_truncated_wav_without_samples_is_refused(size: int) -> None:
    with pytest.raises(MainspringError):  # without its head it may be what soundfile reads
        decode_sound("audio 0", wav_of(tone())[:size], 16_000, LIMITS)


def test_wav_samples_of_each_width_are_read() -> None:
    samples = tone(0.1)
    head = lambda tag, bits, body: (  # noqa: E731
        b"RIFF\0\0\0\0WAVEfmt \x10\0\0\0"
        + struct.pack("<HHIIHH", tag, 1, 16_000, 16_000 * bits // 8, bits // 8, bits)
        + b"data" + struct.pack("<I", len(body)) + body
    )  # fmt: skip
    wide = (samples * (2**31 - 1)).astype("<i4")
    bodies = {
        (1, 8): ((samples * 127).round() + 128).astype(np.uint8).tobytes(),
        (1, 16): (samples * 32767).round().astype("<i2").tobytes(),
        (1, 24): wide.view(np.uint8).reshape(-1, 4)[:, 1:].tobytes(),
        (1, 32): wide.tobytes(),
        (3, 32): samples.astype("<f4").tobytes(),
    }
    for (tag, bits), body in bodies.items():
        found = decode_sound("audio 0", head(tag, bits, body), 16_000, LIMITS)
        np.testing.assert_allclose(found, samples, atol=2.0 ** (2 - min(bits, 20)))
    for tag, bits in ((1, 12), (3, 64), (85, 16), (1, 0)):
        with pytest.raises(InvalidRequestError, match="WAV file of format"):
            decode_sound("audio 0", head(tag, bits, b"\0" * 64), 16_000, LIMITS)


def test_a_wav_that_promises_days_of_silence_has_what_it_has() -> None:
    data = bytearray(wav_of(tone(0.1)))
    data[40:44] = struct.pack("<I", 0xFFFFFFF0)
    assert len(decode_sound("audio 0", bytes(data), 16_000, LIMITS)) == 1600
    data[24:28] = struct.pack("<I", 1)  # one sample per second: 1,600 s
    assert len(decode_sound("audio 0", bytes(data), 1, LIMITS)) == 1600
    with pytest.raises(InvalidRequestError, match="the limit is 3600 s"):
        raw_sound("audio 0", np.zeros(3601, np.float32), 1, 16_000)


@pytest.mark.parametrize("old", [8_000, 22_050, 44_100, 48_000])
def test_resampling_keeps_what_the_new_rate_can_carry(old: int) -> None:
    low, high = tone(1.0, old, 1_000), tone(1.0, old, min(10_000, old * 0.45))
    found = resample("audio 0", low, old, 16_000)
    middle = slice(200, 15_000)
    np.testing.assert_allclose(found[middle], tone(1.0, 16_000, 1_000)[middle], atol=2e-3)
    if old > 22_050:  # 10 kHz can't be carried, and must not come back as another tone
        assert np.abs(resample("audio 0", high, old, 16_000)[middle]).max() < 5e-3


# ---------------------------------------------------------------------- numbers of items


def test_ten_thousand_items_are_refused_at_once() -> None:
    items = [MediaInput("image", b"not looked at")] * 10_000
    with pytest.raises(InvalidRequestError, match="10000 image items; the limit is limit_mm_per_prompt, 32"):
        check_inputs(items, MultiModalConfig())
    with pytest.raises(InvalidRequestError, match="limit_mm_per_prompt, 4096"):
        check_inputs(items, MultiModalConfig(limit_mm_per_prompt={"image": 1_000_000}))
    check_inputs(items[:40], MultiModalConfig(limit_mm_per_prompt={"image": 40}))


# ---------------------------------------------------------------------- URLs

HERE = "media.example"


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        with contextlib.suppress(OSError):
            self.answer()

    def answer(self) -> None:
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/latest/meta-data/")
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x")
                time.sleep(0.05)
        elif self.path == "/drip":
            for byte in b"HTTP/1.0 200 OK\r\nX: " + b"y" * 80:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b"x" * 65536)
        elif self.path == "/promises":
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 40))
            self.end_headers()
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x")
        elif self.path == "/gzip":
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip")
            self.end_headers()
        else:
            self.send_response(200 if self.path == "/good?a=1" else 404)
            self.end_headers()
            self.wfile.write(f"for {self.headers['Host']}".encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def fetcher(port: int, **more: object) -> Fetcher:
    """Its resolver knows one host, and its check allows this machine."""
    config = MultiModalConfig(allowed_media_domains=[f"{HERE}:{port}"], max_media_bytes=1 << 20)
    options = {"resolve": lambda host, port: ["127.0.0.1"], "allows": lambda address: True, **more}
    return Fetcher(config, **options)  # type: ignore[arg-type]


def test_an_allowed_host_is_asked_by_its_name(port: int) -> None:
    assert fetcher(port).get("image 0", f"http://{HERE}:{port}/good?a=1#b") == f"for {HERE}:{port}".encode()


@pytest.mark.parametrize("kind", ["http", "https"])
def test_a_host_is_asked_without_the_port_that_its_url_leaves_out(
    kind: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some servers sign the header, or send those elsewhere that name another one."""

    class NoTls:
        def wrap_socket(self, raw: socket.socket, server_hostname: str) -> socket.socket:
            return raw

    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: connect(("127.0.0.1", port), timeout))
    monkeypatch.setattr(ssl, "create_default_context", NoTls)
    asks = Fetcher(MultiModalConfig(allowed_media_domains=[HERE]), lambda *_: ["127.0.0.1"], lambda address: True)
    assert asks.get("image 0", f"{kind}://{HERE}/good?a=1") == f"for {HERE}".encode()


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("redirect", "answered 302; redirects are not followed"),
        ("slow", "within"),
        ("drip", "within"),
        ("large", "the limit is max_media_bytes"),
        ("promises", "the limit is max_media_bytes"),
        ("short", "early|can't be fetched"),
        ("gzip", "compressed"),
        ("missing", "answered 404"),
    ],
)
def test_a_server_of_ill_will_is_refused(path: str, why: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "FETCH_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=why):
        fetcher(port).get("image 0", f"http://{HERE}:{port}/{path}")
    assert time.monotonic() - began < 2


PRIVATE = (
    "127.0.0.1 169.254.169.254 10.0.0.1 192.168.1.1 172.16.0.1 100.64.0.1 0.0.0.0 255.255.255.255 224.0.0.1 ::1 :: "
    "fe80::1%eth0 fc00::1 ff02::1 fec0::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::a9fe:a9fe 2002:7f00:1::"
).split()


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_not_connected_to(address: str) -> None:
    assert not is_global(address)
    config = MultiModalConfig(allowed_media_domains=[HERE])
    with pytest.raises(InvalidRequestError, match="is not public"):
        Fetcher(config, resolve=lambda *_: ["93.184.215.14", address]).get("image 0", f"http://{HERE}/x.png")


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "[::1]:8000", "[::1]"])
def test_an_address_may_be_listed_but_is_not_connected_to(host: str) -> None:
    config = EngineArgs(allowed_media_domains=[host]).create_engine_config().multimodal_config
    with pytest.raises(InvalidRequestError, match="is not public"):
        Fetcher(config, resolve=lambda name, _: [name]).get("image 0", f"http://{host}/x.png")
    with pytest.raises(InvalidRequestError, match="not of allowed_media_domains"):
        Fetcher(config, resolve=lambda name, _: [name]).get("image 0", "http://[::1]:9/x.png")


def test_public_addresses_are_public() -> None:
    assert all(map(is_global, ("93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::5db8:d70e")))


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x.png",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/x.png",
        "http://2130706433/x.png",
        "http://other.example/x.png",
        f"http://{HERE}.other.example/x.png",
        f"http://{HERE}@127.0.0.1/x.png",
        f"http://user:word@{HERE}/x.png",
        f"http://{HERE}:22/x.png",
        f"http://127.0.0.1\\@{HERE}/",
        f"http://{HERE}/x\r\nHost: 127.0.0.1",
        "http://",
        "ftp://media.example/x",
        "gopher://media.example/x",
        "javascript:alert(1)",
        "/etc/passwd",
        "",
    ],
)
def test_a_url_beyond_the_list_is_not_looked_up(url: str) -> None:
    def resolve(host: str, port: int) -> list[str]:
        raise AssertionError(f"looked up {host}")

    with pytest.raises(InvalidRequestError):
        Fetcher(MultiModalConfig(allowed_media_domains=[HERE]), resolve=resolve).get("image 0", url)


def test_no_host_is_allowed_by_default() -> None:
    with pytest.raises(InvalidRequestError, match=r"allowed_media_domains \(none\)"):
        Fetcher(MultiModalConfig()).get("image 0", f"https://{HERE}/x.png")


def test_a_name_is_resolved_once(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that gives a public address first and a private one later: the first is connected to."""
    answers = iter([["93.184.215.14"], ["127.0.0.1"]])
    connected: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        connected.append(address)
        raise ConnectionRefusedError("as far as this test goes")

    monkeypatch.setattr(socket, "create_connection", connect)
    found = fetcher(port, resolve=lambda *_: next(answers), allows=is_global)
    with pytest.raises(InvalidRequestError, match="can't be fetched"):
        found.get("image 0", f"http://{HERE}:{port}/good?a=1")
    assert connected == [("93.184.215.14", port)]


# ---------------------------------------------------------------------- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "media"
    found.mkdir()
    (found / "a b.png").write_bytes(b"inside")
    (found / "linked.png").symlink_to("a b.png")
    (found / "out.png").symlink_to("/etc/passwd")
    (tmp_path / "secret").write_bytes(b"outside")
    (found / "up.png").symlink_to("../secret")
    (found / "up").symlink_to("..")
    (tmp_path / "media-too").mkdir()
    (tmp_path / "media-too" / "x.png").write_bytes(b"beside")
    os.mkfifo(found / "pipe")
    (found / "large").write_bytes(b"x" * 2000)
    return found


def test_files_of_the_folder_are_read(folder: Path) -> None:
    found = Fetcher(MultiModalConfig(allowed_local_media_path=str(folder)))
    assert found.get("image 0", f"file://{folder}/a%20b.png") == b"inside"
    assert found.get("image 0", f"file://{folder}/linked.png") == b"inside"


@pytest.mark.parametrize(
    "path",
    [
        "out.png",
        "up.png",
        "up/secret",
        "../secret",
        "../media-too/x.png",
        "%2e%2e/secret",
        "missing",
        "pipe",
        ".",
        "large",
    ],
)
def test_files_out_of_the_folder_are_refused(path: str, folder: Path) -> None:
    config = MultiModalConfig(allowed_local_media_path=str(folder), max_media_bytes=1000)
    with pytest.raises(InvalidRequestError, match=r"allowed_local_media_path|max_media_bytes"):
        Fetcher(config).get("image 0", f"file://{folder}/{path}")


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file:///dev/zero", "file://host/etc/passwd", "file:etc/passwd"])
def test_no_file_is_read_by_default(url: str, folder: Path) -> None:
    for config in (MultiModalConfig(), MultiModalConfig(allowed_local_media_path=str(folder))):
        with pytest.raises(InvalidRequestError):
            Fetcher(config).get("image 0", url)


@pytest.mark.parametrize(
    "url", ["data:,", "data:image/png;base64,@@@@", "data:image/png", "data:;base64," + "A" * 4000]
)
def test_data_urls_are_checked(url: str) -> None:
    with pytest.raises(MainspringError):
        Fetcher(MultiModalConfig(max_media_bytes=1000)).get("image 0", url)


def test_transparent_and_rotated_images_are_upright_rgb() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    data = file_of(picture(0, 90, 60), "JPEG", exif=exif)
    assert decode_image("image 0", data, LIMITS).size == (60, 90)
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    for image in (clear, clear.quantize(), clear.convert("LA").convert("RGBA")):
        (background, drawn) = np.asarray(decode_image("image 0", file_of(image), LIMITS))[0].tolist()
        assert background == [255, 255, 255]
        assert drawn == list(image.convert("RGB").getpixel((1, 0)))
