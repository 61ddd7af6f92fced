"""Sends hostile media to a daemon beside a stream, and measures the gaps between the stream's tokens.

    PYTHONPATH=.venv/video:tests/torchvision_ops python benchmarks/media_attacks.py --runs 3

torchvision, which video processors need, is in .venv/video after `make test-video`.

Each kind of file, URL or prompt is sent again and again by a frontend with some in flight. Each run is repeated beside
a process that burns as much CPU time as the attacker and the media workers did. Bars: each item is refused (a polyglot
is only an image; an address, a redirect or a file outside the folder must be the reason, because each names an image
that could be read), no core dies, the stream is exact, the 99th percentile of its gaps is at most twice that beside
burning, and no media worker has more resident memory than `MOST_RESIDENT`.

Two kinds of URL need another resolver of names, and a server on this machine. A process with the priority of a media
worker asks the worker's function for them.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import itertools
import os
import socket
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

import attacks
from attacks import MAX_RATIO, Beside, Victim, _burn
from bars import Bar, add_arguments, conclude
from daemon import Daemon
from mainspring.ipc.config import MultiModalConfig
from mainspring.ipc.connection import Connection
from mainspring.ipc.errors import MainspringError
from mainspring.ipc.media_client import MediaInput
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.time_slices import take_short_slices
from mainspring.media.__main__ import NICENESS
from mainspring.media.fetch import Fetcher, is_global

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
IN_FLIGHT = 4
MOST_RESIDENT = 4 << 30  # bytes: what the process needs, `media.server.FREE_BYTES` and the cache
REFUSED = "InvalidRequestError"
HOST = "media.example"
attacks.TOKENS = 400  # the model has 512 positions


class Sent(NamedTuple):
    items: Callable[[], list[MediaInput]]
    prompt: str = "<image>"
    answer: str = REFUSED
    reason: str = ""  # words of the error


class _Image(BaseHTTPRequestHandler):
    """Answers each request with an image."""

    def do_GET(self) -> None:
        from media_folders import file_of, picture

        self.send_response(200)
        self.end_headers()
        self.wfile.write(file_of(picture(0)))


def kinds(folder: Path, port: int) -> dict[str, Sent]:
    """What is sent to the daemon, by kind. folder: where the daemon reads files. port: of `_Image` on this machine,
    whose hosts the daemon allows, though not their addresses."""
    from media_folders import file_of, picture, tone, wav_of
    from test_media_safety import SVG, gif, png, tiff, webp

    image = lambda content, reason="": Sent(lambda: [MediaInput("image", content)], reason=reason)  # noqa: E731
    photo = file_of(picture(0, 2000, 1500), "JPEG")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("x.svg", SVG)
    return {
        "PNG bomb": image(png(13_000, 13_000)),
        "GIF bomb": image(gif(16_000, 16_000)),
        "WebP bomb": image(webp(16_000, 16_000)),
        "TIFF bomb": image(tiff(16_000, 16_000)),
        "100,000 frames": Sent(lambda: [MediaInput("video", gif(1, 1, 100_000))], "<video>"),
        "truncated JPEG": image(photo[: len(photo) // 2]),
        "polyglot": image(file_of(picture(0)) + archive.getvalue())._replace(answer="accepted"),
        "SVG": image(SVG),
        "0×0": image(png(0, 0)),
        "sound as image": image(wav_of(tone())),
        "wrong MIME": image("data:image/png;base64," + base64.b64encode(SVG).decode()),
        "http://127.0.0.1": image(f"http://127.0.0.1:{port}/x.png", "is not public"),
        "http://169.254.169.254": image("http://169.254.169.254/latest/meta-data/", "allowed_media_domains"),
        "http://[::1]": image(f"http://[::1]:{port}/x.png", "is not public"),
        "file:///etc/passwd": image("file:///etc/passwd", "no file in the folder"),
        "file outside the folder": image(f"file://{folder.parent}/out.png", "no file in the folder"),
        "symlink out of the folder": image(f"file://{folder}/link.png", "no file in the folder"),
        "placeholders in the text": Sent(lambda: [MediaInput("image", photo)], "<image> of <image>"),
        "4,000 items": Sent(lambda: [MediaInput("image", SVG)] * 4000),
        "10,000 items": Sent(lambda: [MediaInput("image", SVG)] * 10_000),
    }


@contextlib.contextmanager
def redirecting() -> Iterator[Callable[[], bytes]]:
    """A host that answers with a redirect to a cloud's metadata."""
    from test_media_safety import _Answers

    server = HTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    name = f"{HOST}:{server.server_address[1]}"
    config = MultiModalConfig(allowed_media_domains=[name])
    fetcher = Fetcher(config, lambda *_: ["127.0.0.1"], lambda address: address == "127.0.0.1")
    yield lambda: fetcher.get("image 0", f"http://{name}/redirect")
    server.shutdown()


@contextlib.contextmanager
def changing() -> Iterator[Callable[[], bytes]]:
    """A name whose address is public and of this machine, in turn. Only a public one may be connected to."""
    answers = itertools.cycle([["93.184.215.14"], ["127.0.0.1"]])
    connect = socket.create_connection

    def stop(address: tuple[str, int], timeout: float) -> socket.socket:
        assert is_global(address[0]), address
        raise ConnectionRefusedError("no connection leaves this machine here")

    socket.create_connection = stop  # type: ignore[assignment]
    fetcher = Fetcher(MultiModalConfig(allowed_media_domains=[HOST]), lambda *_: next(answers))
    yield lambda: fetcher.get("image 0", f"http://{HOST}/x.png")
    socket.create_connection = connect


FETCHED = {"redirect": redirecting, "name whose address changes": changing}
REASONS = {"redirect": "redirects are not followed", "name whose address changes": ""}


def _named(error: MainspringError, reason: str) -> str:
    """What is counted of an error: its type, and its text if that is not the reason."""
    return type(error).__name__ + ("" if reason in str(error) else f": {error!s:.200}")


def workers(daemon: int) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(daemon).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "mainspring.media" in one.cmdline():
                found.append(one)
    return found


def _attack(address: str, kind: str, daemon: int, folder: Path, port: int, seconds: float, pipe: Any) -> None:
    sent = kinds(folder, port)[kind]
    client = SyncClient(Connection(address))
    media = client.media()
    from media_folders import file_of, picture

    good = [MediaInput("image", file_of(picture(1)))]
    media.prepare("<image>", good, {}).result(120)  # the worker has started
    answers: Counter[str] = Counter()
    resident = 0
    cpu = lambda: sum(one.cpu_times().user + one.cpu_times().system for one in workers(daemon))  # noqa: E731
    began, used, theirs = time.monotonic(), time.process_time(), cpu()
    flying = [media.prepare(sent.prompt, sent.items(), {}) for _ in range(IN_FLIGHT)]
    while time.monotonic() < began + seconds:
        try:
            flying.pop(0).result(120)
            answers["accepted"] += 1
        except MainspringError as error:
            answers[_named(error, sent.reason)] += 1
        flying.append(media.prepare(sent.prompt, sent.items(), {}))
        if not sum(answers.values()) % 20:
            resident = max([resident, *(one.memory_info().rss for one in workers(daemon))])
    ended = time.monotonic()
    share = (time.process_time() - used + cpu() - theirs) / (ended - began)
    media.prepare("<image>", good, {}).result(120)
    answers["MiB resident"] = max([resident, *(one.memory_info().rss for one in workers(daemon))]) >> 20
    pipe.send(Beside(began, ended, share, answers))
    media.close()
    client.close()


def _fetch(_: str, kind: str, daemon: int, folder: Path, port: int, seconds: float, pipe: Any) -> None:
    """`_attack` with the function of a media worker, but without the daemon."""
    os.nice(NICENESS)
    take_short_slices()
    answers: Counter[str] = Counter()
    with FETCHED[kind]() as fetch:
        began, used = time.monotonic(), time.process_time()
        while time.monotonic() < began + seconds:
            try:
                fetch()
                answers["accepted"] += 1
            except MainspringError as error:
                answers[_named(error, REASONS[kind])] += 1
        ended = time.monotonic()
        share = (time.process_time() - used) / (ended - began)
    answers["MiB resident"] = psutil.Process().memory_info().rss >> 20
    pipe.send(Beside(began, ended, share, answers))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each attack")
    parser.add_argument("--only", help="this kind only")
    add_arguments(parser)
    args = parser.parse_args()
    from media_folders import file_of, picture
    from vllm_media_examples import MODELS, make

    bars: list[Bar] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "media"
        folder.mkdir()
        (folder.parent / "out.png").write_bytes(file_of(picture(0)))
        (folder / "link.png").symlink_to(folder.parent / "out.png")
        images = HTTPServer(("127.0.0.1", 0), _Image)
        threading.Thread(target=images.serve_forever, daemon=True).start()
        port = images.server_address[1]
        hosts = f"127.0.0.1:{port}", f"[::1]:{port}"
        [recipe] = [one for one in MODELS if one.model_type == "llava_onevision"]  # it takes images and videos
        model = str(make(recipe, Path(temporary) / "model"))
        flags = ("--model", model, "--max-model-len=512", "--dtype=float32", "--kv-cache-memory-bytes=8388608")
        flags += (f"--allowed-local-media-path={folder}", "--allowed-media-domains", *hosts)
        sent = kinds(folder, port)
        with Daemon(*flags, threads=args.threads or 1) as daemon:
            victim = Victim(daemon.address)
            for kind in [args.only] if args.only else [*sent, *FETCHED]:
                ratios, gaps, exact, answers, resident = [], list[tuple[float, float]](), True, Counter[str](), 0
                expected = sent[kind].answer if kind in sent else REFUSED
                given = daemon.address, kind, daemon.pid, folder, port, args.seconds
                for _ in range(args.runs):
                    attacked, one, attacker = victim.gaps_beside(_attack if kind in sent else _fetch, *given)
                    resident = max(resident, attacker.answers.pop("MiB resident"))
                    longest = victim.longest
                    burning, other, _ = victim.gaps_beside(_burn, daemon.address, attacker.share, args.seconds)
                    ratios.append(attacked / burning)
                    gaps.append((longest, victim.longest))
                    exact, answers = exact and one and other, answers + attacker.answers
                    text = f"{kind}: p99 {attacked * 1e3:.2f} ms ({attacker.share:.2f} cores), {burning * 1e3:.2f} ms"
                    print(f"{text} beside burning; {dict(attacker.answers)}", flush=True)
                ratio = median(ratios)
                told = ", ".join(f"{count:,} × {name}" for name, count in answers.items())
                bars += [
                    Bar(kind, told, answers.keys() == {expected}),
                    Bar("… the stream's tokens", "exact" if exact else "not exact", exact),
                    Bar(
                        f"… p99 of the gaps to that beside burning ({MAX_RATIO:g})", f"{ratio:.2f}", ratio <= MAX_RATIO
                    ),
                    Bar(
                        "… the longest gap, beside burning",
                        ", ".join(f"{1e3 * median(each):.0f} ms" for each in zip(*gaps, strict=True)),
                        None,
                    ),
                    Bar("… resident memory", f"{resident} MiB", resident << 20 <= MOST_RESIDENT),
                ]
                details[kind] = {"ratios": ratios, "resident": resident, **answers}
            deaths = daemon.deaths()
            bars.append(Bar("deaths of the core (0)", str(len(deaths)), not deaths))
    return conclude(bars, details, args)


if __name__ == "__main__":
    sys.exit(main())
