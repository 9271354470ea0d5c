"""Tests of the elastic loop's reaction to each error, and of plain states.

Resets, broadcasts, and notifications are fakes here. tests/ranks has real ones.
"""

from __future__ import annotations

import pickle  # noqa: TID251
import threading

import numpy as np
import pytest

from ringjax import elastic, errors
from ringjax.elastic import HostUpdateResult, ObjectState


def state_of(**kwargs) -> ObjectState:
    return ObjectState(lambda obj: obj, lambda: 0, **kwargs)


class Recorder:
    """A training function that raises `failures` in order. Records all calls."""

    def __init__(self, *failures: BaseException | None) -> None:
        self.failures = list(failures)
        self.calls: list[str] = []

    def train(self, state: ObjectState, bonus: int = 0) -> int:
        self.calls.append(f"train {state.step}")
        state.step += 1
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure
        return state.step + bonus

    def reset(self) -> None:
        self.calls.append("reset")

    def run(self, state: ObjectState, **kwargs) -> int:
        sync = state.sync
        state.sync = lambda: (self.calls.append("sync"), sync())
        return elastic.run_fn(self.train, self.reset)(state, **kwargs)


def test_without_failure_the_function_runs_once_after_a_sync() -> None:
    recorder = Recorder()
    assert recorder.run(state_of(step=3), bonus=10) == 14
    assert recorder.calls == ["sync", "train 3"]


def test_a_failure_restores_the_last_commit() -> None:
    recorder = Recorder(errors.PeerLost("rank 1", 1), errors.Mismatch("shapes"))
    state = state_of(step=3)
    assert recorder.run(state) == 4
    again = ["reset", "sync", "train 3"]
    assert recorder.calls == ["sync", "train 3", *again, *again]


def test_errors_of_compiled_steps_are_recovered() -> None:
    """JAX's ValueError of a failed cached program is recovered, a user's is raised."""
    lost = "UNAVAILABLE: RINGJAX[world, epoch 0]: allreduce 'grads' (2 tensors): rank 1"
    recorder = Recorder(ValueError(lost))
    assert recorder.run(state_of(step=3)) == 4
    assert recorder.calls == ["sync", "train 3", "reset", "sync", "train 3"]
    with pytest.raises(ValueError, match="mine"):
        Recorder(ValueError("mine: " + lost)).run(state_of(step=3))


@pytest.mark.parametrize(
    ("text", "kind", "about"),
    [
        (
            "UNAVAILABLE: RINGJAX[world, epoch 0]: allreduce 'grads' (2 tensors, SUM, "
            "seq 3): rank 1 closed its connection",
            errors.PeerLost,
            (1, "allreduce", "grads"),
        ),
        (
            "ABORTED: RINGJAX[world, epoch 0]: allreduce 'grads' (world): ranks "
            "disagree: rank 1 sent 'b' f32[5], rank 0 sent 'b' f32[4].",
            errors.Mismatch,
            (-1, "allreduce", "grads/b"),
        ),
        (
            "DEADLINE_EXCEEDED: RINGJAX[set 2, epoch 1]: barrier (seq 2): rank 3 on "
            "one has not called barrier",
            errors.Stalled,
            (3, "barrier", ""),
        ),
        (
            "ABORTED: RINGJAX[world, epoch 0]: Mismatched shapes of allgather 'e': "
            "rank 0 sent f64[3], rank 1 sent f64[4]",
            errors.Mismatch,
            (-1, "allgather", "e"),
        ),
    ],
)
def test_errors_have_a_rank_an_operation_and_a_tensor(
    text: str, kind: type, about: tuple
) -> None:
    error = errors.translate(ValueError(text))
    assert type(error) is kind
    assert (error.rank, error.op, error.tensor) == about
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.op, again.tensor) == about
    assert str(again) == text.partition(": ")[2]


def test_a_host_change_keeps_the_state_and_may_skip_sync() -> None:
    recorder = Recorder(
        errors.HostsUpdatedInterrupt(skip_sync=False),
        errors.HostsUpdatedInterrupt(skip_sync=True),
        errors.PeerLost("rank 1", 1),
    )
    state = state_of(step=0)
    assert recorder.run(state) == 2
    second = ["reset", "sync", "train 1"]
    third = ["reset", "train 2"]
    # The sync at the beginning of the second run was the last to save the state.
    fourth = ["reset", "sync", "train 1"]
    assert recorder.calls == ["sync", "train 0", *second, *third, *fourth]


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidArgument("duplicate name 'x'"),
        errors.NotInitialized("init"),
        ValueError("the user's"),
        KeyboardInterrupt(),
    ],
)
def test_permanent_errors_are_not_retried(error: BaseException) -> None:
    recorder = Recorder(error)
    with pytest.raises(type(error)):
        recorder.run(state_of(step=0))
    assert recorder.calls == ["sync", "train 0"]


def test_a_failed_sync_is_retried() -> None:
    state, calls = state_of(step=0), []

    def sync() -> None:
        calls.append("sync")
        if len(calls) < 3:
            raise errors.PeerLost("rank 1", 1)

    state.sync = sync
    assert elastic.run_fn(lambda state: state.step, lambda: None)(state) == 0
    assert calls == ["sync"] * 3


def test_callbacks_run_between_reset_and_sync() -> None:
    recorder = Recorder(errors.PeerLost("rank 1", 1))
    state = state_of(step=0)
    state.register_reset_callbacks([lambda: recorder.calls.append("one")])
    state.register_reset_callbacks([lambda: recorder.calls.append("two")])
    recorder.run(state)
    assert recorder.calls[2:] == ["reset", "one", "two", "sync", "train 0"]


def test_notifications_reach_the_state_during_training() -> None:
    manager = elastic.notification_manager
    state = state_of(step=0)

    def train(state: ObjectState) -> int:
        state.step += 1
        if state.step == 1:
            telling = threading.Thread(
                target=manager.handle_hosts_updated, args=(1.5, HostUpdateResult.added)
            )
            telling.start()
            telling.join()
        state.commit()
        return state.step

    assert elastic.run_fn(train, lambda: None)(state) == 2
    manager.handle_hosts_updated(9.0, HostUpdateResult.added)  # no state listens
    state.check_host_updates()


@pytest.mark.parametrize(
    ("updates", "skip_sync"),
    [
        ([(2, HostUpdateResult.removed)], True),
        ([(2, HostUpdateResult.added)], False),
        ([(2, HostUpdateResult.removed), (3, HostUpdateResult.added)], False),
        ([(2, HostUpdateResult.removed), (1, HostUpdateResult.added)], True),  # old
    ],
)
def test_sync_is_skipped_if_hosts_are_only_removed(updates, skip_sync: bool) -> None:
    state = state_of(step=0)
    for timestamp, update in updates:
        state.on_hosts_updated(timestamp, update)
    with pytest.raises(errors.HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skip_sync
    state.commit()  # reported once


def test_all_ranks_follow_rank_0s_notification() -> None:
    # In the first case only this rank was notified, in the second only rank 0.
    unnotified = ObjectState(lambda obj: (0, 0, 0), lambda: 1, step=0)
    unnotified.on_hosts_updated(5, HostUpdateResult.added)
    unnotified.check_host_updates()
    notified = ObjectState(lambda obj: (0, 7, 1), lambda: 1, step=0)
    with pytest.raises(errors.HostsUpdatedInterrupt) as caught:
        notified.check_host_updates()
    assert caught.value.skip_sync


def test_restore_undoes_changes_in_place() -> None:
    array, lock = np.zeros(3), threading.Lock()
    state = state_of(losses=[], table={"a": [1]}, array=array, held=[lock], n=None)
    assert state.array is array and state.held[0] is lock
    for _ in range(2):
        state.losses.append(0.5)
        state.table["a"].append(2)
        state.array[:] = 7
        state.n, state.other = 3, "not committed"
        state.restore()
        assert (state.losses, state.table, state.n) == ([], {"a": [1]}, None)
        assert not state.array.any() and state.held[0] is lock
    state.losses.append(0.5)
    state.save()
    state.losses.append(0.25)
    state.restore()
    assert state.losses == [0.5] and state.other == "not committed"


def test_sync_copies_rank_0s_current_values() -> None:
    others = {"step": 5, "name": "zero"}
    sent = []
    state = ObjectState(
        lambda obj: sent.append(obj) or others, lambda: 1, step=1, name=""
    )
    state.step = 2
    state.sync()
    assert sent == [{"step": 2, "name": ""}]
    assert (state.step, state.name) == (5, "zero")
    state.step = 6
    state.restore()
    assert state.step == 5


def test_an_empty_state_sends_nothing() -> None:
    ObjectState(lambda obj: pytest.fail("sent something"), lambda: 0).sync()


def test_the_base_class_works_without_attributes() -> None:
    state = elastic.State(lambda obj: obj, lambda: 0)
    state.save()
    state.restore()
    state.sync()
    assert elastic.run(lambda state: 7)(state) == 7


def test_errors_can_be_pickled() -> None:
    interrupt = pickle.loads(pickle.dumps(errors.HostsUpdatedInterrupt(True)))
    assert interrupt.skip_sync and not isinstance(interrupt, errors.RingjaxError)
    mismatch = errors.HorovodVersionMismatchError("torch", "2.1", "2.0")
    again = pickle.loads(pickle.dumps(mismatch))
    assert (again.name, again.version, again.installed_version) == (
        "torch",
        "2.1",
        "2.0",
    )
    assert isinstance(again, ImportError) and str(again) == str(mismatch)
