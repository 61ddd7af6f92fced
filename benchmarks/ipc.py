"""The cost of the protocol, the cost of a frontend, and the effect of one frontend's flood on another.

    python benchmarks/ipc.py --runs 5

vLLM's figures are quoted from the issue that set these bars; they were not measured by this program.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec
import psutil

from bars import Bar, add_arguments, conclude
from daemon import Daemon, wait_for
from mainspring import LLMEngine, SamplingParams
from mainspring.ipc import codec
from mainspring.ipc.connection import ask_status
from mainspring.ipc.messages import Outputs, Stats
from saboteur import MODEL
from streams import Reference, Spec, make_specs

MB = 1 << 20
VOCABULARY = 150_000
FRONTENDS = 50
TOKENS = 256
SEATS = 32
FLOOD_PROMPT, FLOOD_OUTPUT = 1_000, 1_000
FLOOD_WAITING = 1_000
SINGLES = 100
BLOCKS = SEATS * 1_250 // 16  # fewer than the flood's requests need, so that it also fills the pool
_SPAWN = multiprocessing.get_context("spawn")

THIN = """
import sys, time
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is not to be imported by a frontend")
sys.meta_path.insert(0, Refuse())
began = time.perf_counter()
from mainspring import LLMEngine, SamplingParams
imported = time.perf_counter()
engine = LLMEngine.connect(sys.argv[1], **({"tokenizer": sys.argv[2]} if sys.argv[2:] else {}))
connected = time.perf_counter()
engine.add_request("thin", "17 + 25 =", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
texts = []
while engine.has_unfinished_requests():
    texts += [output.outputs[0].text for output in engine.step()]
streamed = time.perf_counter()
import json, psutil
rss = psutil.Process().memory_info().rss
print(json.dumps([imported - began, connected - imported, streamed - connected, rss, len(set(texts)) > 1]))
"""
TABLES = """
import psutil, sys, tokenizers
rss = lambda: psutil.Process().memory_info().rss
tokenizers.Tokenizer.from_str('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
before = rss()
tokenizer = tokenizers.Tokenizer.from_file(sys.argv[1])
print(rss() - before)
"""


def python(code: str, *arguments: str) -> Any:
    done = subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------- thin


def thin(runs: int, threads: int) -> list[Bar]:
    bars = []
    with Daemon(threads=threads) as daemon, tempfile.TemporaryDirectory() as folder:
        big = _big_tokenizer(Path(folder))
        python(THIN, daemon.address)  # fetches the tokenizer's files
        for name, tokenizer, arguments in (
            ("embedded tokenizer", MODEL, []),
            (f"tokenizer of {VOCABULARY:,} entries", big, [str(big)]),
        ):
            found = [python(THIN, daemon.address, *arguments) for _ in range(runs)]
            imported, connected, streamed, rss = (median(one) for one in list(zip(*found, strict=True))[:4])
            tables = median(python(TABLES, str(tokenizer / "tokenizer.json")) for _ in range(runs))
            whole, own = f"{rss / MB:.0f} MiB", (rss - tables) / MB
            small = tokenizer == MODEL
            bars += [
                Bar(f"{name}: connect (0.3 s)", f"{connected:.3f} s", connected < 0.3)
                if small
                else Bar(f"{name}: connect, its tables read", f"{connected:.3f} s", None),
                Bar("… import before it, and both", f"{imported:.3f} s, {imported + connected:.3f} s", None),
                Bar("… one streamed completion from text", f"{streamed:.3f} s", all(one[4] for one in found)),
                Bar(
                    "… resident, without the tokenizer's tables (64 MiB)",
                    f"{own:.0f} of {whole}, tables {tables / MB:.0f} MiB",
                    own <= 64,
                ),
            ]
    return [*bars, Bar("… vLLM's frontend, by the issue", "8 s, 576 MiB", None)]


def _big_tokenizer(folder: Path) -> Path:
    """The embedded tokenizer with more merges of tokens without digits, so that digits keep their token ids."""
    data = json.loads((MODEL / "tokenizer.json").read_text())
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    rng = random.Random(1)
    words = [token for token in vocab if token.isalpha() and token.isascii()]
    while len(vocab) < VOCABULARY:
        left, right = rng.choice(words), rng.choice(words)
        if (joined := left + right) not in vocab and len(joined) < 24:
            vocab[joined] = len(vocab)
            merges.append([left, right])
            words.append(joined)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        (folder / name).write_text((MODEL / name).read_text())
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


# ---------------------------------------------------------------------- many


def many(threads: int) -> list[Bar]:
    """Fifty processes stream at once, each its own request."""
    specs = [spec for spec in make_specs(3 * FRONTENDS, random.Random(5), (50, 150)) if not spec.draws_seed][:FRONTENDS]
    reference = Reference(specs)
    reference.learn_all()
    expected = [[one.token_ids for one in reference.of(index)] for index in range(len(specs))]
    reference.close()
    with Daemon(threads=threads) as daemon:
        gate = _SPAWN.Barrier(FRONTENDS)
        results = _SPAWN.SimpleQueue()
        processes = [
            _SPAWN.Process(target=_one_of_many, args=(daemon.address, number, spec, gate, results), daemon=True)
            for number, spec in enumerate(specs)
        ]
        for process in processes:
            process.start()
        threading.Thread(target=_join, args=(processes, results), daemon=True).start()
        right, most = 0, 0
        for _ in range(FRONTENDS):
            number, found, together = results.get()
            right += number is not None and found == expected[number]
            most = max(most, together)
    measured = f"{right} of {FRONTENDS} exact; up to {most} connected at once"
    return [Bar(f"{FRONTENDS} frontends at once stream correctly", measured, right == FRONTENDS == most)]


def _one_of_many(address: str, number: int, spec: Spec, gate: Any, results: Any) -> None:
    with LLMEngine.connect(address, name=f"frontend {number}", connect_timeout=120.0) as engine:
        gate.wait(300)
        prompt = spec.prompt if isinstance(spec.prompt, str) else {"prompt_token_ids": spec.prompt}
        engine.add_request("one", prompt, spec.params)
        found: list[list[int]] = [[] for _ in range(spec.params.n)]
        while engine.has_unfinished_requests():
            for output in engine.step():
                for one in output.outputs:
                    delta = spec.params.output_kind == 1
                    found[one.index] = found[one.index] + one.token_ids if delta else one.token_ids
        together = len(ask_status(address, 60.0).core.frontends)
        gate.wait(300)
        results.put((number, found, together))


def _join(processes: list[Any], results: Any) -> None:
    """Wait for the processes. Put an empty result for each that failed, because it has sent none."""
    for process in processes:
        process.join()
        if process.exitcode:
            results.put((None, [], 0))


# ---------------------------------------------------------------------- wire


def wire(threads: int) -> list[Bar]:
    rng = random.Random(2)
    handles = sorted(rng.sample(range(10_000, 60_000), TOKENS))
    message = Outputs(handles, [rng.randrange(150_000) for _ in range(TOKENS)])
    instance_id = b"12345678"
    frames = codec.encode(message, instance_id, 3)
    size = sum(len(frame) for frame in frames) / TOKENS

    def both() -> None:
        codec.decode(codec.encode(message, instance_id, 3))

    seconds = min(_seconds(both, 500) for _ in range(20)) / TOKENS
    with Daemon(threads=threads) as daemon, LLMEngine.connect(daemon.address) as engine:
        ping = partial(engine.engine_core.call, "ping")
        for _ in range(200):
            ping()
        trips = [_seconds(ping, 1) for _ in range(5000)]
    return [
        Bar(f"{TOKENS} one-token outputs: bytes a token (about 10)", f"{size:.1f}", size <= 11),
        Bar("… encode + decode, a token (0.1 µs)", f"{seconds * 1e6:.3f} µs", seconds <= 0.1e-6),
        Bar("… vLLM's, by the issue", "75 bytes, 0.23 µs", None),
        Bar(
            "round trip of an empty utility call, median (0.3 ms)",
            f"{median(trips) * 1e3:.3f} ms",
            median(trips) < 3e-4,
        ),
    ]


def _seconds(run: Callable[[], Any], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times


# ---------------------------------------------------------------------- flood


def flood(threads: int) -> list[Bar]:
    flags = ["--max-num-seqs", str(SEATS), "--num-gpu-blocks-override", str(BLOCKS)]
    with Daemon(*flags, threads=threads) as daemon, LLMEngine.connect(daemon.address, name="single") as engine:
        _first_tokens(engine, random.Random(3), 10)
        alone = _first_tokens(engine, random.Random(4), SINGLES)
        stop = _SPAWN.RawValue("i", 0)
        flooder = _SPAWN.Process(target=_flood, args=(daemon.address, stop), daemon=True)
        flooder.start()

        def is_full() -> bool:
            stats = daemon.status().stats
            return stats.num_running >= SEATS and stats.num_waiting >= FLOOD_WAITING and stats.kv_cache_usage > 0.95

        wait_for(is_full, "the flood fills every seat and keeps 1,000 waiting")
        before, began = _steps(engine), time.monotonic()
        full_before = daemon.status().stats
        flooded = _first_tokens(engine, random.Random(6), SINGLES)
        step = (time.monotonic() - began) / (_steps(engine) - before)
        full = daemon.status().stats
        stop.value = 1
        flooder.kill()
        flooder.join()
    state = (
        f"{full_before.num_running}/{full.num_running} running, {full_before.num_waiting:,}/{full.num_waiting:,} "
        f"waiting, {full_before.kv_cache_usage:.0%}/{full.kv_cache_usage:.0%} of the pool, step {step * 1e3:.1f} ms"
    )
    bars = [Bar("flood: before/after the single requests", state, full.num_waiting >= FLOOD_WAITING * 0.95)]
    for name, at in (("p50", 49), ("p95", 94)):
        quiet, loud = quantiles(alone, n=100)[at], quantiles(flooded, n=100)[at]
        limit = 2 * quiet + 2 * step
        measured = f"{loud * 1e3:.1f} ms; alone {quiet * 1e3:.1f} ms, so at most {limit * 1e3:.1f} ms"
        bars.append(Bar(f"… {name} of {SINGLES} single requests to the first token", measured, loud <= limit))
    return bars


def _steps(engine: LLMEngine) -> int:
    return msgspec.convert(engine.engine_core.call("stats"), Stats).num_steps


def _first_tokens(engine: LLMEngine, rng: random.Random, count: int) -> list[float]:
    """Seconds from adding a request to its first token, one request after the other."""
    seconds = []
    for number in range(count):
        prompt = {"prompt_token_ids": [rng.randrange(100, 1000) for _ in range(32)]}
        began = time.perf_counter()
        engine.add_request(f"single {number}", prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        while not engine.step():
            pass
        seconds.append(time.perf_counter() - began)
        while engine.has_unfinished_requests():
            engine.step()
    return seconds


def _flood(address: str, stop: Any) -> None:
    """2,000-token requests, 1,000 more than there are slots, until stopped."""
    rng = random.Random(9)
    params = SamplingParams(temperature=0, max_tokens=FLOOD_OUTPUT, ignore_eos=True, detokenize=False, output_kind=2)
    with LLMEngine.connect(address, name="flood") as engine:
        number = 0
        while not stop.value:
            while engine.get_num_unfinished_requests() < SEATS + FLOOD_WAITING + 20:
                prompt = {"prompt_token_ids": [rng.randrange(100, 1000) for _ in range(FLOOD_PROMPT)]}
                engine.add_request(f"flood {number}", prompt, params)
                number += 1
            engine.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes, of which the median counts")
    parser.add_argument("--only", nargs="+", choices=["thin", "many", "wire", "flood"])
    add_arguments(parser)
    args = parser.parse_args()
    measures = {
        "thin": partial(thin, args.runs, args.threads),
        "many": partial(many, args.threads),
        "wire": partial(wire, args.threads),
        "flood": partial(flood, args.threads),
    }
    bars = []
    for name in args.only or measures:
        print(f"{name} …", flush=True)
        bars += measures[name]()
    return conclude(bars, {"cores": psutil.cpu_count()}, args)


if __name__ == "__main__":
    sys.exit(main())
