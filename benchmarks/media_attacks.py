"""Sends hostile media to a daemon beside a stream, and measures the gaps between the stream's tokens.

    python benchmarks/media_attacks.py --runs 3

Each kind of file or URL is sent again and again by a frontend with some in flight. Each run is repeated beside a
process that burns as much CPU time as the attacker and the media workers did. Bars: each item is refused, no core dies,
the stream is exact, the 99th percentile of its gaps is at most twice that beside burning, and no media worker has more
resident memory than `MOST_RESIDENT`.

The animation of 100,000 frames does not go through the daemon, because a model that takes videos needs torchvision. A
process with the priority of a media worker decodes it with the worker's function.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

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
from mainspring.media.__main__ import NICENESS, _take_short_slices
from mainspring.media.decode import Limits, decode_video

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
FRAMES = "100,000 frames"
IN_FLIGHT = 4
MOST_RESIDENT = 4 << 30  # bytes: what the process needs, `media.server.FREE_BYTES` and the cache
attacks.TOKENS = 400  # the model has 512 positions


def items() -> dict[str, Callable[[], list[MediaInput]]]:
    """What is sent, by kind."""
    from media_folders import file_of, picture, tone, wav_of
    from test_media_safety import SVG, gif, png, tiff, webp

    image = lambda content: [MediaInput("image", content)]  # noqa: E731
    photo = file_of(picture(0, 2000, 1500), "JPEG")
    return {
        "PNG bomb": lambda: image(png(13_000, 13_000)),
        "GIF bomb": lambda: image(gif(16_000, 16_000)),
        "WebP bomb": lambda: image(webp(16_000, 16_000)),
        "TIFF bomb": lambda: image(tiff(16_000, 16_000)),
        FRAMES: lambda: [MediaInput("video", gif(1, 1, 100_000))],
        "truncated JPEG": lambda: image(photo[: len(photo) // 2]),
        "SVG": lambda: image(SVG),
        "0×0": lambda: image(png(0, 0)),
        "sound as image": lambda: image(wav_of(tone())),
        "http://127.0.0.1": lambda: image("http://127.0.0.1/x.png"),
        "http://169.254.169.254": lambda: image("http://169.254.169.254/latest/meta-data/"),
        "http://[::1]": lambda: image("http://[::1]/x.png"),
        "file:///etc/passwd": lambda: image("file:///etc/passwd"),
        "4,000 items": lambda: image(SVG) * 4000,
        "placeholders of others": lambda: image(photo) * 2,
    }


def workers(daemon: int) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(daemon).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "mainspring.media" in one.cmdline():
                found.append(one)
    return found


def _attack(address: str, kind: str, daemon: int, seconds: float, pipe: Any) -> None:
    make = items()[kind]
    client = SyncClient(Connection(address))
    media = client.media()
    from media_folders import file_of, picture

    good = [MediaInput("image", file_of(picture(1)))]
    media.prepare("<image>", good, {}).result(120)  # the worker has started
    answers: Counter[str] = Counter()
    resident = 0
    cpu = lambda: sum(one.cpu_times().user + one.cpu_times().system for one in workers(daemon))  # noqa: E731
    began, used, theirs = time.monotonic(), time.process_time(), cpu()
    flying = [media.prepare("<image>", make(), {}) for _ in range(IN_FLIGHT)]
    while time.monotonic() < began + seconds:
        try:
            flying.pop(0).result(120)
            answers["accepted"] += 1
        except MainspringError as error:
            answers[type(error).__name__] += 1
        flying.append(media.prepare("<image>", make(), {}))
        if not sum(answers.values()) % 20:
            resident = max([resident, *(one.memory_info().rss for one in workers(daemon))])
    ended = time.monotonic()
    share = (time.process_time() - used + cpu() - theirs) / (ended - began)
    media.prepare("<image>", good, {}).result(120)
    answers["MiB resident"] = max([resident, *(one.memory_info().rss for one in workers(daemon))]) >> 20
    pipe.send(Beside(began, ended, share, answers))
    media.close()
    client.close()


def _decode_frames(_: str, kind: str, daemon: int, seconds: float, pipe: Any) -> None:
    """`_attack` without the daemon, for a video."""
    os.nice(NICENESS)
    _take_short_slices()
    (given,) = items()[kind]()
    limits = Limits(MultiModalConfig().max_media_pixels, MultiModalConfig().max_media_bytes)
    answers: Counter[str] = Counter()
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() < began + seconds:
        try:
            decode_video("video 0", given.content, lambda total, *_: range(total), limits)
            answers["accepted"] += 1
        except MainspringError as error:
            answers[type(error).__name__] += 1
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
    from media_models import make

    bars: list[Bar] = []
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = str(make("llava", Path(folder) / "llava"))
        flags = ("--model", model, "--max-model-len=512", "--dtype=float32", "--kv-cache-memory-bytes=8388608")
        with Daemon(*flags, threads=args.threads or 1) as daemon:
            victim = Victim(daemon.address)
            for kind in [args.only] if args.only else items():
                ratios, exact, answers, resident = [], True, Counter[str](), 0
                attack = _decode_frames if kind == FRAMES else _attack
                for _ in range(args.runs):
                    attacked, one, attacker = victim.gaps_beside(attack, daemon.address, kind, daemon.pid, args.seconds)
                    resident = max(resident, attacker.answers.pop("MiB resident"))
                    burning, other, _ = victim.gaps_beside(_burn, daemon.address, attacker.share, args.seconds)
                    ratios.append(attacked / burning)
                    exact, answers = exact and one and other, answers + attacker.answers
                    text = f"{kind}: p99 {attacked * 1e3:.2f} ms ({attacker.share:.2f} cores), {burning * 1e3:.2f} ms"
                    print(f"{text} beside burning; {dict(attacker.answers)}", flush=True)
                ratio = median(ratios)
                told = ", ".join(f"{count:,} × {name}" for name, count in answers.items())
                bars += [
                    Bar(kind, told, answers.keys() == {"InvalidRequestError"}),
                    Bar("… the stream's tokens", "exact" if exact else "not exact", exact),
                    Bar(
                        f"… p99 of the gaps to that beside burning ({MAX_RATIO:g})", f"{ratio:.2f}", ratio <= MAX_RATIO
                    ),
                    Bar("… resident memory", f"{resident} MiB", resident << 20 <= MOST_RESIDENT),
                ]
                details[kind] = {"ratios": ratios, "resident": resident, **answers}
            deaths = daemon.deaths()
            bars.append(Bar("deaths of the core (0)", str(len(deaths)), not deaths))
    return conclude(bars, details, args)


if __name__ == "__main__":
    sys.exit(main())
