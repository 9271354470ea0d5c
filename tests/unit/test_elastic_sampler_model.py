"""Tests that each sample is used once although ranks die, join, and roll back.

A model of a job has several ranks in one process. A rank may die in a step before or
after its gradients are in the result. The other ranks detect the death at their next
commit, as in a real job.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from ringjax import runtime
from ringjax.elastic import ElasticSampler, sync_plan
from ringjax.elastic.transfer import Participants


@dataclass
class Rank:
    """A rank with its sampler, its share of the samples, and its position there."""

    worker: int
    sampler: ElasticSampler
    share: list[int] = field(default_factory=list)
    at: int = 0


class Job:
    """An elastic job. `pending` has the samples since the last commit, `done` older."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int, size: int) -> None:
        self.patch = patch
        self.count = count
        self.contributors: tuple[int, ...] = ()
        patch.setattr(
            runtime, "last_contributors", lambda: self.contributors, raising=False
        )
        self.next = size
        self.ranks: list[Rank] = []
        self.agree(range(size))
        for worker in range(size):
            self.become(worker)
            self.ranks.append(Rank(worker, ElasticSampler(count, seed=3)))
        self.cut()
        self.pending: list[tuple[int, bool]] = []  # a sample, and whether it is padding
        self.done: list[tuple[int, bool]] = []
        self.commit_state = self.ranks[0].sampler.state_dict()

    def agree(self, workers) -> None:
        latest = sync_plan.SyncPlan(0, tuple(workers), Participants(0, ()))
        self.patch.setattr(sync_plan, "_current", latest)
        self.contributors = latest.workers

    def become(self, worker: int) -> None:
        self.patch.setattr(sync_plan, "own_number", lambda: worker)

    def cut(self, state=None) -> None:
        """Divides the remaining samples among all ranks, after loading any `state`."""
        for rank in self.ranks:
            self.become(rank.worker)
            if state is None:
                rank.sampler.reset()
            else:
                rank.sampler.load_state_dict(state)
            rank.share, rank.at = list(rank.sampler), 0

    def step(self, batch: int, dies: int, in_result: bool) -> None:
        """Runs a step. Rank `dies`, if it exists, dies during the step."""
        lost = [self.ranks[dies]] if dies < len(self.ranks) > 1 else []
        stays = [rank for rank in self.ranks if rank not in lost]
        part = self.ranks if in_result else stays
        self.contributors = tuple(rank.worker for rank in part)
        place = {w: i for i, w in enumerate(sync_plan._current.workers)}
        remaining = len(stays[0].sampler.remaining_indices)
        for rank in part:
            taken = rank.share[rank.at : rank.at + batch]
            for i, sample in enumerate(taken, rank.at):
                fills = i * len(place) + place[rank.worker] >= remaining
                self.pending.append((sample, fills))
        for rank in stays:
            self.become(rank.worker)
            size = len(rank.share[rank.at : rank.at + batch])
            rank.at += size
            rank.sampler.record_batch(0, size)
        self.ranks = stays
        states = [rank.sampler.state_dict() for rank in stays]
        assert all(state == states[0] for state in states)

    def commit(self, joining: int) -> None:
        """Commits the state. Divides the samples again if ranks have left or joined."""
        self.commit_state = self.ranks[0].sampler.state_dict()
        self.done += self.pending
        self.pending = []
        lost = len(sync_plan._current.workers) != len(self.ranks)
        if lost or joining:
            self.meet(joining, None)

    def restart(self, dies: int, joining: int) -> None:
        """Rolls all ranks back to the last commit. A rank may die, others may join."""
        if dies < len(self.ranks) > 1:
            self.ranks.pop(dies)
        self.pending = []
        self.meet(joining, self.commit_state)

    def meet(self, joining: int, state) -> None:
        new = range(self.next, self.next + joining)
        self.next += joining
        self.agree([*(rank.worker for rank in self.ranks), *new])
        now = state or self.ranks[0].sampler.state_dict()
        for worker in new:
            self.become(worker)
            self.ranks.append(Rank(worker, ElasticSampler(self.count, seed=3)))
            self.ranks[-1].sampler.load_state_dict(now)
        self.cut(state)


EVENTS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 4), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("commit"), st.integers(0, 2)),
    st.tuples(st.just("restart"), st.integers(0, 5), st.integers(0, 1)),
)


@settings(max_examples=300, deadline=None)
@given(
    count=st.integers(0, 70),
    size=st.integers(1, 5),
    events=st.lists(EVENTS, max_size=25),
)
def test_every_sample_is_in_one_committed_step(count: int, size: int, events) -> None:
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, count, size)
        for name, *arguments in events:
            getattr(job, name)(*arguments)
        job.commit(0)
        # A program continues until no samples are left, including those of lost ranks.
        for _ in range(3 + count):
            while job.ranks[0].at < len(job.ranks[0].share):
                job.step(3, 9, True)
            job.commit(0)
            if job.ranks[0].sampler.finished:
                break
            job.cut()
        assert all(rank.sampler.finished for rank in job.ranks)
        meant = Counter(sample for sample, fills in job.done if not fills)
        everything = Counter(sample for sample, _ in job.done)
        assert set(everything) == set(range(count))
        assert all(times == 1 for times in meant.values())
        assert job.ranks[0].sampler.processed_indices == set(range(count))


def test_samples_of_a_lost_rank_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 12, 3)
    had = job.ranks[1].share[:2]
    job.step(2, 1, False)
    state = job.ranks[0].sampler.state_dict()
    assert state["processed_num"] == 6 and len(state["returned"]) == 2
    job.commit(0)
    left = sorted(job.ranks[0].sampler.remaining_indices)
    assert set(had) < set(left) and len(left) == 8
    assert [len(rank.share) for rank in job.ranks] == [4, 4]
    # Two ranks have equal shares now. A third rank joins and receives a share.
    job.commit(1)
    assert [len(rank.share) for rank in job.ranks] == [3, 3, 3]


def test_a_death_after_the_reduction_returns_no_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, 12, 3)
    job.step(2, 1, True)
    state = {"epoch": 0, "processed_num": 6, "returned": []}
    assert job.ranks[0].sampler.state_dict() == state


def test_recording_a_batch_waits_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 12, 3)
    waited = []
    job.ranks[0].sampler.wait = lambda: waited.append(1)
    job.step(2, 9, True)
    assert waited == [1]
    sync_plan.clear_plan()
    job.ranks[0].sampler.record_batch(1, 2)
    assert waited == [1]
