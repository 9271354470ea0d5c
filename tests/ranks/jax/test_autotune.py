"""`ringjax.autotune`: trials are steps as others, and all ranks end up alike."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from support.launch import StartJob

import ringjax

# Writes down what it runs with, in each step, and the parameters at the end.
SCRIPT = """
import json, os
import jax, jax.numpy as jnp, optax
import ringjax
from ringjax.tuning import trials

ringjax.init()
tx = optax.chain(ringjax.allreduce_grads(), optax.sgd(0.1))
traced = []

def step(params, state, x):
    traced.append(str(trials.active_setting()))
    grads = jax.grad(lambda p: sum(jnp.sum(w * x) for w in p.values()))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

params = {f"w{i}": jnp.zeros((40, 40)) for i in range(4)}
state = tx.init(params)
tuned = ringjax.autotune(step, donate_argnums=(0, 1))
x = jnp.full((40, 40), float(ringjax.rank() + 1))
for _ in range(int(os.environ["STEPS"])):
    params, state = tuned(params, state, x)
tuned.lower(params, state, x).compile()
found = {
    "sum": float(sum(w.sum() for w in params.values())),
    "traced": traced,
    "setting": str(tuned._tuning.setting),
    "settled": tuned._tuning.settled,
}
print("FOUND", json.dumps(found))
ringjax.shutdown()
"""


TRIED = 5  # settings, on one host
TRIALS = 3 * TRIED  # with one round that does not count, and two that do


def run(
    start_job: StartJob, ranks: int, folder: Path, steps: int, **env: str
) -> list[dict[str, Any]]:
    """Runs a job with autotuning; returns each rank's result."""
    few = {
        "RINGJAX_AUTOTUNE_STEPS_PER_SAMPLE": "2",
        "RINGJAX_AUTOTUNE_WARMUP_SAMPLES": "1",
        "RINGJAX_CACHE_DIR": str(folder / "cache"),
        "RINGJAX_AUTOTUNE_LOG": str(folder / "log.csv"),
        "STEPS": str(steps),
    }
    options = ["--min-np", str(ranks)] if env.pop("elastic", "") else []
    options += ["--report", "60"]
    job = start_job(ranks, SCRIPT, few | env, options)
    assert job.wait(90) == 0, job.logs()
    lines = [job.output(rank).partition("FOUND")[2] for rank in range(ranks)]
    said = "\n  autotune: step: " in job.launcher_output()
    return [json.loads(line.splitlines()[0]) | {"said": said} for line in lines]


def rows(folder: Path) -> list[dict[str, str]]:
    log = folder / "log.csv"
    return list(csv.DictReader(log.read_text().splitlines())) if log.exists() else []


def test_all_ranks_end_up_alike_and_the_next_job_remembers(
    start_job: StartJob, tmp_path: Path
) -> None:
    steps = TRIALS + 2
    found = run(start_job, 3, tmp_path, steps)
    # Every trial was a step: -0.1 x mean(1, 2, 3) in each of 4 x 1600 parameters.
    for one in found:
        assert one["sum"] == pytest.approx(-0.1 * 2.0 * 6400 * steps, rel=1e-5)
        assert one["settled"]
    assert len({one["setting"] for one in found}) == 1 and found[0]["said"]
    assert all(len(one["traced"]) == TRIED for one in found)
    tried = rows(tmp_path)
    assert len(tried) == TRIED
    assert [row["chosen"] for row in tried].count("True") == 1
    assert all(float(row["ms"]) > 0 for row in tried)
    again = run(start_job, 3, tmp_path, 2)
    assert {one["setting"] for one in again} == {found[0]["setting"]}
    assert all(one["settled"] and len(one["traced"]) == 1 for one in again)
    assert again[0]["said"]
    assert len(rows(tmp_path)) == TRIED
    # Other hosts or sizes are another step.
    assert not run(start_job, 2, tmp_path, 2)[0]["settled"]


def test_a_job_that_ends_during_trials_decides_nothing(
    start_job: StartJob, tmp_path: Path
) -> None:
    (first, _) = run(start_job, 2, tmp_path, TRIALS - 1)
    assert not first["settled"] and not first["said"]
    assert rows(tmp_path) == []
    assert not list(tmp_path.glob("cache/tuning-*"))


@pytest.mark.parametrize("env", [{"elastic": "1"}, {}], ids=["elastic", "one rank"])
def test_where_nothing_can_be_tried_the_defaults_hold(
    start_job: StartJob, tmp_path: Path, env: dict[str, str]
) -> None:
    for one in run(start_job, 2 if env else 1, tmp_path, 3, **env):
        assert one["settled"] and len(one["traced"]) == 1
    assert rows(tmp_path) == []


def test_a_log_that_cannot_be_written_ends_no_job(
    start_job: StartJob, tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "no" / "folder.csv")
    for one in run(start_job, 2, tmp_path, TRIALS, RINGJAX_AUTOTUNE_LOG=nowhere):
        assert one["settled"]


def test_a_function_that_is_compiled_already_is_refused() -> None:
    with pytest.raises(TypeError, match="compiled already"):
        ringjax.autotune(jax.jit(lambda x: x))


def test_it_takes_the_options_of_jit() -> None:
    tripled = ringjax.autotune(lambda x, n: x * n, static_argnames="n")
    assert float(tripled(2.0, n=3)) == 6.0
    assert "3.0" in tripled.lower(2.0, n=3).as_text()
