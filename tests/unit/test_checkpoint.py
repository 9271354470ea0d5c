"""Tests of checkpoints on disk: restored values, full disks, incomplete files."""

from __future__ import annotations

import errno
import json
import resource
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import torch

import ringjax
import ringjax.torch as hvd
from ringjax import elastic, runtime
from ringjax.elastic import Checkpointer, ElasticSampler, State, array_files


@pytest.fixture(autouse=True)
def _job_of_one():
    ringjax.init()
    yield
    ringjax.shutdown()


@pytest.fixture
def checkpointer(tmp_path):
    with Checkpointer(tmp_path / "runs", keep=2) as checkpointer:
        yield checkpointer


def trained(value: float, step: int) -> State:
    tx = optax.adam(1e-3)
    params = {"w": jnp.full((5, 7), value), "b": [np.full(3, value), jnp.zeros((0, 2))]}
    moments = tx.init(params["w"])
    moments = (moments[0]._replace(count=jnp.asarray(step)), *moments[1:])
    return State(
        params=params,
        opt_state=moments,
        half=jnp.full(3, value, jnp.bfloat16),
        key=jax.random.key(step),
        sampler=ElasticSampler(11),
        step=step,
        notes={"losses": [value, float("nan")], "shape": (3, 4), "name": "é"},
        mixed={"rate": value, "mask": np.array([True, False])},
    )


def save(checkpointer: Checkpointer, state) -> None:
    assert checkpointer.save(state)
    checkpointer.wait()


def test_all_values_are_restored(checkpointer: Checkpointer) -> None:
    state = trained(2.5, 7)
    state.sampler.record_batch(0, 4)
    state.commit()
    save(checkpointer, state)
    other = trained(0.0, 0)
    assert checkpointer.load(other) == 7
    assert other.sampler.processed_num == 4 and len(other.sampler) == 7
    assert other.step == 7 and other.notes["shape"] == (3, 4)
    assert other.notes["losses"][0] == 2.5 and other.mixed["rate"] == 2.5
    for name in ("params", "opt_state", "half", "mixed"):
        mine, theirs = getattr(state, name), getattr(other, name)
        assert jax.tree.structure(mine) == jax.tree.structure(theirs)
        for one, two in zip(
            jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True
        ):
            assert type(one) is type(two)
            np.testing.assert_array_equal(one, two)
            assert np.asarray(one).dtype == np.asarray(two).dtype
    assert jax.random.uniform(other.key) == jax.random.uniform(state.key)
    other.step = 9
    other.restore()  # loading is a commit
    assert other.step == 7


def test_other_programs_can_read_a_checkpoint(checkpointer: Checkpointer) -> None:
    save(checkpointer, trained(2.5, 7))
    folder = checkpointer.directory / "7"
    with orbax.checkpoint.PyTreeCheckpointer() as files:
        params = files.restore(folder / "params")
    np.testing.assert_array_equal(params["w"], np.full((5, 7), 2.5, np.float32))
    assert json.loads((folder / "plain.json").read_text())["step"] == 7


def test_only_the_newest_checkpoints_are_kept(checkpointer: Checkpointer) -> None:
    assert checkpointer.load(trained(0, 0)) is None
    for step in (3, 3, 1, 20):
        save(checkpointer, State(step=step))
    assert checkpointer.numbers() == [5, 20]
    save(checkpointer, State(name="without a step"))
    assert checkpointer.numbers() == [20, 21]
    assert sorted(p.name for p in checkpointer.directory.iterdir()) == ["20", "21"]


def test_incomplete_and_damaged_checkpoints_are_skipped(
    checkpointer: Checkpointer, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2):
        save(checkpointer, trained(float(step), step))
    (checkpointer.directory / ".3.writing").mkdir()
    (checkpointer.directory / "4").mkdir()  # no checkpoint of ringjax
    (checkpointer.directory / "2" / "plain.json").write_text("{")
    state = trained(0, 0)
    assert checkpointer.load(state) == 1
    assert "2 cannot be read" in capfd.readouterr().err
    save(checkpointer, state)
    assert not (checkpointer.directory / ".3.writing").exists()


def test_an_error_is_raised_if_all_checkpoints_are_damaged(
    checkpointer: Checkpointer,
) -> None:
    save(checkpointer, State(x=np.zeros((2, 3)), step=1))
    with pytest.raises(RuntimeError, match=r"shape \[2, 3\] where.*has \[3, 2\]"):
        checkpointer.load(State(x=np.zeros((3, 2)), step=0))


def test_attributes_may_be_added_and_removed(checkpointer: Checkpointer) -> None:
    save(checkpointer, State(x=np.ones(3), old=1, step=1))
    state = State(x=np.zeros(3), new=2, step=0)
    assert checkpointer.load(state) == 1
    assert (state.new, state.step) == (2, 1) and state.x.all()


@pytest.mark.parametrize("kind", ["jax", "torch"])
def test_a_full_disk_keeps_the_previous_checkpoint(
    kind: str, checkpointer: Checkpointer, capfd: pytest.CaptureFixture[str]
) -> None:
    def made(value: float, step: int):
        if kind == "jax":
            x = jnp.asarray(np.random.default_rng(step).random((300, 301)))
            return State(x=x, step=step)
        return hvd.elastic.TorchState(torch.nn.Linear(300, 301), step=step)

    save(checkpointer, made(1.0, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        state = made(2.0, 2)
        save(checkpointer, state)
        state.commit()  # training goes on
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capfd.readouterr().err
    assert "2 could not be written" in error and "the one before, 1, stays" in error
    assert [path.name for path in checkpointer.directory.iterdir()] == ["1"]
    assert checkpointer.load(made(0.0, 0)) == 1
    save(checkpointer, made(3.0, 3))
    assert checkpointer.numbers() == [1, 3]


def test_a_full_disk_before_the_first_checkpoint(
    checkpointer: Checkpointer,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(array_files.ArrayFiles, "write", full)
    save(checkpointer, State(step=1))
    error = capfd.readouterr().err
    assert "No space left on device; none is there, and training goes on" in error
    assert checkpointer.numbers() == []


def test_unsupported_values_raise_at_once(checkpointer: Checkpointer) -> None:
    with pytest.raises(TypeError, match=r"state\.x has a str beside arrays"):
        checkpointer.save(State(x=[np.ones(3), "text"]))
    with pytest.raises(TypeError, match=r"state\.f cannot be written"):
        checkpointer.save(State(f=range(3)))
    with pytest.raises(TypeError, match="dtype object"):
        checkpointer.save(State(x=np.array([None])))
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer("x", keep=0)


def test_a_checkpoint_is_skipped_while_another_is_written(
    checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    write = array_files.ArrayFiles.write

    def slow(self, *arguments) -> None:
        goes_on.wait(20)
        write(self, *arguments)

    monkeypatch.setattr(array_files.ArrayFiles, "write", slow)
    state = State(step=1)
    assert checkpointer.save(state)
    state.step = 2
    state.commit()
    assert not checkpointer.save(state)
    goes_on.set()
    checkpointer.wait()
    other = State(step=0)
    assert checkpointer.load(other) == 1 and other.step == 1


def test_elastic_run_loads_and_writes_checkpoints(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = []

    def run(steps: int) -> State:
        checkpointer = Checkpointer(tmp_path, every=2)

        @elastic.run(checkpointer=checkpointer)
        def train(state: State) -> State:
            starts.append(state.step)
            while state.step < steps:
                state.step += 1
                state.commit()
                checkpointer.wait()  # a commit is skipped while another is written
            return state

        return train(State(step=0, x=np.zeros(3)))

    run(5)
    assert Checkpointer(tmp_path).numbers() == [2, 4]
    assert run(7).step == 7
    monkeypatch.setattr(runtime, "rank", lambda: 1)
    run(3)  # only rank 0 reads and writes
    assert starts == [0, 4, 0]
    assert Checkpointer(tmp_path).numbers() == [2, 4, 6]


def test_checkpoints_by_elapsed_seconds(tmp_path) -> None:
    checkpointer = Checkpointer(tmp_path, seconds=3600)
    state = State(step=0)
    checkpointer.attach(state)
    for _ in range(3):
        state.step += 1
        state.commit()
    checkpointer.detach()
    assert checkpointer.numbers() == [1]
    state.commit()
    assert checkpointer.numbers() == [1]


def test_checkpoints_of_pytorch_states(checkpointer: Checkpointer) -> None:
    def made(seed: int) -> hvd.elastic.TorchState:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        sampler = hvd.elastic.ElasticSampler(range(9))
        return hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=seed)

    state = made(4)
    state.sampler.record_batch(0, 2)
    state.commit()
    save(checkpointer, state)
    with torch.no_grad():
        state.model.weight.zero_()  # must not change the commit
    other = made(0)
    assert checkpointer.load(other) == 4
    state.restore()
    torch.testing.assert_close(other.model.weight, state.model.weight)
    mine, theirs = (s.optimizer.state_dict() for s in (state, other))
    torch.testing.assert_close(mine, theirs)
    assert other.sampler.processed_num == 2 and other.step == 4
    file = checkpointer.directory / "4" / "state.pt"
    assert torch.load(file, weights_only=False)["step"] == 4
