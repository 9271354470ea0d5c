"""`ringjax.autotune`: trials are training steps, and all ranks choose one setting."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from support.launch import StartJob

import ringjax

# Records the setting of each compilation, and prints it with the final parameters.
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


SETTINGS = 5  # the number of settings that are tried on one host
# Every setting is tried in three rounds: one for warm-up, and two that count.
TRIAL_STEPS = 3 * SETTINGS


def run(
    start_job: StartJob, ranks: int, folder: Path, steps: int, **env: str
) -> list[dict[str, Any]]:
    """Runs a job with autotuning; returns the result of each rank."""
    variables = {
        "RINGJAX_AUTOTUNE_STEPS_PER_SAMPLE": "2",
        "RINGJAX_AUTOTUNE_WARMUP_SAMPLES": "1",
        "RINGJAX_CACHE_DIR": str(folder / "cache"),
        "RINGJAX_AUTOTUNE_LOG": str(folder / "log.csv"),
        "STEPS": str(steps),
    }
    options = ["--min-np", str(ranks)] if env.pop("elastic", "") else []
    options += ["--report", "60"]
    job = start_job(ranks, SCRIPT, variables | env, options)
    assert job.wait(90) == 0, job.logs()
    lines = [job.output(rank).partition("FOUND")[2] for rank in range(ranks)]
    reported = "\n  autotune: step: " in job.launcher_output()
    return [json.loads(line.splitlines()[0]) | {"reported": reported} for line in lines]


def rows(folder: Path) -> list[dict[str, str]]:
    log = folder / "log.csv"
    return list(csv.DictReader(log.read_text().splitlines())) if log.exists() else []


def test_all_ranks_choose_equally_and_the_next_job_reuses_the_choice(
    start_job: StartJob, tmp_path: Path
) -> None:
    steps = TRIAL_STEPS + 2
    found = run(start_job, 3, tmp_path, steps)
    # Every trial was a training step, which adds -0.1 * mean(1, 2, 3) to each of
    # 4 * 1600 parameters.
    for one in found:
        assert one["sum"] == pytest.approx(-0.1 * 2.0 * 6400 * steps, rel=1e-5)
        assert one["settled"]
    assert len({one["setting"] for one in found}) == 1 and found[0]["reported"]
    assert all(len(one["traced"]) == SETTINGS for one in found)
    tried = rows(tmp_path)
    assert len(tried) == SETTINGS
    assert [row["chosen"] for row in tried].count("True") == 1
    assert all(float(row["ms"]) > 0 for row in tried)
    again = run(start_job, 3, tmp_path, 2)
    assert {one["setting"] for one in again} == {found[0]["setting"]}
    assert all(one["settled"] and len(one["traced"]) == 1 for one in again)
    assert again[0]["reported"]
    assert len(rows(tmp_path)) == SETTINGS
    # A choice is valid only for the same hosts and the same number of ranks.
    assert not run(start_job, 2, tmp_path, 2)[0]["settled"]


def test_a_job_that_ends_during_trials_decides_nothing(
    start_job: StartJob, tmp_path: Path
) -> None:
    (first, _) = run(start_job, 2, tmp_path, TRIAL_STEPS - 1)
    assert not first["settled"] and not first["reported"]
    assert rows(tmp_path) == []
    assert not list(tmp_path.glob("cache/tuning-*"))


@pytest.mark.parametrize("env", [{"elastic": "1"}, {}], ids=["elastic", "one rank"])
def test_the_defaults_remain_if_nothing_can_be_tried(
    start_job: StartJob, tmp_path: Path, env: dict[str, str]
) -> None:
    for one in run(start_job, 2 if env else 1, tmp_path, 3, **env):
        assert one["settled"] and len(one["traced"]) == 1
    assert rows(tmp_path) == []


def test_a_log_that_cannot_be_written_does_not_fail_the_job(
    start_job: StartJob, tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "no" / "folder.csv")
    for one in run(start_job, 2, tmp_path, TRIAL_STEPS, RINGJAX_AUTOTUNE_LOG=nowhere):
        assert one["settled"]


def test_a_function_that_is_compiled_already_is_refused() -> None:
    with pytest.raises(TypeError, match="compiled already"):
        ringjax.autotune(jax.jit(lambda x: x))


def test_autotune_accepts_the_options_of_jit() -> None:
    tripled = ringjax.autotune(lambda x, n: x * n, static_argnames="n")
    assert float(tripled(2.0, n=3)) == 6.0
    assert "3.0" in tripled.lower(2.0, n=3).as_text()
