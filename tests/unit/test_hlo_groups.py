"""Tests of the groups in HLO modules, with lines that supported versions of JAX wrote.

The programs have 8 devices, of which most use a mesh of 2 x 2 x 2.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ringjax.errors import InvalidArgument
from ringjax.xla import replica_groups
from ringjax.xla.hlo_groups import groups_of

HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=8\n\nENTRY %main {\n"
ALL = [tuple(range(8))]
PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]
FAR = [(0, 4), (1, 5), (2, 6), (3, 7)]
MIDDLE = [(0, 2), (1, 3), (4, 6), (5, 7)]
IDS = "use_global_device_ids=true"

# An instruction, its groups as JAX 0.10.2 and as JAX 0.12.0 wrote them, what they are.
WRITTEN = [
    (
        "%a = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=@, to_apply=%r",
        "{{0,2},{1,3},{4,6},{5,7}}",
        "mesh['x'=2,'y'=2,'z'=2] {'y'}",
        MIDDLE,
    ),
    (
        "ROOT %b.7 = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups=@",
        "{{0,4,1,5},{2,6,3,7}}",
        "mesh['x'=2,'y'=2,'z'=2] {'z','x'}",
        [(0, 4, 1, 5), (2, 6, 3, 7)],
    ),
    (
        "%c = (f32[8]{0}, f32[8]{0}) all-reduce(%p, %q), channel_id=1, "
        "replica_groups=@, to_apply=%r",
        "{{0,4},{1,5},{2,6},{3,7}}",
        "mesh['x'=2,'y'=2,'z'=2] {'x'}",
        FAR,
    ),
    (
        "%d = f32[2,8]{0,1} all-gather(%w), channel_id=1, replica_groups=@, "
        "dimensions={1}",
        "[4,2]<=[2,4]T(1,0)",
        "[4,2]<=[2,4]T(1,0)",
        FAR,
    ),
    (
        "%e = f32[2]{0} reduce-scatter(%b), channel_id=1, replica_groups=@, "
        "dimensions={0}, to_apply=%r",
        "{{0,2,4,6},{1,3,5,7}}",
        "mesh['x'=2,'y'=2,'z'=2] {'x','y'}",
        [(0, 2, 4, 6), (1, 3, 5, 7)],
    ),
    (
        "%f = (f32[1,2,2]{2,1,0}, f32[1,2,2]{2,1,0}) all-to-all(%a, %b), channel_id=1, "
        "replica_groups=@",
        "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_0':(2)2}",
        "mesh['a'=2,'b'=4] {'b':(2)2}",
        PAIRS,
    ),
    (
        "%g = f32[] all-reduce(%w), channel_id=1, replica_groups=@, to_apply=%r",
        "mesh['axis_0'=2,'axis_1'=4] {'axis_0'}",
        "mesh['a'=2,'b'=4] {'a'}",
        FAR,
    ),
    (
        "%h = f32[2,4]{1,0} collective-permute(%f), channel_id=2, "
        "source_target_pairs=@",
        "{{0,0},{2,4},{1,1},{3,5},{4,2},{6,6},{5,3},{7,7}}",
        "{{0,1},{1,0}}",
        ALL,
    ),
]
# The attributes that XLA writes behind the groups, in the two versions of JAX.
MORE = [f", {IDS}", f', {IDS}, frontend_attributes={{is_spmd_generated="true"}}']


def module(*lines: str) -> str:
    return HEADER + "".join(f"  {line}\n" for line in lines) + "}\n"


@pytest.mark.parametrize(("line", "old", "new", "groups"), WRITTEN)
def test_groups_that_jax_writes(
    line: str, old: str, new: str, groups: list[tuple[int, ...]]
) -> None:
    for notation in (old, new):
        for more in MORE:
            assert groups_of(module(line.replace("@", notation + more))) == groups


def test_groups_of_all_computations() -> None:
    sent = f"channel_id=1, replica_groups=[4,2]<=[8], {IDS}"
    text = (
        "HloModule jit_f, num_partitions=8\n\n%branch.1 (p: f32[3]) -> f32[3] {\n"
        f"  ROOT %a = f32[3]{{0}} all-reduce(%p), {sent}\n}}\n\n"
        "%body.2 (p: f32[3]) -> f32[3] {\n  %s = ((f32[3]{0}), (f32[6]{0})) "
        f"all-gather-start(%p), {sent}\n"
        "  ROOT %d = f32[6]{0} all-gather-done(%s)\n}\n\n"
        "ENTRY %main (x: f32[3]) -> f32[3] {\n"
        "  %w = f32[3] while(%x), condition=%all-reduce.9, body=%body.2\n"
        "  ROOT %b = f32[3] collective-broadcast(%w), channel_id=3, "
        "replica_groups={}\n}\n"
    )
    assert groups_of(text) == sorted([*PAIRS, *ALL])


def test_names_are_no_instructions() -> None:
    named = '%n = f32[3] add(%a, %b), metadata={op_name="x \\"y all-reduce(z"}'
    later = (
        '%m = (f32[3]) tuple(%n), metadata={op_name="a"}, frontend_attributes='
        '{b=" collective-permute(c), replica_groups={{0,9}}"}'
    )
    assert groups_of(module(named, later)) == []


@pytest.mark.parametrize(
    ("header", "attributes", "groups"),
    [
        ("num_partitions=4", "channel_id=1, replica_groups={{0}}", [(0, 1, 2, 3)]),
        ("num_partitions=4", "channel_id=1, replica_groups={}", [(0, 1, 2, 3)]),
        ("num_partitions=2", "replica_groups={{0}}", [(0,), (1,)]),
        ("replica_count=3", "replica_groups={{0,2},{1}}", [(0, 2), (1,)]),
        ("replica_count=3", "replica_groups={}", [(0, 1, 2)]),
        ("is_scheduled=true", f"channel_id=1, replica_groups={{{{0}}}}, {IDS}", [(0,)]),
        (
            "replica_count=2, num_partitions=2",
            f"channel_id=1, replica_groups={{{{0,3}},{{1,2}}}}, {IDS}",
            [(0, 3), (1, 2)],
        ),
    ],
)
def test_what_the_numbers_count(
    header: str, attributes: str, groups: list[tuple[int, ...]]
) -> None:
    line = f"  %a = f32[3] all-reduce(%p), {attributes}"
    assert groups_of(f"HloModule m, {header}\n{line}") == groups


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("%a = f32[3] all-reduce(%p), channel_id=1, replica_groups=new", "not known"),
        ("%a = f32[3] all-reduce(%p), channel_id=1", "not known"),
        ("%a = f32[3] all-scatter(%p), replica_groups={{0,1}}", "kind that is not"),
        ("%a = f32[3] collective-sum-start(%p), replica_groups={}", "kind that is not"),
        ("%a = f32[3] all-to-all(%p), channel_id=1, replica_groups={{0,8}}", "no grou"),
        (
            "%a = f32[3] all-to-all(%p), channel_id=1, replica_groups={{0,1},{1,2}}",
            "no groups of 8 devices",
        ),
        (
            "%a = f32[?,3] all-reduce(%p), channel_id=1, replica_groups={}",
            "size is not known",
        ),
        ("%a all-reduce(%p), channel_id=1, replica_groups={}", "%a all-reduce"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(line: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why) as caught:
        groups_of(module(line))
    assert "%a" in str(caught.value)


def test_replicas_of_partitions_are_refused() -> None:
    line = "  %a = f32[3] all-to-all(%p), channel_id=1, replica_groups={{0,1}}"
    with pytest.raises(InvalidArgument, match="2 replicas, 2 partitions"):
        groups_of(f"HloModule m, replica_count=2, num_partitions=2\n{line}")


@pytest.mark.parametrize(
    ("longest", "too_long", "opcode", "unit"),
    [
        ("s8[2147483647]", "s8[2147483648]", "all-reduce", "elements"),
        ("(f32[3], s8[65535,32768])", "(f32[3], s8[65536,32768])", "all-reduce", ""),
        ("s8[2147483647]", "s8[2147483648]", "reduce-scatter", "elements"),
        ("s8[4294967294]", "s8[4294967296]", "all-gather", "elements"),
        ("f32[536870911]", "f32[536870912]", "collective-permute", "bytes"),
        ("(pred[3], c128[134217727])", "(c128[134217728])", "all-to-all", "bytes"),
        ("f64[536870910]", "f64[536870912]", "all-to-all", "bytes"),
    ],
)
def test_too_long_data_are_refused(
    longest: str, too_long: str, opcode: str, unit: str
) -> None:
    rest = f"{opcode}(%p), channel_id=1, replica_groups=[4,2]<=[8], {IDS}"
    assert groups_of(module(f"%big = {longest} {rest}"))
    with pytest.raises(InvalidArgument, match=f"%big = .*2147483647 {unit}"):
        groups_of(module(f"%big = {too_long} {rest}"))


# -- notations -------------------------------------------------------------------------


def test_listed_device_ids_and_axes_without_quotes() -> None:
    text = "mesh[a=2,b=2], device_ids=(3,1,0,2) {a}"
    assert replica_groups.read(text, 4) == ([(3, 0), (1, 2)], len(text))
    assert replica_groups.read("mesh['a'=3] {}", 3)[0] == [(0,), (1,), (2,)]


def test_parts_of_axes_agree_with_axes() -> None:
    """An axis of 12 has the parts 2, 3 and 2, as three axes of these sizes."""
    parts = {"'a':(1)2": 0, "'a':(2)3": 1, "'a':(6)2": 2}
    whole = np.arange(24).reshape(2, 3, 2, 2)
    for count in (1, 2, 3):
        for chosen in itertools.permutations(parts, count):
            text = f"mesh['a'=12,'b'=2] {{{','.join(chosen)}}}"
            axes = [parts[part] for part in chosen]
            others = [axis for axis in range(4) if axis not in axes]
            size = int(np.prod([whole.shape[axis] for axis in axes]))
            expected = whole.transpose(*others, *axes).reshape(-1, size)
            found, _ = replica_groups.read(text, 24)
            assert sorted(found) == sorted(map(tuple, expected.tolist()))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[2,2]<=[2,3]",
        "[2,2]<=[2,2]T(0,0)",
        "[2,2]<=[2,2]T(0)",
        "mesh['a'=4] {'b'}",
        "mesh['a'=4] {'a':(3)2}",
        "mesh['a'=4] {'a':(0)2}",
        "mesh['a'=4], device_ids=(0,1,2) {'a'}",
        "mesh['a'=4], device_ids=([2,2]) {'a'",
        "mesh['a'=4,2] {'a'}",
        "mesh['a'=4] {'a','a'}",
        "maximal_mesh[device_id=1] {}",
        "{{0},{1,2}",
    ],
)
def test_contradictions_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        replica_groups.read(text, 4)
