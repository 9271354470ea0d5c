"""Every Python block of README and docs/ runs unchanged, on two ranks.

test_recipes.py runs the pages of recipes, and tests/engines/ runs programs that need an
engine, and tests/with_mxnet/ the page about MXNet. Each page is one job. Its blocks run
one after the other, and each block starts with an empty namespace. BEFORE has code that
runs before a block, for example a step or a model that the block expects from its
reader. AFTER has code that checks the results.
"""

from __future__ import annotations

import re
from textwrap import dedent

import pytest
from support.documents import RECIPES
from support.launch import ROOT, StartJob

ON_ENGINES = {f"docs/run/{engine}.md" for engine in ("launchers", "ray", "spark")}
ON_ENGINES |= {"docs/train/lightning.md"}  # tests/lightning_ranks/test_jobs.py
ON_ENGINES |= {"docs/train/mxnet.md"}
PAGES = {
    path.relative_to(ROOT).as_posix(): re.findall(
        r"(?ms)^```python\n(.*?)^```", path.read_text()
    )
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
for page in RECIPES | ON_ENGINES:
    del PAGES[page]
PAGES = {page: blocks for page, blocks in PAGES.items() if blocks}

# Both have the page and the number of the block as key.
BEFORE = {
    ("docs/reference/api/tensorflow.md", 1): """
        import threading
        from ringjax.tensorflow.data.compute_worker import main

        job = threading.Thread(target=main, args=(1, "compute", "compute.json", 30))
        job.start()
    """,
    ("docs/operate/sharp-bits-training.md", 0): """
        import jax.numpy as jnp
        import optax
        import ringjax

        ringjax.init()
        sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
        tx = optax.chain(ringjax.allreduce_grads(), sgd)
        state = ringjax.elastic.State(opt_state=tx.init(jnp.zeros(4)))
    """,
    ("docs/operate/sharp-bits.md", 0): """
        import jax.numpy as jnp
        import ringjax

        ringjax.init()
        params, state, batch = jnp.ones(3), jnp.zeros(3), jnp.ones(3)

        def step(params, state, batch):
            loss = ringjax.allreduce(jnp.sum(params * batch))
            return params, state, loss
    """,
}
AFTER = {
    (
        "docs/start/first-program.md",
        0,
    ): "assert loss < 1e-2 and np.allclose(params, np.arange(8), atol=0.1)",
    ("docs/reference/api/jax.md", 1): """
        assert (float(least[0]), float(product[0])) == (1, 2)
        assert np.allclose(combined, 1.5)
        assert np.allclose([first[0], second[0]], [2, 20])
        assert np.allclose(part, 3) and sorted(map(float, swapped)) == [1, 1, 2, 2]
    """,
    ("docs/reference/api/torch.md", 0): """
        assert all(r is not None for r in results) and x[0] == 1.5 and len(parts) == 2
    """,
    ("docs/reference/api/tensorflow.md", 0): """
        assert [int(n) for n in numbers()] == [hvd.rank(), 2, hvd.local_rank(), 2, 1]
        assert variable.numpy() == 0 and parts[0].numpy().tolist() == [2, 2]
    """,
    ("docs/reference/api/tensorflow.md", 1): """
        assert seen == 128
        hvd.broadcast_object(0)
        if hvd.rank() == 0:
            config.compute_client().shutdown()
        job.join(30)
        assert not job.is_alive()
    """,
    ("docs/train/jax.md", 0): "assert float(loss) > 0",
    ("docs/train/tuning.md", 0): "assert float(params.sum()) < 8",
    (
        "docs/train/tuning.md",
        1,
    ): "assert np.allclose(mean['w'], (1 + ringjax.size()) / 2)",
    ("docs/train/metrics.md", 0): "assert found == {'mean': 3.0}",
    ("docs/operate/elastic.md", 0): "assert state.step == 12",
    ("docs/operate/sharp-bits-training.md", 0): """
        state.on_reset()
        rate = state.opt_state[1].hyperparams["learning_rate"]
        assert np.isclose(rate, 0.025 * ringjax.size())
    """,
    ("docs/operate/profiling.md", 0): """
        import os

        assert ringjax.rank() > 0 or os.path.exists(folder + "/profile.tar")
    """,
    ("docs/operate/timeline.md", 0): """
        import json, pathlib

        if ringjax.rank() == 0:
            assert json.loads(pathlib.Path("timeline.json").read_text())
    """,
    ("docs/operate/sharp-bits.md", 0): "assert float(loss) == 3",
    ("docs/train/several-devices.md", 0): """
        assert len(params["w"].sharding.device_set) == 4
        assert np.allclose(ringjax.allreduce(params["w"]), params["w"])
    """,
}


def _program(page: str) -> str:
    """Returns a program that runs each block of a page in a new namespace."""
    parts = ["import numpy as np"]
    for number, block in enumerate(PAGES[page]):
        key = (page, number)
        text = dedent(BEFORE.get(key, "")) + block
        text += "\nimport numpy as np\n" + dedent(AFTER.get(key, ""))
        parts.append(
            f"exec(compile({text!r}, 'block {number} of {page}', 'exec'), {{}})"
        )
    return "\n".join(parts)


def test_every_prelude_belongs_to_a_block() -> None:
    keys = {(page, n) for page, blocks in PAGES.items() for n in range(len(blocks))}
    assert BEFORE.keys() | AFTER.keys() <= keys
    assert len(keys) > 10


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(
    page: str, start_job: StartJob, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.chdir(str(tmp_path))  # for the files that blocks write
    if "torch" in page:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    env = {"KERAS_BACKEND": "jax"}
    options = ["--jax-collectives"] if page.endswith("jax-collectives.md") else []
    job = start_job(2, _program(page), env=env, options=options)
    assert job.wait(55) == 0, job.logs()
