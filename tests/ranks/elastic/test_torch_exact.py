"""`ExactGradients` in elastic jobs: a rank that is lost changes no bit."""

from __future__ import annotations

import pytest
from support.elastic_job import ElasticJob, Start

pytestmark = pytest.mark.timeout(240)

LIMIT = 110  # seconds for a job, each rank of which imports PyTorch

# KILL holds, for each worker, a step and how many pieces of that step the worker still
# computes.
PROGRAM = """
import hashlib
import torch
import ringjax.torch as hvd

torch.set_num_threads(1)
STEPS, PIECES = 20, 7
KILL = dict(pair.split("=") for pair in os.environ.get("KILL", "").split())
kill_step, left = map(int, KILL.get(str(WORKER), "-1:0").split(":"))

def backward(model, step, piece):
    global left
    if step == kill_step:
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
    torch.manual_seed(PIECES * step + piece)
    x = torch.nn.functional.dropout(torch.randn(4, 5), 0.2)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    return [loss.detach()]

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
exact = hvd.ExactGradients(model, PIECES)

@hvd.elastic.run
def train(state):
    while state.step < STEPS:
        say("size", state.step, hvd.size())
        while state.step == WAITS_AT and hvd.size() < 2:
            time.sleep(0.05)  # the rank that joins needs the core to start
            state.commit()
        losses = {}
        for piece in exact.pieces():
            losses[piece] = backward(model, state.step, piece)
        say("computed", state.step, *losses)
        optimizer.step()
        # A rank that is lost here makes the others return to the last commit.
        (loss,) = hvd.exact_allreduce(losses, PIECES, [torch.zeros(())])
        state.losses.append(loss.item())
        state.step += 1
        if state.step % EVERY == 0:
            state.commit()

EVERY, WAITS_AT = int(os.environ.get("EVERY", 1)), int(os.environ.get("WAITS_AT", -1))
state = hvd.elastic.TorchState(model, optimizer, step=0, losses=[])
train(state)
found = hashlib.sha256(str(state.losses).encode())
for entry in (model.state_dict(), *optimizer.state.values()):
    for tensor in entry.values():
        found.update(tensor.numpy().tobytes())
say("digest", found.hexdigest())
"""


def digest(job: ElasticJob, worker: int) -> str:
    """Waits for the end of a worker; returns its digest."""
    assert job.wait(worker, LIMIT) == 0, job.logs()
    return job.lines(worker, "digest")[0][0]


@pytest.fixture
def expected(start: Start) -> str:
    """The digest of one process."""
    return digest(start(1, PROGRAM), 0)


def test_the_others_compute_the_pieces_of_a_lost_rank(start: Start, expected) -> None:
    job = start(3, PROGRAM, env={"KILL": "1=4:1 0=9:0", "EVERY": "4"})
    assert digest(job, 2) == expected, job.logs()
    computed = {int(step): set(pieces) for step, *pieces in job.lines(2, "computed")}
    # Until the next commit, the pieces are dealt among the ranks that are left.
    assert computed[4] > {"2", "5"} and computed[5] >= {"1", "3", "5"}, job.logs()
    assert computed[9] == computed[19] == set("0123456")


@pytest.mark.parametrize("memory", ["1", "0"], ids=["memory", "sockets"])
def test_losses_inside_of_exchanges(start: Start, expected, memory) -> None:
    points = "call.agreed=kill@0#9;call.moving=kill@1#16;call.complete=kill@2#28"
    env = {"RINGJAX_FAILPOINTS": points, "RINGJAX_SHM": memory}
    job = start(4, PROGRAM, env=env)
    assert digest(job, 3) == expected, job.logs()
    assert all(job.wait(worker) != 0 for worker in range(3))


def test_no_rank_of_the_start_is_there_at_the_end(start: Start, expected) -> None:
    job = start(2, PROGRAM, env={"KILL": "0=3:0 1=15:1", "WAITS_AT": "8"})
    job.wait_for(lambda: ["8", "1"] in job.lines(1, "size"), "step 8", LIMIT)
    joined = job.add()
    assert digest(job, joined) == expected, job.logs()
    sizes = job.lines(joined, "size")
    assert sizes[0] == ["8", "2"] and sizes[-1] == ["19", "1"]


def test_wrong_bits_are_repaired_or_cost_the_rank(start: Start, expected) -> None:
    # A sum that was formed wrongly is formed again. A rank whose own sums do not fit
    # their checksum is lost, and the others compute its pieces.
    points = "exact.sum=flip(99)@0#4;exact.send=flip(70)@1#6"
    job = start(3, PROGRAM, env={"RINGJAX_FAILPOINTS": points})
    assert digest(job, 2) == digest(job, 0) == expected, job.logs()
    assert job.wait(1) != 0
    assert "has sums that do not fit their checksum" in job.errors(1), job.logs()
