"""Several cores behind one address: requests are spread over them, move when a core dies or leaves, and a request that
kills cores is found wherever it goes. Most tests have cores without a model (stand_in_process.py)."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from rich.console import Console

import stand_in_process
from daemons import Daemon, run, short_folder
from mainspring import LLM, EngineArgs, LLMEngine, SamplingParams
from mainspring.core.features.moved import MovedRequests
from mainspring.core.loop import EngineCore
from mainspring.ipc.async_client import AsyncClient
from mainspring.ipc.client import connect
from mainspring.ipc.config import EngineConfig, ModelConfig, ParallelConfig, ServiceConfig
from mainspring.ipc.connection import Connection
from mainspring.ipc.core_group import CoreGroup, EmbeddedCores
from mainspring.ipc.cores import Cores
from mainspring.ipc.errors import (
    AddressInUseError,
    ConnectError,
    EngineDeadError,
    EngineStartError,
    InvalidArgumentError,
    InvalidRequestError,
    NotSupportedError,
    RequestFailedError,
)
from mainspring.ipc.journal import Journal, request_key
from mainspring.ipc.messages import AddRequest, CoreStatus, Finished, FrontendStatus, News, Outputs, Sampling, Stats
from mainspring.ipc.routing import choose, prefix_of
from mainspring.ipc.siblings import NewsPipe, NewsReader, Siblings
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.transport import CoreLaunch, Endpoints
from mainspring.serve.scale import admin_of, scale
from mainspring.serve.status import document, frame, look
from stand_in_process import HARMLESS, KILL, SEGV
from wire import eventually

GUARD = 120.0
TOKENS = 2500  # of a stream: about a second


def configured(count: int, **service: Any) -> EngineConfig:
    return EngineConfig(
        parallel_config=ParallelConfig(data_parallel_size=count), service_config=ServiceConfig(**service)
    )


def request(handle: int, max_tokens: int = TOKENS, how: int = HARMLESS, at: int = 0) -> AddRequest:
    """Its tokens are the numbers from `handle` · 100,000 on."""
    return AddRequest(handle, "", [handle * 100_000, how, at], Sampling(max_tokens))


def whole(handle: int, max_tokens: int = TOKENS) -> list[int]:
    return list(range(handle * 100_000, handle * 100_000 + max_tokens))


class Group:
    """Cores without a model, and a client of all of them."""

    def __init__(self, count: int, **service: Any) -> None:
        self.owner = EmbeddedCores(configured(count, **service))
        self.client = SyncClient(connect(self.owner))
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Finished] = {}

    @property
    def cores(self) -> Cores:
        assert isinstance(self.client._connection, Cores)
        return self.client._connection

    @property
    def restarts(self) -> int:
        return sum(one.launch.restarts for one in self.owner.group.supervisors.values())

    def add(self, *handles: int, **options: Any) -> None:
        for handle in handles:
            self.tokens[handle] = []
            self.client.add_request(request(handle, **options))

    def take(self, outputs: Outputs) -> None:
        for handle, token in zip(outputs.handles, outputs.token_ids, strict=True):
            self.tokens[handle].append(token)
        for finished in outputs.finished:
            assert finished.handle not in self.ended, "it ended twice"
            self.ended[finished.handle] = finished

    def read(self, enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GUARD
        while not enough():
            assert time.monotonic() < deadline, f"{len(self.tokens) - len(self.ended)} requests did not end"
            if (outputs := self.client.get_outputs(0.05)) is not None:
                self.take(outputs)

    def finish(self) -> None:
        self.read(lambda: len(self.ended) == len(self.tokens))

    def began(self) -> None:
        """Read until every request has tokens."""
        self.read(lambda: all(self.tokens.values()))

    def place_of(self, handle: int) -> int:
        return next(number for number, one in self.cores._all.items() if handle in one._ledger)

    def answers(self, number: int) -> bool:
        self.cores.receive()
        return number in self.cores._all and self.cores._all[number].ready_at is not None

    def shares(self) -> dict[int, int]:
        return {number: len(one._ledger) for number, one in self.cores._all.items()}

    def kill(self, number: int, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.owner.group.supervisors[number].core_pid or 0, how)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    stand_in_process.replace_cores(tmp_path, monkeypatch)
    started: list[Group] = []

    def make(count: int, **service: Any) -> Group:
        started.append(Group(count, **service))
        return started[-1]

    yield make
    for one in started:
        one.client.close()


# ---------------------------------------------------------------------- who gets a request


def home_of(prompt: Iterable[int]) -> int:
    return choose(prefix_of(AddRequest(0, "", list(prompt), Sampling(1))), 0, dict.fromkeys(range(64), 0))


def test_prompts_that_begin_alike_go_to_one_core_and_a_further_core_moves_only_its_share() -> None:
    loads = dict.fromkeys(range(4), 0)
    homes = {}
    for number in range(400):
        prompt = AddRequest(number, "", [number, *range(600)], Sampling(1))
        later = AddRequest(number, "", [*prompt.prompt_token_ids, 7, 8, 9], Sampling(1))
        homes[number] = choose(prefix_of(prompt), 0, loads)
        assert choose(prefix_of(later), 0, loads) == homes[number]
    counts = np.bincount(list(homes.values()))
    assert counts.min() > 60, "each core has its share"
    more = {n: choose(prefix_of(AddRequest(n, "", [n, *range(600)], Sampling(1))), 0, {**loads, 4: 0}) for n in homes}
    assert {more[n] for n in homes if more[n] != homes[n]} == {4}
    short = [home_of(range(length)) for length in range(70, 120)]
    assert len(set(short)) == 1, "a short conversation grows at one core"
    salted = AddRequest(0, "", [0, *range(600)], Sampling(1), cache_salt="other")
    assert prefix_of(salted) != prefix_of(AddRequest(0, "", [0, *range(600)], Sampling(1)))


def test_no_core_is_loaded_far_above_the_mean_however_alike_the_prompts_are() -> None:
    loads, prompt = dict.fromkeys(range(4), 0), AddRequest(0, "", [1, 2, 3], Sampling(97))
    for _ in range(400):
        loads[choose(prefix_of(prompt), 100, loads)] += 100
    assert max(loads.values()) <= 1.25 * sum(loads.values()) / 4


# ---------------------------------------------------------------------- what supervisors tell cores


def test_news_arrive_whole_and_in_order_also_if_the_pipe_was_full() -> None:
    pipe = NewsPipe()
    reader = NewsReader(pipe.read_fd)
    sent = [News(number, suspects=dict.fromkeys(range(5000), number)) for number in range(8)]
    for news in sent:
        pipe.put(news)
    assert pipe._unsent, "more than the pipe holds"
    got = []
    while len(got) < len(sent):
        pipe.flush()
        got += reader.read() or []
    assert got == sent
    pipe.close()
    assert reader.read() is None
    os.close(pipe.read_fd)


class Told:
    """A running core, as the supervisors see it."""

    def __init__(self, siblings: Siblings, number: int, epoch: int = 1) -> None:
        self.launch = CoreLaunch(EngineConfig(), Endpoints(""), b"", 0, 0, 0, "", 0.0, number=number, epoch=epoch)
        self.journal = Journal.create(8)
        siblings.starts(self.launch, self.journal)
        self.reader = NewsReader(self.launch.news_fd)
        self.suspects = dict(self.launch.suspects)

    def hear(self) -> list[News]:
        news = self.reader.read() or []
        for one in news:
            self.suspects |= one.suspects
            for key in one.harmless:
                self.suspects.pop(key, None)
            self.journal.set_suspects(self.suspects)
            self.journal.set_heard(one.number)
        return news

    def clear(self, key: int) -> None:
        """It has computed this suspect alone, and lives."""
        del self.suspects[key]
        self.journal.set_suspects(self.suspects)

    def computes(self, *keys: int, position: int = 0, solo: bool = False) -> None:
        self.journal.launched(0, np.array(keys, np.uint64), np.full(len(keys), position), solo)


def test_a_death_is_told_to_the_others_with_its_suspects_and_the_epoch_that_is_over() -> None:
    siblings = Siblings()
    a, b, c = (Told(siblings, number) for number in range(3))
    a.computes(7, 8, position=3)
    assert not siblings.ended(a.launch, "by signal SIGSEGV", crashed=True, killed=False)
    for one in (b, c):
        assert [(news.over, news.suspects) for news in one.hear()] == [({0: 1}, {7: 3, 8: 3})]
    assert not siblings.ended(a.launch, "", crashed=True, killed=False), "told once"
    assert not b.hear()
    later = Told(siblings, 0, epoch=2)
    assert (later.launch.suspects, later.launch.over) == ({7: 3, 8: 3}, {0: 1})


def test_a_suspect_that_one_core_has_tried_is_none_for_the_others() -> None:
    siblings = Siblings()
    a, b, c = (Told(siblings, number) for number in range(3))
    a.computes(7, 8)
    siblings.ended(a.launch, "", crashed=True, killed=False)
    b.hear(), c.hear()
    b.clear(7)
    c.computes(9)
    siblings.ended(c.launch, "", crashed=True, killed=False)
    (news,) = b.hear()
    assert (news.harmless, news.suspects) == ([7], {9: 0})
    assert Told(siblings, 0, epoch=2).launch.suspects == {8: 0, 9: 0}


def test_a_suspect_of_which_a_core_has_not_heard_so_far_stays_one() -> None:
    siblings = Siblings()
    a, b, c = (Told(siblings, number) for number in range(3))
    a.computes(7)
    siblings.ended(a.launch, "", crashed=True, killed=False)  # b and c have not read it
    siblings.ended(c.launch, "", crashed=False, killed=False)
    assert Told(siblings, 0, epoch=2).launch.suspects == {7: 0}
    assert b.hear()[-1].harmless == []


@pytest.mark.parametrize(("killed", "deaths"), [(False, 2), (True, 3)])
def test_deaths_alone_add_up_over_cores_and_the_quarantine_is_told_to_all(killed: bool, deaths: int) -> None:
    siblings = Siblings()
    cores = [Told(siblings, number) for number in range(5)]
    for number in range(deaths):
        cores[number].hear()
        cores[number].computes(7, position=4, solo=True)
        blamed = siblings.ended(cores[number].launch, "by signal SIGSEGV", crashed=True, killed=killed)
        assert blamed == (number == deaths - 1)
    assert [*cores[4].hear()[-1].quarantined] == [7]
    again = Told(siblings, 0, epoch=2).launch
    assert ([*again.quarantined], again.suspects) == ([7], {})


# ---------------------------------------------------------------------- a core gets a request that another one had


def test_a_moved_request_waits_until_the_suspects_of_its_core_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = MovedRequests({1: 3})
    assert moved.hold([]) is None
    assert moved.hold([1, 3]) is None, "over already"
    waits, other = moved.hold([1, 4]), moved.hold([2, 1])
    assert waits is not None
    assert other is not None
    moved.end({2: 1})
    assert (waits.done(), other.done()) == (False, True)
    then = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: then + 11)
    moved.look()
    assert waits.done(), "not for ever"


def test_moved_requests_are_not_compared_with_each_other() -> None:
    compared = 0

    class Number(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int.__eq__(self, other)

        __hash__ = int.__hash__

    moved = MovedRequests({})
    waits = [moved.hold([Number(1), 2]) for _ in range(300)]
    moved.end({1: 2})
    assert all(wait is not None and wait.done() for wait in waits)
    assert compared < 3000


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return EngineCore(EngineArgs(device="cpu", num_gpu_blocks_override=300).create_engine_config())


SESSION = b"s" * 16


def run_until(core: EngineCore, enough: Callable[[list[Outputs]], bool], most: int = 400) -> list[Outputs]:
    found: list[Outputs] = []
    for _ in range(most):
        found += [outputs for frontend, outputs in core.step().items() if frontend == 1]
        if enough(found):
            return found
    return found


def test_a_moved_suspect_is_computed_alone_and_a_quarantined_one_refused(core: EngineCore) -> None:
    core._journal = journal = Journal.create(256)
    core.scheduler.state.suspects._on_change = journal.set_suspects
    core.connect(1, session=SESSION)
    guilty, innocent, refused = (request_key(SESSION, handle) for handle in (1, 2, 3))
    plain = AddRequest(4, "", [5, 6, 7], Sampling(60))
    core.add_request(1, plain)
    for handle in (1, 2, 3):
        core.add_request(1, AddRequest(handle, "", [8, 9, handle], Sampling(6), resumed=True, moved_from=[2, 1]))
    early = run_until(core, lambda found: sum(len(one.handles) for one in found) > 10)
    assert {handle for one in early for handle in one.handles} == {4}, "the moved ones wait"
    core.hear(News(1, over={2: 1}, suspects={guilty: 0}, quarantined={refused: "it killed cores"}))
    assert (journal.suspects(), journal.heard) == ([guilty], 1)
    solo: list[int] = []
    launched = journal.launched

    def record(step: int, keys: np.ndarray, positions: np.ndarray, alone: bool) -> None:
        if alone:
            solo.extend(map(int, keys))
        launched(step, keys, positions, alone)

    journal.launched = record  # type: ignore[method-assign]
    late = run_until(core, lambda found: sum(len(one.finished) for one in found) == 4)
    ended = {finished.handle: finished for one in late for finished in one.finished}
    assert {handle: one.reason for handle, one in ended.items()} == {1: "length", 2: "length", 3: "error", 4: "length"}
    assert (ended[3].error, ended[3].error_text) == ("RequestFailedError", "it killed cores")
    assert solo == [guilty]
    assert innocent not in solo
    assert journal.suspects() == []
    core.disconnect(1)


# ---------------------------------------------------------------------- streams


def test_streams_are_spread_over_the_cores_and_go_on_elsewhere_when_one_dies(start: Callable[..., Group]) -> None:
    one = start(3)
    one.add(*range(24))
    one.began()
    before = one.shares()
    assert min(before.values()) >= 4, before
    one.kill(1)
    one.finish()
    assert one.tokens == {handle: whole(handle) for handle in range(24)}
    assert {finished.reason for finished in one.ended.values()} == {"length"}
    assert 0 < one.cores.num_moved <= before[1]
    assert {number: s.launch.restarts for number, s in one.owner.group.supervisors.items()} in (
        {0: 0, 1: 1, 2: 0},
        {0: 0, 1: 0, 2: 0},
    )
    assert eventually(lambda: one.answers(1), GUARD)
    one.add(*range(24, 48), max_tokens=50)
    assert min(one.shares().values()) >= 4, "the next core gets requests"
    one.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_streams_lose_and_repeat_nothing_while_cores_die_at_random(start: Callable[..., Group], seed: int) -> None:
    numbers = np.random.default_rng(seed)
    one = start(3)
    one.add(*range(30), max_tokens=8000)
    one.began()
    for _ in range(6):
        until = time.monotonic() + numbers.uniform(0.0, 0.4)
        while time.monotonic() < until and len(one.ended) < len(one.tokens):
            if (outputs := one.client.get_outputs(0.01)) is not None:
                one.take(outputs)
        chosen = one.owner.group.supervisors[int(numbers.integers(3))]
        how = numbers.choice([signal.SIGKILL, signal.SIGSEGV])
        if chosen.ready and chosen.core_pid:
            with suppress(ProcessLookupError):  # its supervisor takes it for ready for an instant after its end
                os.kill(chosen.core_pid, how)
    one.finish()
    assert one.tokens == {handle: whole(handle, 8000) for handle in range(30)}, seed
    assert {finished.reason for finished in one.ended.values()} == {"length"}


def test_an_async_client_moves_its_streams_too(start: Callable[..., Group]) -> None:
    one = start(2)

    async def main() -> None:
        client = AsyncClient(connect(one.owner))
        tokens: dict[int, list[int]] = {handle: [] for handle in range(12)}
        left = set(tokens)
        for handle in tokens:
            await client.add_request(request(handle))
        killed = False
        while left:
            outputs = await asyncio.wait_for(client.get_outputs(), GUARD)
            for handle, token in zip(outputs.handles, outputs.token_ids, strict=True):
                tokens[handle].append(token)
            left -= {finished.handle for finished in outputs.finished}
            if not killed and all(tokens.values()):
                killed = True
                one.kill(0)
        assert tokens == {handle: whole(handle) for handle in tokens}
        connection = client._connection
        assert isinstance(connection, Cores)
        assert connection.num_moved > 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("how", "name", "most"), [(SEGV, "SIGSEGV", 3), pytest.param(KILL, "SIGKILL", 4, marks=pytest.mark.slow)]
)
def test_a_request_that_kills_cores_fails_alone_wherever_it_goes(
    start: Callable[..., Group], how: int, name: str, most: int
) -> None:
    one = start(3)
    one.add(*range(1, 20))
    one.began()
    one.add(0, max_tokens=20, how=how, at=5)
    one.finish()
    assert one.ended[0].error == RequestFailedError.__name__
    assert name in one.ended[0].error_text
    assert one.tokens[0] == whole(0, 5)[: len(one.tokens[0])], "it keeps the tokens that it had"
    assert {handle: one.tokens[handle] for handle in range(1, 20)} == {h: whole(h) for h in range(1, 20)}
    assert one.restarts <= most
    assert one.owner.supervisor.siblings.num_quarantined == 1


def test_a_request_that_was_not_sent_is_not_held_back_elsewhere(start: Callable[..., Group]) -> None:
    """It has no epoch that has to end before it may run."""
    one = start(2)
    one.owner.group.supervisors[1].siblings.ended = lambda *args, **more: False  # type: ignore[method-assign]
    one.kill(1)
    lost = one.cores._all[1]
    assert eventually(lambda: one.answers(1) is False, GUARD)
    lost.add_request(request(3, 10))
    one.tokens[3] = []
    began = time.monotonic()
    one.finish()
    assert one.tokens[3] == whole(3, 10)
    assert time.monotonic() - began < 5


def test_with_all_cores_gone_for_good_the_error_says_why(start: Callable[..., Group]) -> None:
    one = start(2, max_restarts=0)
    one.add(*range(6))
    one.began()
    one.kill(0)
    one.read(lambda: one.cores.num_moved > 0)
    assert one.client.error is None
    one.kill(1)
    with pytest.raises(EngineDeadError, match="max_restarts, 0"):
        one.finish()


# ---------------------------------------------------------------------- cores that join and leave


def test_cores_join_and_leave_under_load_and_no_stream_is_lost(start: Callable[..., Group]) -> None:
    one = start(1)
    assert isinstance(one.client._connection, Connection), "a single core has nothing in between"
    one.add(*range(8), max_tokens=8000)
    one.began()
    one.client.call("scale", 3)

    def serving() -> list[int]:
        connection = one.client._connection
        members = connection._all if isinstance(connection, Cores) else {}
        return sorted(number for number, member in members.items() if member.ready_at is not None)

    one.read(lambda: serving() == [0, 1, 2])
    one.add(*range(8, 32), max_tokens=8000)
    one.began()
    assert min(one.shares().values()) >= 4
    one.client.call("scale", 1)
    one.read(lambda: serving() == [0] and len(one.cores._all) == 1)
    assert one.owner.group.supervisors[0].launch.restarts == 0
    one.client.call("scale", 2)
    one.read(lambda: serving() == [0, 1])
    one.add(*range(32, 40), max_tokens=8000)
    one.finish()
    assert one.tokens == {handle: whole(handle, 8000) for handle in range(40)}
    assert {finished.reason for finished in one.ended.values()} == {"length"}
    assert not one.owner.group._siblings._suspects.suspects, "no core that leaves is taken for crashed"


def test_a_core_that_is_wanted_again_before_it_has_left_is_started_anew(start: Callable[..., Group]) -> None:
    one = start(2)
    leaving = one.owner.group.supervisors[1]
    one.client.call("scale", 1)
    one.client.call("scale", 2)
    one.read(lambda: one.owner.group.supervisors[1] is not leaving and one.answers(1))


@pytest.mark.parametrize(("number", "count"), [(1, 2), (0, 2), (0, 1)])
def test_a_core_that_stays_down_is_started_again_by_the_next_scale(
    start: Callable[..., Group], number: int, count: int
) -> None:
    one = start(2, max_restarts=0)
    one.kill(number)
    down = one.owner.group.supervisors[number]
    one.read(lambda: number not in one.cores._all)
    one.client.call("scale", count)
    one.read(lambda: one.owner.group.supervisors[number] is not down and one.answers(number))
    one.add(1)
    one.finish()


def test_a_core_that_leaves_tells_of_the_one_that_takes_its_place(
    start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core may hear of both at once. Then no list that it sends has both."""
    one = start(2, max_restarts=0)
    siblings, changes = one.owner.group._siblings, dict[int, Any]()
    one.kill(0)
    one.read(lambda: 0 not in one.cores._all)
    listen = siblings.listen

    def listen_at_once(cores: dict[int, Any]) -> None:
        changes.update(cores)
        if 1 in changes:
            listen(changes)

    monkeypatch.setattr(siblings, "listen", listen_at_once)
    one.client.call("scale", 1)
    one.read(lambda: one.answers(0))
    one.add(1)
    one.finish()
    one.read(lambda: [*one.cores._all] == [0])


def test_scale_starts_a_core_again_as_soon_as_frontends_are_told_that_it_stays_down(
    start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = start(2, max_restarts=0)
    group = one.owner.group
    down, listen = group.supervisors[1], group._siblings.listen

    def listen_and_scale(cores: dict[int, Any]) -> None:
        listen(cores)
        if cores == {1: None}:
            scaling = threading.Thread(target=group.scale, args=(2,))
            scaling.start()
            scaling.join(0.5)  # it may wait until the thread that is here has done all for this core

    monkeypatch.setattr(group._siblings, "listen", listen_and_scale)
    one.kill(1)
    one.read(lambda: group.supervisors[1] is not down and one.answers(1))


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CoreGroup, str, Path]]:
    """A core without a model as a daemon has it, its address, and the file that says how further ones load."""
    stand_in_process.replace_cores(tmp_path, monkeypatch)
    script = tmp_path / "script"
    script.write_text("")
    config = msgspec.structs.replace(configured(1), model_config=ModelConfig(model=str(script)))
    with short_folder() as folder:
        address = f"ipc://{folder}/core.sock"
        group = CoreGroup(config, Endpoints(address, f"ipc://{folder}/admin.sock"))
        group.start()
        thread = threading.Thread(target=group.run)
        thread.start()
        yield group, address, script
        group.stop()
        thread.join()


def test_cores_that_never_started_leave_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_process.replace_cores(tmp_path, monkeypatch)
    (script := tmp_path / "script").write_text("there is no memory for it")
    config = msgspec.structs.replace(configured(3), model_config=ModelConfig(model=str(script)))

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with pytest.raises(InvalidArgumentError, match="there is no memory for it"):
        EmbeddedCores(config)
    assert descriptors() == before


def test_scale_says_why_a_core_did_not_start_and_tries_again(daemon: tuple[CoreGroup, str, Path]) -> None:
    group, address, script = daemon
    script.write_text("there is no memory for it")
    for _ in range(2):
        with pytest.raises(EngineStartError, match="core 1 did not start: there is no memory for it"):
            scale(2, address)
    script.write_text("")
    scale(2, address)
    assert [one.ready for one in group.running] == [True, True]
    assert look(address).failed_start.endswith("there is no memory for it")  # type: ignore[union-attr]


def test_a_further_core_has_the_state_that_was_set_while_it_loaded(daemon: tuple[CoreGroup, str, Path]) -> None:
    group, address, script = daemon
    script.write_text("hold")
    client = SyncClient(Connection(admin_of(address)))
    with ThreadPoolExecutor() as pool:
        scaling = pool.submit(scale, 2, address)
        assert eventually(lambda: len(group.supervisors) == 2, GUARD)
        client.call("pause_generation")
        assert eventually(lambda: group.first.launch.state.paused, GUARD)
        script.write_text("")
        scaling.result()
    client.close()
    assert group.supervisors[1].launch.state.paused


def test_an_address_that_is_claimed_is_not_claimed_again(daemon: tuple[CoreGroup, str, Path]) -> None:
    group, address, _ = daemon
    claims: list[str] = []

    def claim(one: str) -> None:
        claims.append(one)
        if len(claims) == 2:
            raise AddressInUseError(f"{one} is in use")

    group._claim = claim
    with pytest.raises(EngineStartError, match=r"admin\.sock\.1 is in use"):
        scale(2, address)
    scale(2, address)
    assert [one.rpartition("/")[2] for one in claims] == ["core.sock.1", "admin.sock.1", "admin.sock.1"]


def test_scale_does_not_wait_for_a_daemon_that_has_ended(daemon: tuple[CoreGroup, str, Path]) -> None:
    group, address, script = daemon
    script.write_text("wait")
    with ThreadPoolExecutor() as pool:
        scaling = pool.submit(scale, 2, address)
        assert eventually(lambda: len(group.supervisors) == 2, GUARD)
        group.stop()
        with pytest.raises(ConnectError, match="no daemon answers"):
            scaling.result()


# ---------------------------------------------------------------------- calls and ranks


def test_a_call_goes_to_every_core_and_its_results_are_joined(start: Callable[..., Group]) -> None:
    one = start(3)
    assert one.client.call("echo", 4, 5) == [4, 5] * 3
    assert one.client.call("check_request", 1) == [1], "one core answers for all"
    assert one.client.call("collective_rpc", "save_sharded_state") == ["save_sharded_state"], "one has all weights"
    assert one.client.call("collective_rpc", "other") == ["other"] * 3
    with pytest.raises(InvalidRequestError, match="this is refused"):
        one.client.call("refuse")
    one.kill(2)
    assert one.client.call("echo", 1, timeout=GUARD) == [1] * 3, "also of the core that starts again"


def test_requests_go_to_cores_that_have_the_weights_that_users_sent(start: Callable[..., Group]) -> None:
    one = start(2)

    def restart(number: int) -> None:
        before = one.cores._all[number]._ready
        one.kill(number)
        one.read(lambda: one.answers(number) and one.cores._all[number]._ready is not before)

    one.client.call("update_weights")
    restart(1)
    one.add(*range(12), max_tokens=20)
    assert one.shares()[1] == 0, "it lacks the weights"
    one.finish()
    assert {finished.reason for finished in one.ended.values()} == {"length"}
    restart(0)
    one.add(12)
    one.finish()
    assert one.ended[12].error == "WeightsLostError", "no core has them"
    one.client.call("update_weights")
    one.add(*range(13, 25), max_tokens=20)
    assert min(one.shares().values()) > 0
    one.finish()
    assert {one.ended[handle].reason for handle in range(13, 25)} == {"length"}


@pytest.mark.parametrize("count", [1, 2])
def test_a_call_goes_to_cores_that_have_joined_while_nothing_was_read(start: Callable[..., Group], count: int) -> None:
    one = start(count)
    asked = AsyncClient(connect(one.owner))
    one.client.call("scale", count + 1)

    def told(connection: Connection | Cores) -> bool:
        first = connection._first if isinstance(connection, Cores) else connection
        return bool(first._link._sockets[0].getsockopt(zmq.EVENTS) & zmq.POLLIN)

    async def call_at_once() -> Any:
        assert eventually(lambda: told(asked._connection), GUARD)
        return await asked.call("echo", 4)

    assert eventually(lambda: told(one.client._connection), GUARD)
    assert one.client.call("echo", 4) == [4] * (count + 1)
    assert asyncio.run(call_at_once()) == [4] * (count + 1)


@pytest.mark.parametrize("count", [1, 2])
def test_a_call_goes_to_cores_that_join_before_it_is_answered(start: Callable[..., Group], count: int) -> None:
    one = start(count)
    other = SyncClient(connect(one.owner))
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(one.client.call, "wait", timeout=GUARD)
        other.call("scale", count + 1)
        for client in (one.client, other):  # each gets to know of the core in its own time
            assert eventually(lambda client=client: client.call("check_request", 0) and knows(client, count), GUARD)
        other.call("go_on")
        assert asked.result() == [4] * (count + 1)
    other.close()


def knows(client: SyncClient, number: int) -> bool:
    return isinstance(client._connection, Cores) and number in client._connection._all


def test_a_rank_chooses_the_core(start: Callable[..., Group]) -> None:
    one = start(2)
    for handle in range(6):
        one.tokens[handle] = []
        one.client.add_request(request(handle), rank=1)
        assert one.place_of(handle) == 1
    for wrong in (2, -1, True, "1"):
        with pytest.raises(InvalidRequestError, match="data_parallel_rank"):
            one.client.add_request(request(9), rank=wrong)  # type: ignore[arg-type]
    one.client.abort(list(range(6)))
    one.finish()
    assert {finished.reason for finished in one.ended.values()} == {"abort"}


def test_a_single_core_takes_rank_0_only(start: Callable[..., Group]) -> None:
    one = start(1)
    one.tokens[0] = []
    one.client.add_request(request(0, 5), rank=0)
    with pytest.raises(InvalidRequestError, match="data_parallel_rank is 1"):
        one.client.add_request(request(1, 5), rank=1)
    one.finish()


def test_copies_with_ranks_in_ray_are_refused_and_those_of_a_launcher_are_its_own() -> None:
    with pytest.raises(NotSupportedError, match="data_parallel_size is 2"):
        EngineArgs(data_parallel_size=2, distributed_executor_backend="ray").create_engine_config()
    launched = EngineArgs(data_parallel_size=2, distributed_executor_backend="external_launcher")
    assert launched.create_engine_config().parallel_config.num_cores == 1


def test_a_core_in_this_process_has_no_copies() -> None:
    with pytest.raises(NotSupportedError, match="data_parallel_size"):
        LLMEngine.from_engine_args(EngineArgs(data_parallel_size=2), enable_multiprocessing=False)


# ---------------------------------------------------------------------- the embedded model

PROMPTS = [f"Once upon a time, number {number} of the cats" for number in range(18)]
PARAMS = [
    SamplingParams(max_tokens=120, ignore_eos=True, temperature=0.8 * (number % 2), seed=number) for number in range(18)
]


@pytest.mark.slow
def test_three_cores_give_the_tokens_of_one_also_when_one_dies() -> None:
    with LLM() as alone:
        expected = [output.outputs[0].token_ids for output in alone.generate(PROMPTS, PARAMS, use_tqdm=False)]
    with LLM(data_parallel_size=3) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == expected
        engine: Any = llm.llm_engine
        ids = [engine.add_request(str(n), prompt, p) for n, (prompt, p) in enumerate(zip(PROMPTS, PARAMS, strict=True))]
        tokens: dict[str, list[int]] = {}
        killed = False
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            if not killed and len(tokens) == len(ids):
                killed = True
                os.kill(engine.engine_core._connection._first._core.group.supervisors[2].core_pid, signal.SIGKILL)
        assert [tokens[i] for i in ids] == expected
        assert engine.engine_core._connection.num_moved > 0
        assert llm.reset_prefix_cache()
        llm.sleep(1)
        assert llm.llm_engine.is_sleeping()
        asleep = [m for m in llm.get_metrics() if m.name.endswith("sleep_state") and m.labels["sleep_state"] == "awake"]
        assert [(m.labels["engine"], m.value) for m in asleep] == [("0", 0), ("1", 0), ("2", 0)]  # type: ignore[attr-defined]
        llm.wake_up()
        assert [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)] == expected
        assert llm.get_world_size() == 3
        assert llm.get_world_size(include_dp=False) == 1


@pytest.mark.slow
def test_a_daemons_cores_are_shown_and_scaled_while_streams_run() -> None:
    with short_folder() as folder:
        daemon = Daemon(folder, "--data-parallel-size=2", "--num-gpu-blocks-override=2000")
        try:
            daemon.ready_line()
            code, found = daemon.status()
            assert (code, [one["core"] for one in found["cores"]]) == (0, [0, 1])
            assert len({one["core_pid"] for one in found["cores"]}) == 2
            with LLMEngine.connect(daemon.address) as engine:
                params = SamplingParams(max_tokens=1500, ignore_eos=True, temperature=0)
                for number in range(6):
                    engine.add_request(str(number), PROMPTS[number], params)
                with ThreadPoolExecutor() as pool:
                    scaling = pool.submit(lambda: [run("scale", str(count), daemon.address) for count in (3, 1)])
                    tokens: dict[str, int] = {}
                    while engine.has_unfinished_requests() or not scaling.done():
                        for output in engine.step():
                            tokens[output.request_id] = len(output.outputs[0].token_ids)
                        if not engine.has_unfinished_requests():
                            time.sleep(0.05)
                    done = scaling.result()
            assert [one.stdout for one in done] == ["3 cores serve\n", "1 cores serve\n"], done
            assert tokens == {str(number): 1500 for number in range(6)}
            assert daemon.status()[1]["cores"] == []
            assert "no such" not in daemon.log
            refused = run("scale", "0", daemon.address)
            assert (refused.returncode, "between 1 and 64" in refused.stderr) == (2, True), refused.stderr
        finally:
            daemon.end()


def test_the_page_for_people_has_a_line_for_each_core_and_one_for_each_frontend() -> None:
    frontends = [FrontendStatus(1, "chat", 1.0, 2, 0, 300)]
    first, second = (
        CoreStatus(3, pid, 10, "serving", "m", frontends=frontends, core=core, stats=Stats(num_running=2))
        for core, pid in enumerate((41, 42))
    )
    console = Console(width=120, file=io.StringIO())
    console.print(frame(first, siblings=[second]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert [line.split()[:3] for line in text.splitlines() if " serving " in line] == [
        ["0", "serving", "41"],
        ["1", "serving", "42"],
    ]
    assert [line.split()[:5] for line in text.splitlines() if "chat" in line] == [["chat", "1", "4", "0", "600"]]
    assert [one["core_pid"] for one in document(first, [second])["cores"]] == [41, 42]
    assert document(first)["cores"] == []
