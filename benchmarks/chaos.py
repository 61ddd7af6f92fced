"""Kill cores, daemons and frontends while streams run, and check that no stream notices more than a pause.

    python benchmarks/chaos.py --kills 100 --seed 1
    python benchmarks/chaos.py --kills 10 --only kills --family qwen3_next
    python benchmarks/chaos.py --kills 50 --only kills --ranks 2
    python benchmarks/chaos.py --kills 30 --only kills poison --cores 3

The kills land at random moments, by the seed, while at least 32 of the 64 streams of 4 frontends are unfinished. Deaths
of other processes, and a request that kills the core, are separate scenarios (`--only`). Exit code 1 if a bar is
missed.

A kill counts as during a prefill if a request in flight has no token yet. This is read from the supervisor's journal
while the core is stopped (SIGSTOP, not counted as a kill), right before the signal that ends it. Exceptions and failed
allocations happen in the next step, whatever it computes, and are not counted.

With `--ranks` several processes compute the model together, and each kill is of one of them, drawn by chance. Tokens
are compared with those of an undisturbed core of as many ranks.

With `--cores` each kill takes a core at random among those that serve, of which there are at least two.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from bars import Bar, add_arguments, conclude
from daemon import Daemon, wait_for
from mainspring import LLMEngine, SamplingParams
from mainspring.ipc.errors import ConnectError
from mainspring.ipc.journal import Journal
from mainspring.ipc.messages import CoreStatus
from report import ROOT
from saboteur import MODEL, POISON, Saboteur
from streams import Load, Record, Reference, compare, long_specs, make_specs

SHARES = {"SIGSEGV": 0.12, "exception": 0.10, "allocation": 0.08, "SIGSTOP": 0.10}  # the other kills are SIGKILLs
PREFILL_SHARE = 0.4  # share of kills by signal that wait for a prefill
LEAST_UNFINISHED = 32
LEAST_PREFILLS = 0.20  # share of all kills
LEAST_SPANNING = 20  # streams per kill
PAUSE = (0.1, 3.0)  # seconds between the first token after a kill and the next kill
FRESH = 32  # streams that must begin between two kills, so that kills do not hit the same ones repeatedly
HASTE = 0.2  # share of kills that do not wait for that
PREFILL_SECONDS = 20.0  # seconds to wait for a prefill
WATCHDOG_SECONDS = 5.0
FRONTEND_TIMEOUT = 3.0
SEATS = 56  # fewer than streams, so that some wait


class Kill(NamedTuple):
    number: int
    kind: str
    rank: int  # 0, unless the core has several
    at: float
    epoch: int
    unfinished: int
    prefill: bool | None  # None: not known
    recovery_s: float


class Chaos:
    """Common code of all scenarios."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.threads, self.kills, self.seed, self.cores = args.threads, args.kills, args.seed, args.cores
        self.folder, self.ranks = folder, args.ranks
        self.model = make_model(args.family, folder / "model") if args.family else {}
        self.rng = random.Random(args.seed)
        usual = make_specs(min(500, 60 + 10 * args.kills), self.rng, tokens=(40, 300))
        bursts = math.ceil(PREFILL_SHARE * args.kills)
        longs = long_specs(min(24, 4 * bursts), self.rng)  # one for each frontend at each burst
        self.specs = [*usual, *longs]
        self.longs = range(len(usual), len(self.specs))
        self.reference = Reference(self.specs, tensor_parallel_size=self.ranks, **self.model)
        print(f"{len(self.specs)} specs: the undisturbed core computes what they bring", flush=True)
        self.reference.learn_all()

    def daemon(self, *flags: str, env: dict[str, str] | None = None) -> Daemon:
        common = ["--max-num-seqs", str(SEATS), "--max-restarts", "1000000"]
        common += ["--tensor-parallel-size", str(self.ranks)] if self.ranks > 1 else []
        common += ["--data-parallel-size", str(self.cores)] if self.cores > 1 else []
        common += [part for name, value in self.model.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        return Daemon(*common, *flags, threads=self.threads, env=env)

    def saboteur(self, name: str, poison: signal.Signals | None = None) -> Saboteur:
        return Saboteur(self.folder / name, poison, Path(self.model.get("model", MODEL)))

    def load(self, daemon: Daemon, streams: int = 16) -> Load:
        return Load(daemon.address, self.specs, streams=streams, seed=self.seed, extra=self.longs)


def make_model(family: str, folder: Path) -> dict[str, Any]:
    """A tiny random checkpoint of a family of `tests/tiny.py`, as arguments of the engine."""
    sys.path.append(str(ROOT / "tests"))
    import tiny

    tiny.make(family, folder, tokenizer=True, vocab_size=1024, max_position_embeddings=4096)
    return {"model": str(folder), "max_model_len": 4096, "num_gpu_blocks_override": 4096}


# ---------------------------------------------------------------------- the core is killed, again and again


def kill_cores(chaos: Chaos) -> tuple[list[Bar], dict[str, Any]]:
    others = [kind for kind, share in SHARES.items() for _ in range(max(1, round(share * chaos.kills)))]
    kinds = (["SIGKILL"] * max(1, chaos.kills - len(others)) + others)[: chaos.kills]
    chaos.rng.shuffle(kinds)
    by_signal = [number for number, kind in enumerate(kinds) if kind.startswith("SIG")]
    in_prefill = set(chaos.rng.sample(by_signal, math.ceil(PREFILL_SHARE * len(by_signal))))
    saboteur = chaos.saboteur("kills")
    flags = [*saboteur.flags, "--watchdog-timeout", str(WATCHDOG_SECONDS)]
    kills: list[Kill] = []
    with chaos.daemon(*flags, env=saboteur.env) as daemon, chaos.load(daemon) as load:
        for number, kind in enumerate(kinds):
            fresh = load.begun() + (0 if chaos.rng.random() < HASTE else FRESH)
            time.sleep(chaos.rng.uniform(*PAUSE))
            wait_for(lambda fresh=fresh: load.begun() >= fresh, f"{FRESH} new streams")
            rank = chaos.rng.randrange(chaos.ranks)
            kills.append(_kill(number, kind, rank, number in in_prefill, daemon, load, chaos, saboteur))
            print(_line(kills[-1], len(kinds)), flush=True)
        records, unfinished = load.finish()
        deaths = daemon.deaths()
    tally = compare(records, chaos.reference)
    spanned, in_midstream = _spanning(records, [kill.at for kill in kills])
    if len(deaths) != len(kills):
        print("\n".join(deaths))
    prefills = sum(kill.prefill is True for kill in kills)
    least = min(kill.unfinished for kill in kills)
    need_prefills, need_spanning = math.ceil(LEAST_PREFILLS * len(kills)), LEAST_SPANNING * len(kills)
    bars = [
        Bar("kills of the core", f"{len(kills)}, {len(deaths)} deaths", len(deaths) == len(kills) == chaos.kills),
        Bar("unfinished streams at a kill, least (32)", str(least), least >= LEAST_UNFINISHED),
        Bar(f"kills during prefill ({need_prefills})", str(prefills), prefills >= need_prefills),
        Bar(f"streams that spanned a kill ({need_spanning:,})", f"{spanned:,}", spanned >= need_spanning),
        Bar("… with tokens before and after", f"{in_midstream:,}", None),
        Bar("requests lost (0)", f"{unfinished + tally.failed} of {len(records):,}", not unfinished + tally.failed),
        Bar("tokens lost, repeated, different (0)", _tokens(tally), tally.exact),
        *(_recovery(kind, kills) for kind in sorted({kill.kind for kill in kills})),
    ]
    return bars, {"kills": [kill._asdict() for kill in kills], "deaths": deaths, "examples": list(tally.examples)}


def _kill(
    number: int,
    kind: str,
    rank: int,
    in_prefill: bool,
    daemon: Daemon,
    load: Load,
    chaos: Chaos,
    saboteur: Saboteur,
) -> Kill:
    """Kill a rank of a core once enough streams are unfinished, and wait until tokens come again."""
    serving: list[CoreStatus] = []

    def enough() -> bool:
        serving[:] = _cores(daemon)
        return len(serving) >= min(2, chaos.cores)  # so that another one goes on

    wait_for(enough, "a core serves")
    before = chaos.rng.choice(serving)
    journal = daemon.journal(SEATS, before.core_pid, chaos.ranks)
    core = psutil.Process(before.core_pid)
    others = sorted(child.pid for child in core.children() if "mainspring.core.rank" in child.cmdline())
    victim = psutil.Process(others[rank - 1]) if rank else core
    wait_for(lambda: load.unfinished() >= LEAST_UNFINISHED, f"{LEAST_UNFINISHED} unfinished streams")
    prefill = None
    if kind.startswith("SIG"):
        if in_prefill:
            load.burst()
        deadline = time.monotonic() + PREFILL_SECONDS
        while True:
            while in_prefill and not _prefills(journal) and time.monotonic() < deadline:
                time.sleep(0.001)
            core.suspend()
            wait_for(lambda: core.status() == psutil.STATUS_STOPPED, "the core is stopped")
            prefill = _prefills(journal)
            if prefill or not in_prefill or time.monotonic() > deadline:
                break
            core.resume()
        at, unfinished = time.monotonic(), load.unfinished()
        victim.send_signal(signal.Signals[kind])
        if kind != "SIGSTOP" or rank:
            core.resume()
    else:
        at, unfinished = time.monotonic(), load.unfinished()
        saboteur.order(kind)
        wait_for(lambda: saboteur.obeyed, f"the core obeys: {kind}")
    wait_for(lambda: max(load.board.resumed) > at, f"tokens after kill {number + 1}, {kind}")
    recovery = min(resumed for resumed in load.board.resumed if resumed > at) - at
    return Kill(number, kind, rank, at, before.epoch, unfinished, prefill, recovery)


def _cores(daemon: Daemon) -> list[CoreStatus]:
    try:
        return daemon.cores()
    except ConnectError:  # one is being restarted
        return []


def _prefills(journal: Journal) -> bool:
    return any(accused.position == 0 for accused in journal.accused())


def _line(kill: Kill, count: int) -> str:
    prefill = {True: ", during prefill", False: "", None: ""}[kill.prefill]
    return (
        f"kill {kill.number + 1}/{count}: {kill.kind} of rank {kill.rank}, epoch {kill.epoch}, {kill.unfinished} "
        f"unfinished streams{prefill}; tokens again after {kill.recovery_s:.2f} s"
    )


def _spanning(records: list[Record], kills: list[float]) -> tuple[int, int]:
    """Numbers of streams unfinished at a kill, and of those with tokens both before and after it."""
    spanning = [record for record in records if any(record.began < at < record.ended for at in kills)]
    return len(spanning), sum(record.parts > 1 for record in spanning)


def _tokens(tally: Any) -> str:
    wrong = (tally.tokens_lost, tally.tokens_repeated, tally.tokens_different)
    return f"{', '.join(map(str, wrong))} of {tally.tokens:,}; {tally.ends_different} texts or ends differ"


def _recovery(kind: str, kills: list[Kill]) -> Bar:
    seconds = [kill.recovery_s for kill in kills if kill.kind == kind]
    measured = f"{median(seconds):.2f} s, at most {max(seconds):.2f} s ({len(seconds)} kills)"
    return Bar(f"from {kind} to the first token after it, median", measured, None)


# ---------------------------------------------------------------------- other deaths


def poisoned_request(chaos: Chaos) -> tuple[list[Bar], dict[str, Any]]:
    bars: list[Bar] = []
    for poison, most in ((signal.SIGSEGV, 3), (signal.SIGKILL, 4)):
        saboteur = chaos.saboteur(poison.name, poison)
        with (
            chaos.daemon(*saboteur.flags, env=saboteur.env) as daemon,
            chaos.load(daemon, 8) as load,
            LLMEngine.connect(daemon.address, name="poisoner") as engine,
        ):
            time.sleep(1.0)
            params = SamplingParams(temperature=0, max_tokens=8)
            engine.add_request("poisoned", {"prompt_token_ids": [100, *POISON, *range(200, 220)]}, params)
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            end = outputs[-1].outputs[0]
            records, unfinished = load.finish()
            crashes = len(daemon.deaths())
        tally = compare(records, chaos.reference)
        failed = type(end.error).__name__ == "RequestFailedError" and poison.name in str(end.error)
        bars += [
            Bar(f"poisoned request, {poison.name}: crashes (at most {most})", str(crashes), crashes <= most and failed),
            Bar("… its error", str(end.error), failed),
            Bar("… all others", tally.describe(), tally.exact and not unfinished),
        ]
    return bars, {}


def supervisor_killed(chaos: Chaos) -> tuple[list[Bar], dict[str, Any]]:
    with chaos.daemon() as daemon, chaos.load(daemon) as load:
        time.sleep(2.0)
        core, unfinished_then, at = daemon.status().core_pid, load.unfinished(), time.monotonic()
        daemon.kill()
        gone = wait_for(lambda: not psutil.pid_exists(core), "the core goes with its supervisor")
        daemon.start()
        wait_for(lambda: min(load.board.resumed) > at, "every frontend has tokens again")
        pause = min(load.board.resumed) - at
        records, unfinished = load.finish()
    tally = compare(records, chaos.reference)
    spanned, in_midstream = _spanning(records, [at])
    measured = f"{spanned} spanned it, {in_midstream} in mid-stream; {tally.describe()}"
    return [
        Bar("supervisor killed, daemon started again", measured, tally.exact and not unfinished and spanned > 0),
        Bar("… unfinished streams then; tokens again after", f"{unfinished_then}; {pause:.2f} s", None),
        Bar("… its core is gone after", f"{gone:.2f} s", None),
    ], {}


def frontend_killed(chaos: Chaos) -> tuple[list[Bar], dict[str, Any]]:
    with chaos.daemon("--frontend-timeout", str(FRONTEND_TIMEOUT)) as daemon, chaos.load(daemon) as load:
        time.sleep(2.0)
        victim = next(one for one in daemon.status().frontends if one.name == "sync 0")
        load.processes[0].kill()

        def is_gone() -> bool:
            return victim.name not in [one.name for one in daemon.status().frontends]

        seconds = wait_for(is_gone, "the core forgets the dead frontend")
        time.sleep(1.0)
        records, unfinished = load.finish(without=[0])
        wait_for(lambda: not daemon.status().stats.num_running, "nothing runs")
        usage = daemon.status().stats.kv_cache_usage
    tally = compare(records, chaos.reference)
    had = f"{victim.num_running} running, {victim.num_waiting} waiting"
    return [
        Bar(
            f"frontend killed ({had}): forgotten (within {FRONTEND_TIMEOUT:g} s)",
            f"{seconds:.2f} s",
            victim.num_running > 0 and seconds <= FRONTEND_TIMEOUT,
        ),
        Bar("… blocks in use once the others have ended (0)", f"{usage:.2%}", usage == 0),
        Bar("… all others", tally.describe(), tally.exact and not unfinished),
    ], {}


def frontend_stopped(chaos: Chaos) -> tuple[list[Bar], dict[str, Any]]:
    with chaos.daemon("--frontend-timeout", str(FRONTEND_TIMEOUT)) as daemon, chaos.load(daemon) as load:

        def rate(seconds: float) -> float:
            """Tokens a second of all frontends but the first."""
            before = sum(load.board.tokens[1:])
            time.sleep(seconds)
            return (sum(load.board.tokens[1:]) - before) / seconds

        time.sleep(2.0)
        usual = rate(2.0)
        process = psutil.Process(load.processes[0].pid)
        process.suspend()
        meanwhile, had = rate(FRONTEND_TIMEOUT * 1.5), load.board.tokens[0]
        process.resume()
        wait_for(lambda: load.board.tokens[0] > had, "the frontend that woke has tokens again")
        records, unfinished = load.finish()
    tally = compare(records, chaos.reference)
    return [
        Bar(
            f"frontend stopped for {FRONTEND_TIMEOUT * 1.5:g} s, then woken (it and all others)",
            tally.describe(),
            tally.exact and not unfinished,
        ),
        Bar(
            "… tokens/s of the others while it was stopped, and before",
            f"{meanwhile:,.0f}, {usual:,.0f}",
            meanwhile > usual / 2,
        ),
    ], {}


SCENARIOS: dict[str, Callable[[Chaos], tuple[list[Bar], dict[str, Any]]]] = {
    "kills": kill_cores,
    "poison": poisoned_request,
    "supervisor": supervisor_killed,
    "frontend": frontend_killed,
    "stopped": frontend_stopped,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, help="of moments, prompts and parameters; default: a new one, printed")
    parser.add_argument(
        "--family", help="of tests/tiny.py: its tiny random model is served instead of the built-in one"
    )
    parser.add_argument("--cores", type=int, default=1, help="with copies of the model (data parallel)")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--ranks", type=int, default=1, help="processes that compute the model together")
    add_arguments(parser)
    args = parser.parse_args()
    args.seed = int.from_bytes(os.urandom(4), "big") if args.seed is None else args.seed
    print(f"seed {args.seed}", flush=True)
    bars, details = [], {}
    with tempfile.TemporaryDirectory(prefix="mainspring-chaos-") as folder:
        chaos = Chaos(args, Path(folder))
        for name in args.only:
            print(f"{name}:", flush=True)
            found, details[name] = SCENARIOS[name](chaos)
            bars += found
        chaos.reference.close()
    named = [
        *([args.family] if args.family else []),
        *([f"{args.ranks} ranks"] if args.ranks > 1 else []),
        *([f"{args.cores} cores"] if args.cores > 1 else []),
    ]
    section = {"section": " ".join(["chaos", *named])} if named else {}
    return conclude(bars, {"seed": args.seed, **section, **details}, args)


if __name__ == "__main__":
    sys.exit(main())
