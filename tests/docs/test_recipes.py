"""Every program of the pages of recipes runs unchanged and has the promised results.

The tests append lines to each program that check its variables and files. Each program
runs in its own processes, because one of the programs imports TensorFlow.
"""

from __future__ import annotations

import re
from textwrap import dedent

import pytest
from support.documents import RECIPES as PAGES
from support.launch import ROOT, StartJob

RECIPES = {
    f"{page} {heading}": program
    for page in sorted(PAGES)
    for heading, program in re.findall(
        r"(?ms)^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```",
        (ROOT / page).read_text(),
    )
}

# Checks that a tree has equal values on all ranks.
CHECK_EQUAL = """
import numpy as np
import jax

def check_equal(tree):
    for leaf in jax.tree.leaves(tree):
        every = np.asarray(ringjax.allgather(np.asarray(leaf)[None]))
        np.testing.assert_array_equal(every, np.broadcast_to(every[0], every.shape))
"""
CHECKS = {
    "docs/train/checkpoints.md Pickle": """
        assert first == 0 and found["loss"] < 2e-3
        check_equal((params, state))
        ended = params
        every = np.asarray(ringjax.allgather(np.asarray(mine)))
        assert sorted(every) == list(range(256))
        AGAIN
        assert first == 6
        np.testing.assert_array_equal(params, ended)
    """,
    "docs/train/batch-norm.md Batch statistics": """
        check_equal((params, stats))
        assert np.abs(jax.tree.leaves(stats)[0]).max() > 0
    """,
    # Compares with one step on the examples of all ranks, without ringjax.
    "docs/train/batch-norm.md Batch normalisation over all ranks": """
        check_equal((params, stats))

        class Alone(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Dense(8)(x)
                x = nn.BatchNorm(use_running_average=False, name="SyncBatchNorm_0")(x)
                return nn.Dense(1)(nn.relu(x))

        start = variables["params"]

        def loss_of(params):
            given = {"params": params, "batch_stats": variables["batch_stats"]}
            out, _ = Alone().apply(given, batch, mutable="batch_stats")
            return jnp.mean((out - batch.sum(1, keepdims=True)) ** 2)

        for mine, was, grad in zip(
            *map(jax.tree.leaves, (params, start, jax.grad(loss_of)(start)))
        ):
            np.testing.assert_allclose(mine, was - 0.1 * grad, atol=1e-4)
    """,
    "docs/train/models.md Dropout and other noise": """
        check_equal(params)
        keys = np.asarray(ringjax.allgather(jax.random.key_data(noise)[None]))
        assert len({tuple(row) for row in keys.tolist()}) == ringjax.size()
    """,
    "docs/train/models.md flax nnx": """
        check_equal(nnx.state(model, nnx.Param, nnx.BatchStat))
    """,
    "docs/train/models.md equinox": """
        arrays = eqx.filter(model, eqx.is_array)
        check_equal(arrays)
        assert len(jax.tree.leaves(arrays)) == 6 and model.activation is not None
    """,
    "docs/train/checkpoints.md Orbax": """
        check_equal((params, state))
        if ringjax.rank() == 0:
            assert sorted(int(p.name) for p in Path("checkpoints").iterdir()) == [2, 3]
    """,
    # Compares with a loop over the rows of all ranks, without ringjax.
    "docs/train/data.md Uneven data": """
        check_equal(params)
        assert step._cache_size() == 1
        rows = np.random.default_rng(0).normal(size=(40, 4)).astype("f4")
        alone = np.zeros((4, 1))
        for start in [0, 8, 16, 24] * 3:
            now = rows[[*range(start, min(start + 8, 30)),
                        *range(30 + start, min(38 + start, 40))]]
            error = now @ alone - now.sum(1, keepdims=True)
            alone -= 0.1 * 2 * now.T @ error / len(now)
        np.testing.assert_allclose(params, alone, atol=1e-5)
    """,
    "docs/migrate/from-keras-2.md A complete script": """
        import ringjax
        from pathlib import Path

        for weight in model.get_weights():
            every = hvd.allgather(weight[None])
            np.testing.assert_array_equal(every[0], every[-1])
        assert hvd.rank() or Path("checkpoint-2.keras").exists()
    """,
}


def test_every_recipe_is_tested() -> None:
    assert RECIPES.keys() == CHECKS.keys()
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    assert len(RECIPES) == pages.count("```python\n")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(
    name: str, start_job: StartJob, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    if "equinox" in name:
        pytest.importorskip("equinox", reason="equinox is not installed")
    monkeypatch.chdir(str(tmp_path))  # for the files that programs write
    helpers = "" if "tensorflow" in RECIPES[name] else CHECK_EQUAL
    check = dedent(CHECKS[name]).replace("AGAIN\n", RECIPES[name])
    program = RECIPES[name] + helpers + check
    job = start_job(2, program, env={"KERAS_BACKEND": "tensorflow"})
    assert job.wait(55) == 0, job.logs()
