"""Tests that each HOROVOD_* variable is used, ignored, or reported, without errors."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from support.launch import ROOT, environment

from ringjax import config
from ringjax.config import Config
from ringjax.settings import horovod_variables

# All variables that Horovod 0.28.1 reads at run time and at build time.
KNOWN = """
RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE HOSTNAME GLOO_RENDEZVOUS_ADDR
GLOO_RENDEZVOUS_PORT GLOO_IFACE GLOO_TIMEOUT_SECONDS CONTROLLER CPU_OPERATIONS
FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER
TORUS_ALLREDUCE DISABLE_GROUP_FUSION BATCH_D2D_MEMCOPIES NUM_NCCL_STREAMS
ENABLE_ASYNC_COMPLETION ENABLE_XLA_OPS DYNAMIC_PROCESS_SETS ELASTIC TIMELINE
TIMELINE_MARK_CYCLES AUTOTUNE AUTOTUNE_LOG AUTOTUNE_WARMUP_SAMPLES
AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_BAYES_OPT_MAX_SAMPLES
AUTOTUNE_GAUSSIAN_PROCESS_NOISE STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS
STALL_SHUTDOWN_TIME_SECONDS THREAD_AFFINITY MPI_THREADS_DISABLE ADASUM_MPI_CHUNK_SIZE
CCL_CACHE DISABLE_NVTX_RANGES LOG_LEVEL LOG_HIDE_TIME START_TIMEOUT ELASTIC_TIMEOUT
SPARK_START_TIMEOUT SPARK_WORK_DIR SPARK_PYTHONPATH SPARK_USE_LOCAL_RANK_GPU_INDEX
WITH_TENSORFLOW WITH_PYTORCH WITH_MXNET WITH_MPI WITH_GLOO WITH_NVTX WITHOUT_TENSORFLOW
WITHOUT_PYTORCH WITHOUT_MXNET WITHOUT_MPI WITHOUT_GLOO WITHOUT_NVTX GPU_OPERATIONS
GPU_ALLREDUCE GPU_ALLGATHER GPU_BROADCAST GPU_ALLTOALL GPU_REDUCESCATTER
ALLOW_MIXED_GPU_IMPL GPU CUDA_HOME NCCL_HOME NCCL_INCLUDE NCCL_LIB NCCL_LINK ROCM_HOME
NVTX_INCLUDE BUILD_ARCH_FLAGS BUILD_CUDA_CC_LIST CMAKE DEBUG SKIP_COMPILE LOCAL_VERSION
TEST_GPU MIXED_INSTALL
"""
VARIABLES = {f"HOROVOD_{name}" for name in KNOWN.split()}


def test_every_variable_has_one_category() -> None:
    honoured = horovod_variables.honoured().keys()
    without = horovod_variables.WITHOUT_EFFECT.keys()
    assert honoured | without == VARIABLES
    assert not honoured & without


def test_honored_variables_change_a_setting() -> None:
    values = {
        "HOROVOD_HOSTNAME": "one",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_LOG_LEVEL": "ERROR",
    }
    place = {"RINGJAX_RANK": "0", "RINGJAX_SIZE": "4"}
    for name, ours in horovod_variables.honoured().items():
        fields = {variable.removeprefix("RINGJAX_").lower() for variable in ours}
        if name in ("HOROVOD_RANK", "HOROVOD_SIZE"):
            continue  # has an effect only together with other variables
        before = Config.from_env(place)
        after = Config.from_env({**place, name: values.get(name, "1")})
        changed = {f for f in vars(before) if getattr(before, f) != getattr(after, f)}
        assert changed == fields, name
    both = Config.from_env({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "3"})
    assert (both.rank, both.size) == (1, 3)


@pytest.mark.parametrize(
    ("environ", "warning", "timeout"),
    [
        ({}, 10.0, 60.0),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, 0.0, 0.0),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, 10.0, 60.0),
        (
            {
                "HOROVOD_STALL_CHECK_DISABLE": "1",
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
                "RINGJAX_COLLECTIVE_TIMEOUT": "9",
            },
            0.0,
            9.0,
        ),
        (
            {
                "HOROVOD_STALL_CHECK_DISABLE": "0",
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "70",
            },
            7.0,
            70.0,
        ),
    ],
)
def test_stall_check(environ: dict[str, str], warning: float, timeout: float) -> None:
    settings = Config.from_env(environ)
    assert settings.stall_warning == warning
    assert settings.collective_timeout == timeout


def test_variables_that_are_set() -> None:
    environ = {"HOROVOD_B": "1", "HOROVOD_A": "x", "HOROVOD_C": " ", "OTHER": "1"}
    assert config.horovod_names(environ) == ["HOROVOD_A", "HOROVOD_B"]


def test_notes_explain_ignored_variables() -> None:
    given = ["HOROVOD_CPU_OPERATIONS", "HOROVOD_FUSION_THRESHOLD", "HOROVOD_NONSENSE"]
    chosen, unknown = horovod_variables.notes(given)
    assert chosen.startswith("HOROVOD_CPU_OPERATIONS has no effect: the transports")
    assert unknown == "HOROVOD_NONSENSE has no effect: ringjax does not know it"


SCRIPT = """
import os
import ringjax
os.environ["HOROVOD_LOG_LEVEL"] = "info"  # read by init, not by the import
os.environ["HOROVOD_NONSENSE"] = "1"
os.environ["HOROVOD_CYCLE_TIME"] = "0"
ringjax.init()
"""


def test_init_reads_variables_and_reports_ignored_ones() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        env=environment("horovod", {}),
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    line = "info: HOROVOD_NONSENSE has no effect: ringjax does not know it"
    assert done.stderr.count(line) == 1
    assert "HOROVOD_CYCLE_TIME has no effect" not in done.stderr


def test_the_guide_contains_the_table() -> None:
    guide = (ROOT / "docs" / "reference" / "horovod.md").read_text()
    assert horovod_variables.table() in guide


def test_the_guide_lists_every_launcher_option() -> None:
    from ringjax.run.options import build_parser

    guide = (ROOT / "docs" / "reference" / "horovod.md").read_text()
    named = set(re.findall(r"`(--?[a-zA-Z][a-z-]*)`", guide))
    parser = build_parser("")
    known = {flag for action in parser._actions for flag in action.option_strings}
    assert named == known
