"""JAX's collectives on ringjax in processes that have several devices each."""

from __future__ import annotations

import signal
from textwrap import dedent

import pytest
from support.jax_processes import READY, devices, run, run_ok, started

# Processes are started anew, and import JAX, which takes long on a busy machine.
pytestmark = pytest.mark.timeout(240)

# Each process prints a line for each of its devices and each result: together they are
# the lines of one process with all devices, which computes without ringjax.
COMPARED = """
import zlib
count = len(devices)

def show(name, result):
    for shard in result.addressable_shards:
        data, place = np.asarray(shard.data), list(devices).index(shard.device)
        print(name, place, data.shape, zlib.crc32(data.tobytes()))

def numbers(shape, dtype):
    # Sums of such numbers are exact in any order.
    value = np.arange(np.prod(shape)).reshape(shape) * 7 % 5 - 1
    return (value * (1 + 2j) if dtype == "complex64" else value).astype(dtype)
"""
EVERY_OPERATION = """
def every(axis, size, dtype):
    ring = [(i, (i + 1) % size) for i in range(size)]
    def operations(x):
        row = x[0]
        moved = [
            lax.all_gather(row, axis)[None],
            lax.ppermute(x, axis, ring),
            lax.ppermute(x, axis, [(size - 1, 0)]),
            lax.all_to_all(x, axis, 1, 1, tiled=True),
        ]
        if dtype != "bool":
            moved += [lax.psum(x, axis), lax.psum_scatter(row, axis, tiled=True)[None]]
        if dtype not in ("bool", "complex64"):
            moved += [lax.pmax(x, axis), lax.pmin(x, axis)]
        return moved
    return operations

orders = [np.arange(count), np.arange(count).reshape(2, -1).T.ravel()[::-1]]
for order in orders:
    for shape in dict.fromkeys([(2, count // 2), (count // 2, 2)]):
        chosen, names, spec = devices[order].reshape(shape), ("x", "y"), P(("x", "y"))
        for axis, size in (("x", shape[0]), ("y", shape[1]), (names, count)):
            for n, dtype in KINDS:
                value = numbers((count, count * n), dtype)
                f = program(every(axis, size, dtype), chosen, names, spec)
                name = f"{order.tolist()} {shape} {axis} {n} {dtype}"
                results = f(array(value, chosen, names, spec))
                for i, result in enumerate(results):
                    show(f"{name} {i}", result)
"""


def compare(lines: str, size: int, each: int) -> None:
    """Compares processes with `each` devices with one process that has all of them."""
    lines = COMPARED + dedent(lines)
    found = run(lines, size, *[devices(each)] * size)
    ((expected, _),) = run(lines, 1, devices(size * each))
    assert [errors for _, errors in found] == [""] * size
    printed = "".join(out for out, _ in found).splitlines()
    assert len(printed) == len(set(printed)) > 0
    assert sorted(printed) == sorted(expected.splitlines())


@pytest.mark.parametrize(("size", "each"), [(2, 2), (2, 4), (3, 2)])
def test_every_collective_on_meshes_along_and_across_processes(
    size: int, each: int
) -> None:
    kinds = '[(700, "bfloat16"), (3, "complex64")]'
    compare(EVERY_OPERATION.replace("KINDS", kinds), size, each)


def test_every_dtype() -> None:
    kinds = "int8 int16 int32 uint8 uint16 uint32 bool"
    lines = f"[(5, kind) for kind in {kinds!r}.split()]"
    once = EVERY_OPERATION.replace("[np.arange(count), ", "[").replace("KINDS", lines)
    compare(once, 2, 2)


def test_long_arrays() -> None:
    """Their data move through shared memory in parts, and by links."""
    lines = """
    value = numbers((count, count * 300_000), "float32")
    show("sum", program(lambda x: lax.psum(x, "p"))(array(value)))
    gather = program(lambda x: lax.all_gather(x[0], "p", tiled=True)[None])
    show("gathered", gather(array(value)))
    show("moved", program(lambda x: lax.ppermute(
        x, "p", [(i, (i + 3) % count) for i in range(count)]))(array(value)))
    show("all", program(lambda x: lax.all_to_all(x, "p", 1, 1, tiled=True))(
        array(value)))
    """
    compare(lines, 2, 2)


def test_collectives_of_the_partitioner_of_branches_and_of_some_devices() -> None:
    lines = """
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]):
        mesh = Mesh(devices[order].reshape(2, 2), ("x", "y"))
        a = numbers((8, 8), "float32")
        def put(spec):
            return jax.make_array_from_callback(
                a.shape, NamedSharding(mesh, spec), lambda i: a[i])
        f = jax.jit(lambda x, y: (x @ y, (x * y).sum(), x.T), out_shardings=(
            NamedSharding(mesh, P("y")), NamedSharding(mesh, P()),
            NamedSharding(mesh, P("x", "y"))))
        for i, result in enumerate(f(put(P("x", "y")), put(P("y", "x")))):
            show(f"{order} {i}", result)
    def branch(x):
        return lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "p"), lambda x: x, x)
    value = np.ones((count, 2), np.float32)
    for sign in (1, -1):
        show(f"branch {sign}", program(branch)(array(sign * value)))
    # Devices of one process, one device of each process, and a process with one device.
    for some in ([0, 1], [2, 3], [3, 1], [1, 2, 3]):
        chosen = devices[some]
        if any(d.process_index == jax.process_index() for d in chosen):
            f = program(lambda x: lax.psum(x, "p"), chosen)
            show(f"some {some}", f(array(numbers((len(some), 3), "float32"), chosen)))
    """
    compare(lines, 2, 2)


def test_processes_with_different_numbers_of_devices() -> None:
    lines = """
    value = np.arange(6.0, dtype=np.float32).reshape(6, 1)
    assert (on(lambda x: lax.psum(x, "p"), value) == 15).all()
    f = program(lambda x: lax.ppermute(x, "p", [(i, (i + 1) % 6) for i in range(6)]))
    for shard in f(array(value)).addressable_shards:
        place = list(devices).index(shard.device)
        assert np.asarray(shard.data)[0, 0] == (place - 1) % 6
    """
    run_ok(lines, 3, devices(1), devices(3), devices(2))


def test_programs_of_two_threads_on_devices_of_their_own() -> None:
    """Two threads dispatch at the same time: neither waits for the other for ever."""
    lines = """
    def work(chosen, moves):
        f = program(lambda x: lax.psum(lax.ppermute(x, "p", moves), "p"), chosen)
        x = array(np.ones((2, 1000), np.float32), chosen)
        for _ in range(200):
            assert (local(f(x)) == 2).all()
        done.append(1)
    done, swap = [], [(0, 1), (1, 0)]
    for pairs in ([[0, 2], [1, 3]], [[0, 3], [1, 2]]):
        groups = [devices[pair] for pair in pairs]
        for group in groups:  # compiling is collective
            work(group, swap)
        threads = [threading.Thread(target=work, args=(g, swap)) for g in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(done) == 8
    """
    own = {**devices(2), "JAX_THREAD_GUARD": "0"}
    run_ok(lines, 2, own, own)


@pytest.mark.parametrize("each", [1, 2])
def test_programs_of_two_threads_on_all_devices_never_mix(each: int) -> None:
    """Without a guard, programs of different shapes that meet are an error on all."""
    lines = """
    n, wrong = len(devices), []
    def work(f, factor):
        x = array(np.ones((n, 8 * factor), np.float32))
        for _ in range(100):
            try:
                found = local(f(x))
            except jax.errors.JaxRuntimeError as error:
                wrong.extend([] if "ranks disagree" in str(error) else [str(error)])
            else:
                wrong.extend([] if (found == n * factor).all() else [found])
    def scaled(factor):
        f = program(lambda x: lax.psum(factor * x, "p"))
        local(f(array(np.ones((n, 8 * factor), np.float32))))
        return f
    threads = [threading.Thread(target=work, args=(scaled(i), i)) for i in (1, 2)]
    store.wait_at_barrier("compiled", 50_000)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]
    print("all right", flush=True)
    jax.distributed.shutdown()  # JAX ends a process whose coordinator exits first
    os._exit(0)
    """
    own = {**devices(each), "JAX_THREAD_GUARD": "0"}
    assert [out for out, _ in run(lines, 2, own, own)] == ["all right\n"] * 2


def test_processes_that_disagree_get_one_error_and_go_on() -> None:
    lines = """
    shapes = (4, 10 + 2 * rank)
    text = error_of(lambda: on(lambda x: lax.psum(x, "p"), np.ones(shapes, np.float32)))
    print(re.search("ranks disagree.*", text)[0])
    assert on(lambda x: lax.psum(x, "p"), np.ones((4, 3), np.float32))[0, 0] == 4
    """
    (first, _), (second, _) = run(lines, 2, devices(2), devices(2))
    assert first == second
    assert "rank 0 sent f32[10]" in first and "rank 2 sent f32[12]" in first


LOSS = """
if rank == 1:
    os.kill(os.getpid(), signal.HOW)
for function in (f, g):
    text = error_of(lambda: [local(function(x)) for _ in range(10**9)])
    print(text.splitlines()[0], flush=True)
leave()
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_all_others_name_a_device_of_a_lost_process(how: str) -> None:
    more = {"RINGJAX_FAILURE_TIMEOUT": "2", "RINGJAX_HEARTBEAT": "0.2", **devices(2)}
    with started(READY + LOSS.replace("HOW", how), 3, *[more] * 3) as processes:
        texts = [processes[i].communicate(timeout=100)[0] for i in (0, 2)]
        processes[1].send_signal(signal.SIGCONT)
    for text in texts:
        ready, *errors = text.splitlines()
        assert ready == "ready" and len(errors) == 2
        for error in errors:
            assert "of processes 0, 0, 1, 1, 2, 2" in error
            assert "rank 2 " in error or "rank 3 " in error, error
