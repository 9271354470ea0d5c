"""Tests of the elastic loop's calls to the runtime, and of their order.

A fake runtime records the calls. tests/ranks has real jobs whose ranks are killed.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
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
    """A fake runtime of rank 1 in an elastic job of three ranks. Records its calls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.calls: list[str] = []
        self.epoch = 0
        self.change = 0
        self.newcomer = False
        self.stays = True
        self.held: list[HeldState] = []
        self.participants = Participants(0, (1, 2))
        self.pause_fails = 0
        self.lost = self.cold = False
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
        patch.setattr(transfer, "broadcast_state", self.send_state)
        patch.setattr(transfer, "preallocate", self.make_room)
        patch.setattr(runtime, "rank", lambda: 1)
        patch.setattr(runtime, "size", lambda: 3)

    def elastic(self) -> bool:
        return True

    def is_newcomer(self) -> bool:
        return self.newcomer

    def has_run_solo(self) -> bool:
        return self.newcomer and "called alone" in self.calls

    @contextlib.contextmanager
    def solo_mode(self):
        self.calls.append("rehearse")
        yield

    def request_admission(self, *, cold: bool = False) -> None:
        self.cold = cold
        self.calls.append("admit")
        self.newcomer = False

    def check_updates(self) -> tuple[int, int]:
        return self.change, self.epoch

    def pause(self, number: int) -> bool:
        self.calls.append(f"pause {number}")
        if self.pause_fails:
            self.pause_fails -= 1
            raise errors.PeerLost("while pausing")
        self.change = 0
        self.epoch += 1
        return self.stays

    def restart(self, text: str) -> None:
        self.calls.append(f"restart: {text}")
        self.epoch += 1

    def epoch_info(self):
        return self  # only `epoch` is read

    def leave_at_next_pause(self) -> None:
        self.calls.append("leave")

    def agree(self, held: HeldState) -> SyncPlan:
        self.held.append(held)
        participants = self.participants if held else Participants(0, ())
        sync_plan._current = SyncPlan(self.epoch, (2, 5, 7), participants, self.lost)
        return sync_plan._current

    def make_room(self, values, **_):
        self.calls.append("make room")

    def send_state(self, values, **_):
        self.calls.append("send_state")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


def train_with(job: Runtime, *events, commits: int = 4):
    """Returns a training function that calls one of `events` before each commit."""
    todo = list(events)

    @run
    def train(state: State) -> int:
        job.calls.append(f"train {state.step}")
        while state.step < commits:
            state.step += 1
            if todo and (event := todo.pop(0)) is not None:
                event()
            state.commit()
        return state.step

    return train


def test_a_repaired_loss_restarts_training_without_a_rollback(
    job: Runtime,
) -> None:
    state, sizes = State(step=0), []
    state.register_reset_callbacks([lambda: sizes.append(runtime.size())])

    def repair() -> None:
        job.epoch += 1

    assert train_with(job, None, repair)(state) == 4
    assert job.calls == ["send_state", "train 0", "train 2"]
    assert job.held == [HeldState.COMMITTED, HeldState.CURRENT]
    assert sizes == [3]
    assert sync_plan.current_plan() is None


def test_an_announced_change_pauses_and_shares_the_state(
    job: Runtime,
) -> None:
    def announce() -> None:
        job.change = 7
        job.participants = Participants(0, (2,))

    train_with(job, None, announce)(State(step=0))
    assert job.calls == ["send_state", "train 0", "pause 7", "train 2"]
    assert job.held == [HeldState.COMMITTED, HeldState.CURRENT]


def test_a_dismissed_rank_exits_without_an_error(job: Runtime) -> None:
    def announce() -> None:
        job.change, job.stays = 7, False

    with pytest.raises(SystemExit) as caught:
        train_with(job, announce)(State(step=0))
    assert caught.value.code == 0
    assert job.calls == ["send_state", "train 0", "pause 7"]


def test_a_failure_restarts_all_ranks_from_the_last_commit(job: Runtime) -> None:
    def fail() -> None:
        raise errors.Mismatch("shapes")

    state = State(step=0)
    assert train_with(job, None, None, fail)(state) == 4
    again = ["restart: shapes", "send_state", "train 2"]
    assert job.calls == ["send_state", "train 0", *again]
    assert job.held == [HeldState.COMMITTED, HeldState.COMMITTED]


def test_another_ranks_failure_in_the_last_step_restarts_this_one(job: Runtime) -> None:
    state, checks = State(step=0), []

    def check_updates() -> tuple[int, int]:
        checks.append(state.step)
        if len(checks) == 3:
            raise errors.PeerLost("all ranks start again")
        return 0, job.epoch

    job.patch.setattr(runtime, "check_updates", check_updates)
    assert train_with(job, commits=2)(state) == 2
    assert job.calls[2:] == ["restart: all ranks start again", "send_state", "train 2"]


def test_a_failed_pause_restarts_all_ranks(job: Runtime) -> None:
    def announce() -> None:
        job.change, job.pause_fails = 3, 1

    assert train_with(job, announce)(State(step=0)) == 4
    assert job.calls[2:4] == ["pause 3", "restart: while pausing"]
    # The change is still announced, so the next commit pauses again.
    assert job.calls[4:] == ["send_state", "train 1", "pause 3", "train 2"]


def test_three_failures_without_a_commit_are_raised(job: Runtime) -> None:
    def fail() -> None:
        raise errors.Mismatch("shapes")

    with pytest.raises(errors.Mismatch):
        train_with(job, None, fail, fail, fail, fail)(State(step=0))
    assert [entry for entry in job.calls if "restart" in entry] == [
        "restart: shapes"
    ] * 3


def test_programs_are_traced_again_after_a_resize(
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


def test_losses_are_not_limited(job: Runtime) -> None:
    def fail() -> None:
        raise errors.PeerLost("rank 2", 2)

    assert train_with(job, *[fail] * 9)(State(step=0)) == 4


@pytest.mark.parametrize(
    "error", [errors.Fenced("was declared lost", 1), ValueError("the user's")]
)
def test_permanent_errors_end_the_rank(job: Runtime, error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        train_with(job, fail)(State(step=0))
    assert not [entry for entry in job.calls if "restart" in entry]


def test_a_joining_rank_discards_its_warmup_steps(job: Runtime) -> None:
    job.newcomer = True

    def warm_up(state: State) -> None:
        job.calls.append("warm up")
        state.step = 99
        state.commit()  # a joining rank commits alone
        state.step = 100

    @run(warm_up=warm_up)
    def train(state: State) -> int:
        return state.step

    state = State(step=0)
    train(state)
    assert job.calls == ["rehearse", "warm up", "make room", "admit", "send_state"]
    assert job.held == [HeldState.NOTHING]
    assert state.step == 0 and not job.cold


@pytest.mark.parametrize("uses_jax", [True, False])
def test_a_joining_rank_says_that_it_has_compiled_nothing(
    job: Runtime, monkeypatch: pytest.MonkeyPatch, uses_jax: bool
) -> None:
    """A program without JAX has nothing to compile."""
    importlib.import_module("jax")
    if not uses_jax:
        monkeypatch.delitem(sys.modules, "jax")
    job.newcomer = True
    train_with(job)(State(step=0))
    assert job.cold == uses_jax


@pytest.mark.parametrize("called", [[], ["called alone"]])
def test_callbacks_run_on_a_joining_rank_after_collectives(
    job: Runtime, called: list[str]
) -> None:
    state = State(step=0)
    state.register_reset_callbacks([lambda: job.calls.append("callback")])
    job.newcomer, job.calls = True, [*called]
    train_with(job)(state)
    after = ["make room", "admit", *["callback"] * len(called), "send_state", "train 0"]
    assert job.calls == [*called, *after]


def test_run_fn_calls_no_reset_in_an_elastic_job(job: Runtime) -> None:
    def fail(state: State) -> None:
        if "restart: x" not in job.calls:
            raise errors.PeerLost("x")

    loop.run_fn(fail, lambda: pytest.fail("was reset"))(State())
    assert "restart: x" in job.calls


def test_samplers_use_the_agreed_ranks(job: Runtime) -> None:
    state = State(sampler=ElasticSampler(12, shuffle=False), step=0)

    @run
    def train(state: State) -> list[int]:
        assert state.sampler.num_replicas == 3
        return list(state.sampler)

    assert train(state) == [1, 4, 7, 10]  # worker 5 is rank 1 of 3


def test_sigterm_requests_leaving(job: Runtime) -> None:
    before = signal.getsignal(signal.SIGTERM)

    @run
    def train(state: State) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and thread.daemon:
                thread.join(5)
        assert "leave" in job.calls

    train(State(step=0))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("wish", [0.0, 60.0])
def test_a_later_sigterm_reaches_the_programs_handler(
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
            for _ in range(100):  # Python calls the handler between byte codes
                pass

        train(State(step=0))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM] * (wish == 0.0)


def test_signal_handlers_are_kept_outside_the_main_thread(job: Runtime) -> None:
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
def test_source_and_receivers_of_the_state(held, source, receivers) -> None:
    assert sync_plan.choose_participants(held, [0, 1, 2]) == Participants(
        source, receivers
    )
    # With groups of two, this replica's ranks are the second ranks of the groups.
    elsewhere = Participants(2 * source + 1, tuple(2 * r + 1 for r in receivers))
    assert sync_plan.choose_participants(held, [1, 3, 5]) == elsewhere


def test_a_lost_state_is_an_error_or_comes_from_a_checkpoint(
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
def test_a_loss_before_the_sync_counts_as_no_attempt(job: Runtime, times: int) -> None:
    def agree(held: HeldState) -> SyncPlan:
        agreed = job.agree(held)
        if held and len(job.held) <= times:
            job.epoch += 1
        return agreed

    job.patch.setattr(sync_plan, "negotiate", agree)
    assert train_with(job)(State(step=0)) == 4
    assert job.calls[times:] == ["send_state", "train 0"]
    why = "restart: a rank was lost just before"
    assert all(entry.startswith(why) for entry in job.calls[:times])
