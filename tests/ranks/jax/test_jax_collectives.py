"""JAX's own collectives on ringjax, in programs of jax.distributed without ringjax."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from textwrap import dedent

import pytest
from support.jax_processes import READY, run, run_ok, started

from ringjax.settings import mpi_library

# Processes are started anew, and import JAX, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_of_every_dtype(size: int) -> None:
    lines = """
    kinds = "int8 int16 int32 uint8 uint16 uint32 float32 bfloat16 complex64 bool"
    for kind in kinds.split():
        dtype = jnp.dtype(kind)
        for n in (1, 3001):
            value = (np.arange(size * size * n) % 5).astype(dtype)
            value = value.reshape(size, size * n)
            own = value[rank]
            if kind != "bool":
                got = on(lambda x: lax.psum(x, "p"), value)[0]
                np.testing.assert_array_equal(got, value.sum(0, dtype=dtype))
                got = on(lambda x: lax.psum_scatter(x[0], "p", tiled=True)[None], value)
                expected = value.sum(0, dtype=dtype).reshape(size, n)[rank]
                np.testing.assert_array_equal(got[0], expected)
            if kind not in ("bool", "complex64"):
                got = on(lambda x: lax.pmax(x, "p"), value)[0]
                np.testing.assert_array_equal(got, value.max(0))
            got = on(lambda x: lax.all_gather(x[0], "p")[None], value)[0]
            np.testing.assert_array_equal(got, value)
            ring = [(i, (i + 1) % size) for i in range(size)]
            got = on(lambda x: lax.ppermute(x, "p", ring), value)[0]
            np.testing.assert_array_equal(got, value[(rank - 1) % size])
            got = on(lambda x: lax.ppermute(x, "p", [(0, 1)]), value)[0]
            np.testing.assert_array_equal(got, value[0] if rank == 1 else 0 * own)
            got = on(lambda x: lax.all_to_all(x, "p", 1, 1, tiled=True), value)[0]
            expected = value.reshape(size, size, n)[:, rank].ravel()
            np.testing.assert_array_equal(got, expected)
    """
    run_ok(lines, size)


@pytest.mark.parametrize("check_vma", [False, True])
def test_types_that_xla_refuses_travel_in_wider_ones(check_vma: bool) -> None:
    lines = f"""
    mesh = Mesh(devices, "p")
    def on(function, value):
        f = jax.shard_map(function, mesh=mesh, in_specs=P("p"), out_specs=P("p"),
                          check_vma={check_vma})
        return local(jax.jit(f)(array(value)))[0]
    def check(got, expected, dtype):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, expected.astype(dtype))
    for kind in "float16 float8_e4m3fn float8_e5m2 int4 uint4".split():
        dtype = jnp.dtype(kind)
        wide = np.arange(18).reshape(3, 6) % 7
        value = wide.astype(dtype)
        check(on(lambda x: lax.psum(x, "p"), value), wide.sum(0), dtype)
        check(on(lambda x: lax.pmax(x, "p"), value), wide.max(0), dtype)
        check(on(lambda x: lax.pmin(x, "p"), value), wide.min(0), dtype)
        check(on(lambda x: lax.all_gather(x[0], "p")[None], value), wide, dtype)
        scatter = lambda x: lax.psum_scatter(x[0], "p", tiled=True)[None]
        check(on(scatter, value), wide.sum(0).reshape(3, 2)[rank], dtype)
        swap = lambda x: lax.all_to_all(x, "p", 1, 1, tiled=True)
        check(on(swap, value), wide.reshape(3, 3, 2)[:, rank].ravel(), dtype)
        turn = lambda x: lax.ppermute(x, "p", [(i, (i + 1) % 3) for i in range(3)])
        check(on(turn, value), wide[(rank - 1) % 3], dtype)
    half = np.array([[2048], [1], [1]], np.float16)
    assert on(lambda x: lax.psum(x, "p"), half) == 2050  # in float16: 2048 + 1 = 2048
    add = lambda x: lax.psum(x * x, "p").sum()
    assert on(jax.grad(add), half)[0] == 2 * half[rank] * (1 if {check_vma} else 3)
    assert on(jax.vmap(lambda x: lax.psum(x, "p")), half) == 2050
    def branch(x):
        return lax.cond(x[0, 0] > 0, lambda x: lax.pmean(x, "p"), lambda x: x, x)
    if not {check_vma}:
        half += np.float16(1)  # 2048, 2 and 2
        assert on(branch, half) == np.float16(684)
    """
    run_ok(lines, 3)


def test_groups_of_a_mesh_of_two_dimensions() -> None:
    lines = """
    value = np.arange(4.0, dtype=np.float32).reshape(4, 1)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        chosen = devices[order].reshape(2, 2)
        place = order.index(rank)
        row, column = divmod(place, 2)
        grid = value.reshape(2, 2)
        for axes, expected in (
            ("x", grid[:, column].sum()),
            ("y", grid[row].sum()),
            (("x", "y"), 6.0),
        ):
            spec = P(("x", "y"))
            f = program(lambda x: lax.psum(x, axes), chosen, ("x", "y"), spec)
            got = local(f(array(value, chosen, ("x", "y"), spec)))
            assert got[0, 0] == expected, (order, axes, got)
    # The partitioner's own collectives: a product of sharded matrices, and a sum.
    mesh = Mesh(devices.reshape(2, 2), ("x", "y"))
    a = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    def put(spec):
        return jax.make_array_from_callback(
            a.shape, NamedSharding(mesh, spec), lambda i: a[i])
    result = jax.jit(
        lambda x, y: (x @ y, (x * y).sum()),
        out_shardings=NamedSharding(mesh, P()))(put(P("x", "y")), put(P("y", "x")))
    np.testing.assert_array_equal(local(result[0]), a @ a)
    assert local(result[1]) == (a * a).sum()
    """
    run_ok(lines, 4)


def test_programs_of_some_processes_and_of_one_branch() -> None:
    """Without priming, the sums would meet, or wait for ever."""
    lines = """
    value = np.ones((2, 1), np.float32)
    if rank < 2:
        assert on(lambda x: lax.psum(x, "p"), value, devices[:2])[0, 0] == 2
    def branch(x):
        return lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "p"), lambda x: x, x)
    three = np.ones((3, 1), np.float32)
    assert on(branch, three)[0, 0] == 3
    assert on(branch, -three)[0, 0] == -1
    if rank > 0:
        assert on(lambda x: lax.psum(x, "p"), value, devices[1:])[0, 0] == 2
    """
    run_ok(lines, 3)


def test_the_helpers_of_jax_and_of_orbax() -> None:
    lines = """
    from jax.experimental import multihost_utils
    multihost_utils.sync_global_devices("begin")
    got = multihost_utils.process_allgather(np.array([rank, 10]))
    np.testing.assert_array_equal(got, [[0, 10], [1, 10]])
    assert multihost_utils.broadcast_one_to_all(np.float32(rank + 5)) == 5
    """
    run_ok(lines, 2)


def test_gloo_computes_where_a_process_refuses() -> None:
    lines = 'print(on(lambda x: lax.psum(x, "p"), np.ones((2, 1), np.float32))[0])'
    without = {mpi_library.VARIABLE: ""}
    (first, first_errors), (second, second_errors) = run(lines, 2, {}, without)
    assert first.endswith("[2.]\n") and second.endswith("[2.]\n")
    assert (
        "[ringjax] JAX's collectives use Gloo, not ringjax: process 1: jaxlib has not "
        "loaded "
    ) in first_errors
    assert "[ringjax]" not in second_errors


def test_nothing_happens_without_the_switch() -> None:
    lines = """
    assert on(lambda x: lax.psum(x, "p"), np.ones((2, 1), np.float32))[0, 0] == 2
    assert "ringjax._native" not in sys.modules
    """
    off = {mpi_library.SWITCH: "0"}
    run(lines, 2, off, off)


def test_processes_that_disagree_get_one_error_and_go_on() -> None:
    lines = """
    shapes = (2, 10 + 2 * rank)
    text = error_of(lambda: on(lambda x: lax.psum(x, "p"), np.ones(shapes, np.float32)))
    print(re.search("ranks disagree.*", text)[0])
    assert on(lambda x: lax.psum(x, "p"), np.ones((2, 3), np.float32))[0, 0] == 2
    """
    (first, _), (second, _) = run(lines, 2)
    assert first == second
    assert "rank 0 sent f32[10]" in first and "rank 1 sent f32[12]" in first


def test_a_process_that_does_not_compile_is_named() -> None:
    lines = """
    if rank == 0:
        text = error_of(
            lambda: on(lambda x: lax.psum(x, "p"), np.ones((2, 1), np.float32)))
        print(text)
        store.key_value_set("tried", "")
    store.blocking_key_value_get("tried", 50_000)
    """
    short = {"RINGJAX_START_TIMEOUT": "4"}
    (text, _), _ = run(lines, 2, short, short)
    assert "communicates between processes 0, 1: compiling it is collective" in text
    assert "could not be connected with rank 1" in text


THREADS = """
def in_thread(function, *arguments):
    outcome = []
    thread = threading.Thread(
        target=lambda: outcome.append(error_of(lambda: function(*arguments))))
    thread.start(), thread.join()
    return outcome[0]

f = program(lambda x: lax.psum(x, "p"))
g = program(lambda x: lax.pmax(x, "p"))
x = array(np.ones((2, 4), np.float32))
"""


def test_guards_of_the_program_do_not_apply_to_priming() -> None:
    lines = """
    jax.config.update("jax_transfer_guard", "disallow_explicit")
    with jax.thread_guard(True):
        result = f(x)
        assert jax.config.jax_thread_guard
        text = in_thread(g, x)
        assert "thread guard was set in thread MainThread" in text, text
    jax.config.update("jax_transfer_guard", "allow")
    assert local(result)[0, 0] == 2
    """
    run_ok(THREADS + dedent(lines), 2)


def test_a_second_thread_runs_no_programs_of_several_processes() -> None:
    lines = """
    assert local(f(x))[0, 0] == 2
    text = in_thread(f, x)
    assert "A multi-process JAX operation was called" in text, text
    text = in_thread(g, x)
    assert "a thread guard was set in thread MainThread, which runs such" in text, text
    assert "or set JAX_THREAD_GUARD=0" in text, text
    assert in_thread(lambda: jnp.ones(3) + 1) == "no error"
    assert local(f(x))[0, 0] == 2
    """
    run_ok(THREADS + dedent(lines), 2)


def test_a_thread_takes_over_from_one_that_has_ended() -> None:
    lines = """
    for function in (f, g):
        text = in_thread(function, x)
        assert text == "no error", text
    """
    run_ok(THREADS + dedent(lines), 2)


def test_the_user_may_order_the_threads() -> None:
    off = {"JAX_THREAD_GUARD": "0"}
    lines = """
    assert local(f(x))[0, 0] == 2
    assert in_thread(f, x) == in_thread(g, x) == "no error"
    """
    run_ok(THREADS + dedent(lines), 2, off, off)


@pytest.mark.parametrize("moment", ["_prime", "_run"], ids=["before", "in"])
def test_a_process_that_is_killed_while_groups_connect_is_named(moment: str) -> None:
    lines = f"""
    from ringjax.xla import priming

    local(jnp.ones(1))
    store.wait_at_barrier("ready", 50_000)
    if rank == 1:
        priming.Priming.{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    x = array(np.ones((size, 1), np.float32))
    print(error_of(lambda: program(lambda x: lax.psum(x, "p"))(x)), flush=True)
    leave()
    """
    with started(lines, 3) as processes:
        for index in (0, 2):
            text = processes[index].communicate(timeout=50)[0]
            assert text.count("processes 0, 1, 2") == 1 and "rank 1 " in text, text


LOSS = """
if rank == 1:
    {how}
text = error_of(lambda: [local(f(x)) for _ in range(10**9)])
print(text.splitlines()[0], flush=True)
text = error_of(lambda: local(g(x)))
print(text.splitlines()[0], flush=True)
leave()
"""


def survivors_of(how: str, size: int, *variables: dict[str, str]) -> Sequence[str]:
    """Returns what the processes other than 1 printed after process 1 was lost."""
    with started(READY + LOSS.format(how=how), size, *variables) as processes:
        texts = [
            p.communicate(timeout=100)[0] for i, p in enumerate(processes) if i != 1
        ]
    assert all(text.startswith("ready\n") for text in texts)
    return texts


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 closed its connection"),
        ("os._exit(3)", "rank 1 closed its connection"),
        ("raise ValueError", "rank 1 "),
    ],
    ids=["killed", "exits", "raises"],
)
def test_all_others_name_a_lost_process(how: str, reason: str) -> None:
    for text in survivors_of(how, 3):
        first, second = text.splitlines()[1:]
        assert reason in first and "psum" in first, text
        assert reason in second, text


def test_all_others_name_a_stopped_process() -> None:
    how = "os.kill(os.getpid(), signal.SIGSTOP)"
    more = {"RINGJAX_FAILURE_TIMEOUT": "2", "RINGJAX_HEARTBEAT": "0.2"}
    with started(READY + LOSS.format(how=how), 3, more, more, more) as processes:
        texts = [processes[i].communicate(timeout=100)[0] for i in (0, 2)]
        processes[1].send_signal(signal.SIGCONT)
    for text in texts:
        assert "rank 1 has been silent" in text
