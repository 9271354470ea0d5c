"""Installs the built wheel away from the checkout and runs two ranks with it.

    python wheel_outside.py FOLDER_WITH_THE_WHEEL NEW_FOLDER

`make wheel` runs this program. It is no pytest module, because building the wheel takes
a minute. ringjax must come from the wheel. Its dependencies come from the environment
of the Python that runs this program.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

SCRIPT = """
import os
import jax.numpy as jnp, numpy as np
import ringjax

outside = os.path.realpath(os.environ["OUTSIDE"])
assert os.path.realpath(ringjax.__file__).startswith(outside), ringjax.__file__
ringjax.init()
assert ringjax.size() == 2
total = ringjax.allreduce(jnp.full(5, ringjax.rank() + 1.0), op=ringjax.Sum)
np.testing.assert_array_equal(total, np.full(5, 3.0))
cuda = ringjax._native.cuda_info()
print("rank", ringjax.rank(), "fine; code for CUDA devices:", cuda["device_code"])
assert bool(cuda["images"]) == (cuda["device_code"] != "none"), cuda
"""

EXPECTED = {"ringjax/py.typed", "ringjax/_native.pyi", "ringjax/run/__main__.py"}


def check_libraries(site: Path) -> None:
    """Nothing of CUDA may be needed to load the extension."""
    (extension,) = site.glob("ringjax/_native*.so")
    dynamic = subprocess.check_output(["readelf", "--dynamic", extension], text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    assert any(name.startswith("libc.so") for name in needed), needed
    forbidden = [n for n in needed if re.match(r"lib(cu|nccl|nv)", n)]
    assert not forbidden, f"{extension.name} is linked to {forbidden}"


def main(dist: Path, outside: Path) -> None:
    """Makes an environment in `outside`, installs the wheel there, runs the script."""
    (wheel,) = dist.glob("ringjax-*.whl")
    venv.create(outside, symlinks=True)
    python = outside / "bin" / "python"
    site = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"],
        text=True,
    ).strip()
    # A path in a .pth file makes the packages there importable, but runs none of the
    # .pth files there: an editable install of ringjax stays out.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("platlib") + "\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    install = ["--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run([*pip, *install], check=True)
    missing = [name for name in EXPECTED if not Path(site, name).exists()]
    assert not missing, f"the wheel lacks {missing}"
    check_libraries(Path(site))
    script = outside / "two_ranks.py"
    script.write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(
        [outside / "bin" / "ringrun", "-np", "2", python, script],
        env={**env, "OUTSIDE": str(outside), "JAX_PLATFORMS": "cpu"},
        cwd=outside,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=True,
    )
    print(f"{wheel.name} works outside the checkout")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
