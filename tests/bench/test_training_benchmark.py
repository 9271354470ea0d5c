"""The comparison of training steps without its peers: networks and tables."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from benchmarks import training
from benchmarks.harness import shapes, torch_networks


def test_the_network_has_the_gradients_of_resnet50() -> None:
    found = torch_networks.shapes("resnet50")
    # PyTorch has the channels first.
    assert sorted(map(math.prod, found)) == sorted(map(math.prod, shapes.resnet50()))


def test_every_network_has_many_tensors() -> None:
    for name in torch_networks.NETWORKS:
        assert len(torch_networks.shapes(name)) >= 161


def test_a_step_trains_the_wrapped_network() -> None:
    seen: list[Any] = []

    def wrap(module: Any, optimizer: Any) -> Any:
        seen.extend((module, optimizer))
        return module, optimizer

    step = torch_networks.training("transformer", wrap)
    module, optimizer = seen
    before = [p.detach().clone() for p in module.parameters()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would spin at barriers if others work as well
    try:
        step()
    finally:
        torch.set_num_threads(threads)
    moved = [
        not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)
    ]
    assert all(moved) and len(optimizer.state) == len(moved)


def row(peer: str, variant: str, *milliseconds: float) -> dict[str, Any]:
    rounds = [[1e3 * ms, 1e3 * ms, 9e9] for ms in milliseconds]
    work = 500 * milliseconds[0]  # half of the first round
    return {"peer": peer, "variant": variant, "rounds_us": rounds, "cpu_us": work}


def cells(table: str) -> list[list[str]]:
    return [re.split(r" {2,}", line) for line in table.splitlines()]


def test_the_table_of_steps() -> None:
    rows = [
        row("ringjax-torch", "together", 110, 120, 130),
        row("ringjax-torch", "alone", 100, 110, 110),
        row("horovod", "together", 220, 240, 130),
        row("horovod", "alone", 180, 200, 90),
        row("torch-gloo", "alone", 1, 1, 1),  # its other variant has failed
    ]
    head, ours, theirs = cells(training.step_table(rows))
    assert head[:4] == ["ms", "alone", "together", "more"]
    assert ours[1:4:2] == ["110.0 (100.0 .. 110.0)", "10.0 (10.0 .. 20.0)"]
    assert theirs[3:] == ["40.0 (40.0 .. 40.0)", "2.00 (1.00 .. 2.00)", "4.00", "20.0"]


def test_the_table_of_gradients() -> None:
    rows = [
        row("ringjax-torch", "async, fused", 10, 20),
        row("horovod", "grouped", 30, 40),
    ]
    _, ours, theirs = cells(training.gradient_table(rows))
    assert ours[2:] == ["1.00 (1.00 .. 1.00)", "5.0"]
    assert theirs[2:] == ["2.50 (2.00 .. 3.00)", "15.0"]


def test_tables_without_ringjax_have_no_ratios() -> None:
    rows = [row("horovod", "together", 2), row("horovod", "alone", 1)]
    assert cells(training.step_table(rows))[1][4:6] == ["-", "-"]
    assert cells(training.gradient_table(rows[:1]))[1][2] == "-"


def test_cases() -> None:
    options = training.parse(["--networks", "resnet50"])
    steps, gradients = training.cases(options, 2)
    assert (steps.kind, steps.network) == ("trainings", "resnet50")
    assert steps.size == gradients.size == 4 * 25_557_032
    only = training.parse(["--networks", "--no-gradients"])
    assert training.cases(only, 2) == []
    with pytest.raises(SystemExit):
        training.parse(["--rounds", "0"])
