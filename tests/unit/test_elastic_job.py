"""The elastic loop in an elastic job: its calls to the runtime, and their order.

The runtime is the test's own and notes what it is asked. Real jobs, whose ranks are
killed, are in tests/ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from ringjax import errors, runtime
from ringjax.elastic import (
    Checkpointer,
    ElasticSampler,
    State,
    jax_leaves,
    loop,
    run,
    sync_plan,
    transfer,
)
from ringjax.elastic.sync_plan import HeldState, SyncPlan
from ringjax.elastic.transfer import Participants


class Runtime:
    """A stand-in for the runtime of a rank in a job of three ranks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.pages: list[str] = []
        self.epoch = 0
        self.change = 0
        self.newcomer = False
        self.stays = True
        self.held: list[HeldState] = []
        self.participants = Participants(0, (1, 2))
        self.pause_fails = 0
        self.lost = False
        for name in (
            *(
                "elastic",
                "is_newcomer",
                "solo_mode",
                "request_admission",
                "check_updates",
            ),
            "has_run_solo",
            *("pause", "restart", "epoch_info", "leave_at_next_pause"),
        ):
            patch.setattr(runtime, name, getattr(self, name), raising=False)
        patch.setattr(sync_plan, "negotiate", self.agree)
        patch.setattr(sync_plan, "own_number", lambda: 5)
        patch.setattr(transfer, "broadcast_state", self.share)
        patch.setattr(transfer, "preallocate", self.make_room)
        patch.setattr(runtime, "rank", lambda: 1)
        patch.setattr(runtime, "size", lambda: 3)

    def elastic(self) -> bool:
        return True

    def is_newcomer(self) -> bool:
        return self.newcomer

    def has_run_solo(self) -> bool:
        return self.newcomer and "called alone" in self.pages

    @contextlib.contextmanager
    def solo_mode(self):
        self.pages.append("rehearse")
        yield

    def request_admission(self) -> None:
        self.pages.append("admit")
        self.newcomer = False

    def check_updates(self) -> tuple[int, int]:
        return self.change, self.epoch

    def pause(self, number: int) -> bool:
        self.pages.append(f"pause {number}")
        if self.pause_fails:
            self.pause_fails -= 1
            raise errors.PeerLost("while pausing")
        self.change = 0
        self.epoch += 1
        return self.stays

    def restart(self, text: str) -> None:
        self.pages.append(f"restart: {text}")
        self.epoch += 1

    def epoch_info(self):
        return self  # has an epoch

    def leave_at_next_pause(self) -> None:
        self.pages.append("leave")

    def agree(self, held: HeldState) -> SyncPlan:
        self.held.append(held)
        participants = self.participants if held else Participants(0, ())
        sync_plan._current = SyncPlan(self.epoch, (2, 5, 7), participants, self.lost)
        return sync_plan._current

    def make_room(self, values, **_):
        self.pages.append("make room")

    def share(self, values, **_):
        self.pages.append("share")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


def train_with(job: Runtime, *events, commits: int = 4):
    """A training function that records its calls and runs an event per commit."""
    todo = list(events)

    @run
    def train(state: State) -> int:
        job.pages.append(f"train {state.step}")
        while state.step < commits:
            state.step += 1
            if todo and (event := todo.pop(0)) is not None:
                event()
            state.commit()
        return state.step

    return train


def test_a_loss_that_was_repaired_starts_the_function_again_without_a_rollback(
    job: Runtime,
) -> None:
    state, sizes = State(step=0), []
    state.register_reset_callbacks([lambda: sizes.append(runtime.size())])

    def repair() -> None:
        job.epoch += 1

    assert train_with(job, None, repair)(state) == 4
    assert job.pages == ["share", "train 0", "train 2"]
    assert job.held == [HeldState.COMMITTED, HeldState.CURRENT]
    assert sizes == [3]
    assert sync_plan.current_plan() is None


def test_an_announced_change_is_waited_for_and_newcomers_get_the_state(
    job: Runtime,
) -> None:
    def announce() -> None:
        job.change = 7
        job.participants = Participants(0, (2,))

    train_with(job, None, announce)(State(step=0))
    assert job.pages == ["share", "train 0", "pause 7", "train 2"]
    assert job.held == [HeldState.COMMITTED, HeldState.CURRENT]


def test_a_dismissed_rank_ends_without_an_error(job: Runtime) -> None:
    def announce() -> None:
        job.change, job.stays = 7, False

    with pytest.raises(SystemExit) as caught:
        train_with(job, announce)(State(step=0))
    assert caught.value.code == 0
    assert job.pages == ["share", "train 0", "pause 7"]


def test_a_failure_restarts_all_from_the_last_commit(job: Runtime) -> None:
    def fail() -> None:
        raise errors.Mismatch("shapes")

    state = State(step=0)
    assert train_with(job, None, None, fail)(state) == 4
    again = ["restart: shapes", "share", "train 2"]
    assert job.pages == ["share", "train 0", *again]
    assert job.held == [HeldState.COMMITTED, HeldState.COMMITTED]


def test_a_failure_elsewhere_in_the_last_step_is_one_here(job: Runtime) -> None:
    state, checks = State(step=0), []

    def check_updates() -> tuple[int, int]:
        checks.append(state.step)
        if len(checks) == 3:
            raise errors.PeerLost("all ranks start again")
        return 0, job.epoch

    job.patch.setattr(runtime, "check_updates", check_updates)
    assert train_with(job, commits=2)(state) == 2
    assert job.pages[2:] == ["restart: all ranks start again", "share", "train 2"]


def test_a_pause_that_fails_is_a_failure(job: Runtime) -> None:
    def announce() -> None:
        job.change, job.pause_fails = 3, 1

    assert train_with(job, announce)(State(step=0)) == 4
    assert job.pages[2:4] == ["pause 3", "restart: while pausing"]
    # The change is still announced, so the next commit asks again.
    assert job.pages[4:] == ["share", "train 1", "pause 3", "train 2"]


def test_what_fails_three_times_without_a_commit_is_raised(job: Runtime) -> None:
    def fail() -> None:
        raise errors.Mismatch("shapes")

    with pytest.raises(errors.Mismatch):
        train_with(job, None, fail, fail, fail, fail)(State(step=0))
    assert [page for page in job.pages if "restart" in page] == ["restart: shapes"] * 3


def test_programs_for_another_number_of_ranks_are_traced_again(
    job: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise errors.RingjaxError(
            "was compiled for 4 ranks, and there are 3: trace it again"
        )

    forgotten = []
    monkeypatch.setattr(jax_leaves, "forget_programs", lambda: forgotten.append(1))
    assert train_with(job, fail)(State(step=0)) == 4
    assert forgotten == [1]


def test_ranks_may_be_lost_more_often(job: Runtime) -> None:
    def fail() -> None:
        raise errors.PeerLost("rank 2", 2)

    assert train_with(job, *[fail] * 9)(State(step=0)) == 4


@pytest.mark.parametrize(
    "error", [errors.Fenced("was declared lost", 1), ValueError("the user's")]
)
def test_who_is_fenced_or_mistaken_does_not_go_on(
    job: Runtime, error: Exception
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        train_with(job, fail)(State(step=0))
    assert not [page for page in job.pages if "restart" in page]


def test_a_newcomer_rehearses_and_keeps_nothing_of_it(job: Runtime) -> None:
    job.newcomer = True

    def warm_up(state: State) -> None:
        job.pages.append("warm up")
        state.step = 99
        state.commit()  # no other rank to agree with
        state.step = 100

    @run(warm_up=warm_up)
    def train(state: State) -> int:
        return state.step

    state = State(step=0)
    train(state)
    assert job.pages == ["rehearse", "warm up", "make room", "admit", "share"]
    assert job.held == [HeldState.NOTHING]
    assert state.step == 0


@pytest.mark.parametrize("called", [[], ["called alone"]])
def test_a_newcomer_that_has_called_collectives_calls_the_callbacks_with_the_others(
    job: Runtime, called: list[str]
) -> None:
    state = State(step=0)
    state.register_reset_callbacks([lambda: job.pages.append("callback")])
    job.newcomer, job.pages = True, [*called]
    train_with(job)(state)
    after = ["make room", "admit", *["callback"] * len(called), "share", "train 0"]
    assert job.pages == [*called, *after]


def test_run_fn_needs_no_reset_in_an_elastic_job(job: Runtime) -> None:
    def fail(state: State) -> None:
        if "restart: x" not in job.pages:
            raise errors.PeerLost("x")

    loop.run_fn(fail, lambda: pytest.fail("was reset"))(State())
    assert "restart: x" in job.pages


def test_samplers_take_their_shares_by_what_was_agreed(job: Runtime) -> None:
    state = State(sampler=ElasticSampler(12, shuffle=False), step=0)

    @run
    def train(state: State) -> list[int]:
        assert state.sampler.num_replicas == 3
        return list(state.sampler)

    assert train(state) == [1, 4, 7, 10]  # worker 5 is rank 1 of 3


def test_sigterm_is_a_wish_to_leave(job: Runtime) -> None:
    before = signal.getsignal(signal.SIGTERM)

    @run
    def train(state: State) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and thread.daemon:
                thread.join(5)
        assert "leave" in job.pages

    train(State(step=0))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("wish", [0.0, 60.0])
def test_a_later_sigterm_means_it(
    job: Runtime, monkeypatch: pytest.MonkeyPatch, wish: float
) -> None:
    monkeypatch.setattr(loop, "_SIGTERM_GRACE", wish)
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: got.append(signum))
    try:

        @run
        def train(state: State) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(100):  # Python handles it between byte codes
                pass

        train(State(step=0))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM] * (wish == 0.0)


def test_in_another_thread_signals_stay_as_they_are(job: Runtime) -> None:
    seen = []
    before = signal.getsignal(signal.SIGTERM)

    @run
    def train(state: State) -> None:
        seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=train, args=(State(step=0),))
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize(
    ("held", "source", "receivers"),
    [
        ([1, 1, 1], 0, (1, 2)),
        ([0, 0, 2], 0, (2,)),
        ([0, 0, 0], 0, ()),
        ([2, 1, 2], 1, (0, 2)),
        ([1, 0, 2], 1, (0, 2)),
        ([2], 0, ()),
    ],
)
def test_who_sends_the_state_to_whom(held, source, receivers) -> None:
    assert sync_plan.choose_participants(held, [0, 1, 2]) == Participants(
        source, receivers
    )
    # This rank is the second of a group of two.
    elsewhere = Participants(2 * source + 1, tuple(2 * r + 1 for r in receivers))
    assert sync_plan.choose_participants(held, [1, 3, 5]) == elsewhere


def test_a_state_that_nobody_has_is_not_made_up(
    job: Runtime, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.newcomer, job.lost = True, True
    with pytest.raises(RuntimeError, match="all ranks that had the training state"):
        train_with(job)(State(step=0))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(State(step=3))
    job.newcomer, job.participants = True, Participants(1, (0, 2))

    @run(checkpointer=Checkpointer(tmp_path))
    def train(state: State) -> int:
        return state.step

    assert train(State(step=0)) == 3


@pytest.mark.parametrize(("rank", "written"), [(0, [2]), (1, [])])
def test_rank_0_writes_its_last_commit_when_it_leaves(
    job: Runtime, tmp_path, rank: int, written: list[int]
) -> None:
    job.patch.setattr(runtime, "rank", lambda: rank)

    @run(checkpointer=Checkpointer(tmp_path, every=100))
    def train(state: State) -> None:
        while True:
            state.step += 1
            if state.step == 2:
                job.change, job.stays = 7, False
            state.commit()

    with pytest.raises(SystemExit):
        train(State(step=0))
    assert Checkpointer(tmp_path).numbers() == written


@pytest.mark.parametrize("times", [1, 5])
def test_a_loss_before_the_state_is_sent_starts_again_and_uses_up_no_attempts(
    job: Runtime, times: int
) -> None:
    def agree(held: HeldState) -> SyncPlan:
        agreed = job.agree(held)
        if held and len(job.held) <= times:
            job.epoch += 1
        return agreed

    job.patch.setattr(sync_plan, "negotiate", agree)
    assert train_with(job)(State(step=0)) == 4
    assert job.pages[times:] == ["share", "train 0"]
    why = "restart: a rank was lost just before"
    assert all(page.startswith(why) for page in job.pages[:times])
