"""A core that holds adapters, over the stand-in model: which it reads, and which stay in memory."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from harness import StandInWorker, message, run_core
from mainspring.core.features.adapter_slots import PATIENCE_STEPS, LoRAs
from mainspring.core.loop import EngineCore
from mainspring.core.model.load.parameters import ParameterMap
from mainspring.core.plan.control import AdapterFacts, DropAdapter, PrepareAdapter, PrepareGrammar
from mainspring.core.plan.request import LoRAName, Request
from mainspring.core.worker import registry
from mainspring.core.worker.adapter_files import LoRALimits
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import EngineConfig, LoRAConfig
from mainspring.ipc.errors import InvalidRequestError, NotSupportedError
from mainspring.ipc.messages import Adapter, DesiredState, HeldAdapter, Sampling
from test_flood import work

GUARD = 60.0  # seconds


class AdapterWorker(StandInWorker):
    """Reads any adapter, whose digest is its path, and compiles no grammar. Of ``/broken`` one rank reads nothing."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.facts = replace(self.facts, has_adapters=True)

    def control(self, record: Any) -> Any:
        super().control(record)
        if isinstance(record, PrepareGrammar):
            raise NotSupportedError("no grammars here")
        if isinstance(record, PrepareAdapter):
            read = Future[AdapterFacts]()
            if record.adapter.path == "/broken":
                read.set_exception(InvalidRequestError("rank 1: no such folder"))
            else:
                read.set_result(AdapterFacts(record.adapter.path.encode()))
            return read

    @property
    def held(self) -> list[str]:
        """The paths of the adapters in memory."""
        dropped = {record.number for record in self.controls if isinstance(record, DropAdapter)}
        read = [record for record in self.controls if isinstance(record, PrepareAdapter)]
        return [record.adapter.path for record in read if record.number not in dropped]


def call(core: EngineCore, method: str, *args: Any) -> Any:
    return decode_value(core.call(method, encode_value([*args])))


def core_with_adapters(max_cpu_loras: int = 3) -> tuple[EngineCore, AdapterWorker]:
    config = EngineConfig(lora_config=LoRAConfig(enable_lora=True, max_loras=1, max_cpu_loras=max_cpu_loras))
    core = EngineCore(config, AdapterWorker)
    assert isinstance(core.worker, AdapterWorker)
    return core, core.worker


def test_adapters_of_requests_that_are_refused_do_not_pile_up() -> None:
    core, worker = core_with_adapters()
    core.connect(0)
    for handle in range(9):
        lora = Adapter(handle + 1, "name", f"/{handle}")
        refused = replace(message(handle), sampling=Sampling(4, grammar=["regex", "a"]), lora=lora)
        core.add_request(0, refused)
    assert {finished.error for _, finished in run_core(core).values()} == {"NotSupportedError"}
    assert len(worker.held) <= 3


def test_a_request_that_waits_for_memory_costs_no_more_than_each_pinned_adapter_once() -> None:
    def cost(pinned: int) -> int:
        core, _ = core_with_adapters(max_cpu_loras=pinned + 1)
        core.connect(0)
        for number in range(1, pinned + 2):
            core.call("add_lora", encode_value([Adapter(number, "name", f"/{number}")]))
            run_core(core)
            if number <= pinned:
                assert call(core, "pin_lora", number)
        adapter = Adapter(1000, "name", "/1000")
        request, loras = Request(message(0, lora=adapter), 0, 0.0, 64), core.adapters._loras
        request.use_lora(LoRAName(b"/1000", adapter))
        return work(lambda: loras.may_run(request, 0, False))

    assert cost(80) < 3 * cost(40)


def test_a_core_reads_no_more_adapters_of_the_one_before_than_it_can_keep() -> None:
    core, worker = core_with_adapters()
    owners = [bytes([i]) * 16 for i in range(20)]
    held = [HeldAdapter(owner, Adapter(1, "name", f"/{owner[0]}"), pinned=not owner[0]) for owner in owners]
    core.restore(DesiredState(adapters=held))
    assert set(worker.held) == {"/18", "/19", "/0"}
    assert len(worker.controls) == 3
    assert core.adapters._pinned() == [], "its frontend is not here"
    core.connect(0, session=owners[0])
    assert core.adapters._pinned() == [b"/0"]
    assert call(core, "list_loras") == [1]


def test_an_adapter_that_not_all_ranks_could_read_is_dropped_by_all() -> None:
    core, worker = core_with_adapters()
    core.connect(0)
    core.add_request(0, message(0, lora=Adapter(1, "name", "/broken")))
    core.call("add_lora", encode_value([Adapter(2, "name", "/broken")]))
    [(_, finished)] = run_core(core).values()
    assert finished.error == "InvalidRequestError"
    assert worker.held == []


def test_one_without_credit_holds_nobody_up() -> None:
    """It has waited for a place for so long that others with the adapter that has one must wait, too."""
    loras = LoRAs(1, 2, tuple, lambda request: None, lambda number: None)

    def request_with(name: str) -> Request:
        adapter = Adapter(1, name, f"/{name}")
        request = Request(message(0, lora=adapter), 0, 0.0, 64)
        request.use_lora(LoRAName(name.encode(), adapter))
        return request

    running, first, third = map(request_with, "aba")
    assert loras.put(b"a", 1)
    assert loras.put(b"b", 2)
    loras.got_slot(running)
    assert not loras.may_run(first, 0, True)
    assert loras.may_run(third, PATIENCE_STEPS - 1, True)
    assert not loras.may_run(third, PATIENCE_STEPS, True)
    loras.has_credit = lambda request: request is not first
    assert loras.may_run(third, PATIENCE_STEPS, True)


def test_adapters_that_nobody_waits_for_any_more_are_dropped_unread() -> None:
    core, worker = core_with_adapters()
    reads = dict[str, Future[AdapterFacts]]()
    control = worker.control

    def begin(record: Any) -> Any:
        answer = control(record)
        return reads.setdefault(record.adapter.path, Future()) if isinstance(record, PrepareAdapter) else answer

    worker.control = begin  # type: ignore[method-assign]
    core.connect(0)
    core.connect(1)
    aborted, shared, added = (Adapter(number, "name", f"/{number}") for number in (1, 2, 3))
    core.add_request(0, message(0, lora=aborted))
    core.add_request(0, message(1, lora=shared))
    core.add_request(0, message(2, lora=shared))
    core.call("add_lora", encode_value([added]), 1)
    assert {record.frontend for record in worker.controls if isinstance(record, PrepareAdapter)} == {0, 1}
    core.abort(0, [0, 1])
    assert worker.held == ["/2", "/3"]
    core.disconnect(1)
    assert worker.held == ["/2"]
    again = core.call("check_request", encode_value([message(3, lora=aborted)]))
    assert isinstance(again, Future)
    assert worker.held == ["/2", "/1"], "it is read again"
    for path, read in reads.items():
        read.set_result(AdapterFacts(path.encode()))
    ends = run_core(core)
    assert again.result(0) is None
    assert [finished.reason for _, finished in ends.values()].count("length") == 1
    assert worker.held == ["/2", "/1"]
    assert not core.adapters._waiting


def test_frontends_take_turns_and_adapters_that_were_dropped_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, read = threading.Event(), list[str]()

    def record(adapter: Adapter, limits: Any) -> Any:
        assert begin.wait(GUARD)
        read.append(adapter.path)
        return SimpleNamespace(digest=b"digest") if limits else AdapterFacts(b"digest")

    monkeypatch.setattr(registry, "read_lora", record)
    monkeypatch.setattr(registry, "read_prompt_adapter", record)
    adapters = registry.Registry(limits=LoRALimits({}, 8, ParameterMap({}), 0), hidden_size=0)
    flood = [
        adapters.prepare_adapter(number, Adapter(number, "name", f"/{number}", number % 2), 1) for number in range(100)
    ]
    other = adapters.prepare_adapter(100, Adapter(1, "name", "/other"), 2)
    for number in range(10, 100):
        adapters.drop_adapter(number)
    begin.set()
    for future in (*flood[:10], other):
        assert future.result(GUARD).digest == b"digest"
    assert set(read) == {"/other", *(f"/{number}" for number in range(10))}
    assert read.index("/other") <= 2
    for future in flood[10:]:
        with pytest.raises(CancelledError):
            future.result(GUARD)
