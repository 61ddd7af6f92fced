"""Which request is blamed for the death of a core: none outside a step; otherwise a request after two deaths alone at
one position, or three by SIGKILL."""

from __future__ import annotations

import numpy as np
import pytest

from mainspring.ipc.crash_suspects import CrashSuspects
from mainspring.ipc.journal import STEPS, Journal

SEGV, KILL = ("by signal SIGSEGV", False), ("by signal SIGKILL", True)


class Cores:
    """Cores that die one after another, as their supervisor sees them."""

    def __init__(self) -> None:
        self.journal = Journal.create(16)
        self.blame = CrashSuspects()

    def die(
        self,
        *steps: list[int],
        position: int = 0,
        solo: bool = False,
        how: tuple[str, bool] = SEGV,
        left: set[int] | None = None,
    ) -> None:
        """Start a core, which dies with these steps in flight; `left`: the suspects without a new token."""
        self.journal.clear(self.blame.suspects)
        if left is not None:
            self.journal.set_suspects(left)
        for number, keys in enumerate(steps):
            self.journal.launched(number, np.array(keys, np.uint64), np.full(len(keys), position), solo)
        self.blame.crashed(self.journal, *how)

    @property
    def suspects(self) -> set[int]:
        return set(self.blame.suspects)

    @property
    def quarantined(self) -> set[int]:
        return set(self.blame.quarantined)


@pytest.fixture
def cores() -> Cores:
    return Cores()


def test_a_death_outside_a_step_blames_no_request(cores: Cores) -> None:
    for _ in range(5):
        cores.die()
    assert cores.suspects == cores.quarantined == set()


def test_a_death_in_a_step_makes_its_requests_suspects_however_often_and_no_more(cores: Cores) -> None:
    for how in (SEGV, KILL, SEGV, SEGV):
        cores.die([1, 2, 3], how=how)
        assert cores.suspects == {1, 2, 3}
    assert cores.quarantined == set()


def test_all_steps_in_flight_are_accused(cores: Cores) -> None:
    cores.die([1, 2], [3])
    assert cores.suspects == {1, 2, 3}


def test_of_two_steps_in_flight_the_later_one_says_which_token_clears_it(cores: Cores) -> None:
    for number, position in ((STEPS - 1, 4), (STEPS, 5)):  # the later one is noted in the first place
        cores.journal.launched(number, np.array([1], np.uint64), np.array([position]), False)
    cores.blame.crashed(cores.journal, *SEGV)
    assert cores.blame.suspects == {1: 5}


def test_a_suspect_that_has_brought_a_token_is_none_any_more(cores: Cores) -> None:
    cores.die([1, 2, 3])
    cores.die(left={3})
    assert cores.suspects == {3}


def test_suspects_that_were_not_tried_yet_stay_suspects(cores: Cores) -> None:
    cores.die([1, 2, 3])
    cores.die([1], solo=True)
    assert cores.suspects == {1, 2, 3}
    cores.die([7, 8], left={2, 3})
    assert cores.suspects == {2, 3, 7, 8}


def test_two_deaths_in_a_step_of_its_own_are_enough_and_it_alone_is_quarantined(cores: Cores) -> None:
    cores.die([1, 2, 3])
    cores.die([2], solo=True)
    assert cores.quarantined == set()
    cores.die([2], solo=True)
    assert cores.quarantined == {2}
    assert cores.suspects == {1, 3}


def test_by_sigkill_it_takes_three(cores: Cores) -> None:
    cores.die([1, 2])
    for _ in range(2):
        cores.die([1], solo=True, how=KILL)
        assert cores.quarantined == set()
    cores.die([1], solo=True, how=KILL)
    assert cores.quarantined == {1}


@pytest.mark.parametrize("deaths", [(SEGV, KILL), (KILL, SEGV)])
def test_one_death_by_anything_else_makes_two_enough(cores: Cores, deaths: tuple[tuple[str, bool], ...]) -> None:
    cores.die([1])
    for how in deaths:
        cores.die([1], solo=True, how=how)
    assert cores.quarantined == {1}


def test_strikes_count_at_one_position_only(cores: Cores) -> None:
    cores.die([1])
    for position in range(6):
        cores.die([1], position=position, solo=True)
    assert cores.quarantined == set()
    cores.die([1], position=5, solo=True)
    assert cores.quarantined == {1}


def test_strikes_are_forgotten_when_it_has_brought_a_token(cores: Cores) -> None:
    cores.die([1])
    cores.die([1], solo=True)
    cores.die(left=set())  # the suspect got a token, and the core died for another reason
    cores.die([1])
    cores.die([1], solo=True)
    assert cores.quarantined == set()
    assert cores.suspects == {1}


def test_strikes_are_kept_over_deaths_of_others(cores: Cores) -> None:
    cores.die([1, 2])
    cores.die([1], solo=True)
    cores.die([2], solo=True)
    cores.die()
    cores.die([1], solo=True)
    assert cores.quarantined == {1}


def test_deaths_together_with_others_are_no_strikes(cores: Cores) -> None:
    cores.die([1])
    cores.die([1], solo=True)
    cores.die([1, 2])
    assert cores.quarantined == set()
    cores.die([1], solo=True)
    assert cores.quarantined == {1}


def test_the_quarantine_says_how_often_where_and_how(cores: Cores) -> None:
    cores.die([1])
    cores.die([1], position=17, solo=True)
    cores.die([1], position=17, solo=True, how=("by hanging", False))
    assert cores.blame.quarantined[1] == (
        "the core died 2 times while it computed this request alone, at output token 17; the last time by hanging"
    )
