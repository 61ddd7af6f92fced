"""The journal: the supervisor reads what a core was computing when it died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from hashlib import blake2b

import numpy as np
import pytest

from mainspring.ipc.errors import InvalidArgumentError
from mainspring.ipc.journal import LAG_SECONDS, MAX_SUSPECTS, STEPS, Accused, Journal, Phase, request_key


@pytest.fixture
def journal() -> Journal:
    return Journal.create(8)


def launch(journal: Journal, step: int, keys: list[int], position: int = 0, solo: bool = False) -> None:
    journal.launched(step, np.array(keys, np.uint64), np.full(len(keys), position, np.int64), solo)


def test_a_new_journal_blames_no_request(journal: Journal) -> None:
    assert journal.phase is Phase.STARTING
    assert journal.accused() == []
    assert journal.suspects() == []


def test_the_requests_of_every_step_in_flight_are_accused(journal: Journal) -> None:
    largest = 2**64 - 1
    launch(journal, 0, [1, largest], position=5)
    launch(journal, 1, [3], position=7, solo=True)
    assert journal.accused() == [Accused(1, 5, False), Accused(largest, 5, False), Accused(3, 7, True)]


def test_a_step_that_has_retired_blames_no_request(journal: Journal) -> None:
    for step in range(3 * STEPS):
        launch(journal, step, [step, step + 100])
        if step:
            journal.retired(step - 1)
    assert [one.key for one in journal.accused()] == [3 * STEPS - 1, 3 * STEPS + 99]
    journal.retired(3 * STEPS - 1)
    assert journal.accused() == []


def test_a_smaller_step_in_the_place_of_a_larger_one_accuses_its_own_requests_only(journal: Journal) -> None:
    launch(journal, 0, list(range(8)))
    journal.retired(0)
    launch(journal, STEPS, [42], solo=True)
    assert journal.accused() == [Accused(42, 0, True)]


def test_suspects_are_those_last_set(journal: Journal) -> None:
    journal.set_suspects({5, 2**64 - 1, 7})
    assert sorted(journal.suspects()) == [5, 7, 2**64 - 1]
    journal.set_suspects([7])
    assert journal.suspects() == [7]
    journal.set_suspects(range(MAX_SUSPECTS + 10))
    assert len(journal.suspects()) == MAX_SUSPECTS


def test_clearing_begins_anew_with_the_suspects_given(journal: Journal) -> None:
    launch(journal, 0, [1])
    journal.set_phase(Phase.SERVING)
    journal.set_suspects([1, 2])
    journal.clear([3])
    assert journal.accused() == []
    assert journal.suspects() == [3]
    assert journal.phase is Phase.STARTING


@pytest.mark.parametrize(
    "act",
    [Journal.beat, lambda j: launch(j, 0, [1]), lambda j: j.retired(0), lambda j: j.set_phase(Phase.SERVING)],
    ids=["beat", "launched", "retired", "phase"],
)
def test_whatever_a_core_does_is_a_sign_of_life(journal: Journal, act: object) -> None:
    journal._beats[:] = time.monotonic() - 100
    assert journal.silent_s >= 100
    act(journal)  # type: ignore[operator]
    assert journal.silent_s < 50


def test_the_worker_that_is_silent_longest_counts() -> None:
    journal = Journal.create(4, workers=3)
    journal._beats[:] = time.monotonic() - 100
    journal.beat(0)
    journal.beat(2)
    assert journal.silent_s >= 100
    journal.beat(1)
    assert journal.silent_s < 50
    journal.close()


def test_a_journal_too_small_for_its_configuration_is_refused(journal: Journal) -> None:
    with pytest.raises(InvalidArgumentError, match=r"has \d+ bytes; \d+ are needed"):
        Journal(journal.fd, 1_000_000)


def test_a_requests_key_is_a_hash_of_session_and_handle() -> None:
    digest = blake2b(b"s" * 16 + bytes([0, 0, 0, 0, 0, 0, 1, 2]), digest_size=8).digest()
    assert request_key(b"s" * 16, 258) == int.from_bytes(digest, "big")
    assert len({request_key(session, handle) for session in (b"a" * 16, b"b" * 16) for handle in range(1000)}) == 2000


CORE = """
import sys
import numpy as np
from mainspring.ipc.journal import Journal, Phase

journal = Journal(int(sys.argv[1]), 8)
journal.set_phase(Phase.SERVING)
journal.set_suspects([11, 12])
for step in range(10**9):
    journal.launched(step, np.array([step, 2**63], np.uint64), np.array([step, 1], np.int64), step % 2 == 0)
    if step == 1000:
        print("1000 steps", flush=True)
    if step:
        journal.retired(step - 1)
"""


def test_journal_entries_of_a_core_survive_its_sigkill(journal: Journal) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", CORE, str(journal.fd)], pass_fds=[journal.fd], stdout=subprocess.PIPE
    ) as core:
        assert core.stdout is not None
        core.stdout.readline()
        core.send_signal(signal.SIGKILL)
        core.wait()
    assert journal.phase is Phase.SERVING
    assert journal.suspects() == [11, 12]
    accused = journal.accused()
    assert 1 <= len(accused) // 2 <= 2, "the step that ran, and the one before it if it had not retired"
    for (step, position, solo), (other, one, same) in zip(accused[::2], accused[1::2], strict=True):
        assert (step, position, solo) == (position, step, step % 2 == 0)
        assert (other, one, same) == (2**63, 1, solo)
        assert step >= 999


def test_a_closed_journal_leaves_no_descriptor() -> None:
    journal = Journal.create(8)
    fd = journal.fd
    os.fstat(fd)
    journal.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_the_rank_that_holds_the_others_up_is_named() -> None:
    journal = Journal.create(8, workers=3)
    journal.clear(())
    for rank in range(3):
        journal.set_pid(rank)
    assert journal.behind() == ""
    launch(journal, 7, [1])
    journal.begun(1, 7)
    assert journal.behind() == f"rank 2 (pid {os.getpid()}) is at step 0, others at 7"
    journal.begun(2, 7)
    assert journal.behind() == ""
    journal._beats[1] -= LAG_SECONDS + 1
    assert journal.behind() == f"rank 1 (pid {os.getpid()}) is silent"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        journal._ranks["pid"][1] = other.pid
        other.send_signal(signal.SIGSTOP)
        os.waitpid(other.pid, os.WUNTRACED)
        assert journal.behind() == f"rank 1 (pid {other.pid}) is stopped"
        other.kill()


def test_one_worker_holds_nobody_up(journal: Journal) -> None:
    launch(journal, 7, [1])
    journal._beats[0] -= 60
    assert journal.behind() == ""
