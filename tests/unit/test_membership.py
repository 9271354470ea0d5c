"""Tests of single rules of elastic jobs. The simulation tests their combination."""

from __future__ import annotations

from typing import Any

import pytest
from support.membership_job import Job, started

from ringjax.control.number_lists import compress, expand
from ringjax.control.worker_address import WorkerAddress
from ringjax.membership import member_table


def test_ranks_are_in_the_order_of_worker_numbers() -> None:
    job = Job(3).hello(7, 2)
    assert job.epoch == -1
    job.hello(4)
    assert job.order() == [2, 4, 7]
    assert job.last(4)["kind"] == "start"
    table = member_table.decode(job.last(4)["members"])
    assert [(m.rank, m.worker) for m in table] == [(0, 2), (1, 4), (2, 7)]


def test_fewer_ranks_may_start_after_the_timeout() -> None:
    job = Job(5, 2).hello(3, 1)
    job.wait(119)
    assert job.epoch == -1
    job.wait(2)
    assert job.order() == [1, 3]
    job.hello(0)
    welcome = job.last(0, "welcome")
    assert (welcome["rank"], welcome["size"]) == (2, 3)


def test_too_few_cannot_start() -> None:
    job = Job(5, 3)
    job.membership.expect(9)
    job.hello(3, 1)
    job.wait(121)
    text = "2 of at least 3 ranks came within 120 s (not yet here: worker 9)"
    assert job.news == [("stop", text)]
    assert job.last(1) == {"type": "stopped", "text": text}


def test_survivors_keep_their_order() -> None:
    job = started(5)
    job.lose(1)
    assert job.last(1)["type"] == "fenced"
    assert job.last(3)["lost"].keys() == {"1"}
    job.report(0, 2, 3, line=(4, 5, True))
    assert job.epoch == 0
    job.report(4, line=(5, 5, True))
    members = job.last(3, "members")
    assert members["kind"] == "repair"
    assert expand(members["previous"]) == (0, 2, 3, 4)
    assert members["verdicts"] == {"0": (5, True)}
    assert [m.worker for m in member_table.decode(members["members"])] == [0, 2, 3, 4]


def test_a_second_loss_while_reports_are_awaited() -> None:
    job = started(4)
    job.lose(3)
    job.report(0, 2, line=(6, 6, True))
    job.lose(2)
    assert job.last(1)["lost"].keys() == {"2", "3"}
    job.report(1, line=(5, 5, True))
    # The lost rank has completed the call, so the call stays committed.
    assert job.last(1)["verdicts"] == {"0": (6, True)}
    assert job.order() == [0, 1]


def test_a_loss_during_the_start_of_an_epoch() -> None:
    job = started(4)
    job.lose(3)
    job.report(0, 1, 2)
    job.lose(0)
    revoke = job.last(1, "revoke")
    assert revoke["lost"] == {"0": "lost its connection to the coordinator (EOF)"}
    assert (revoke["epoch"], revoke["restart"]) == (1, False)
    # A report about a past epoch is ignored.
    job.membership.on_message(1, {"type": "report", "epoch": 0}, job.now)
    job.report(1, 2)
    assert (job.epoch, expand(job.last(2)["previous"])) == (2, (1, 2))


def test_a_member_that_does_not_report_is_lost() -> None:
    job = started(3)
    job.lose(0)
    job.report(1)
    job.wait(4.9)
    assert job.epoch == 0
    job.wait(0.2)
    assert job.order() == [1]
    assert job.last(2) == {"type": "fenced", "text": "did not report within 5 s"}


def test_an_unrequested_report_ends_an_epoch() -> None:
    job = started(2)
    job.report(0)
    assert job.last(1)["type"] == "revoke"
    job.report(1)
    assert job.order() == [0, 1]


def test_a_suspected_silent_member_is_lost_early() -> None:
    job = started(4)
    job.say(1, "suspect", rank=0, text="silent for 5 s")
    assert job.last(2)["type"] == "revoke"  # all living ranks must report
    job.report(1, 2, 3)
    job.wait(0.4)
    assert job.epoch == 0
    job.wait(0.2)
    assert job.order() == [1, 2, 3]
    assert job.last(0)["text"] == "silent for 5 s (says rank 1)"


def test_one_of_two_disconnected_members_stays() -> None:
    job = started(4)
    job.say(1, "suspect", rank=2)
    job.say(2, "suspect", rank=1)
    job.say(0, "suspect", rank=1)
    job.report(0, 1, 2, 3)
    job.wait(0.9)
    assert job.epoch == 0
    job.wait(0.2)
    assert job.order() == [0, 2, 3]


def test_a_joining_rank_cannot_remove_one_with_the_state() -> None:
    job = started(2, 1, 3).hello(8)
    job.say(8, "ready")
    job.say(1, "restart", text="ValueError")
    job.report(0, 1, line=(3, 4, True))
    assert job.order() == [0, 1, 8]
    job.say(8, "suspect", rank=0, text="rank 0 cannot be reached")
    job.report(0, 1, 8)
    job.wait(1.1)
    assert job.order() == [0, 1]
    text = "it says that it cannot reach the others"
    assert job.last(8) == {"type": "fenced", "text": text}


def test_restart() -> None:
    job = started(3, 1, 4).hello(8)
    job.say(8, "ready")
    job.say(1, "restart", text="ValueError")
    assert job.last(0) == {"type": "revoke", "epoch": 0, "lost": {}, "restart": True}
    job.report(0, 1, line=(3, 4, True))
    job.report(2, line=(2, 4, True))
    members = job.last(2)
    assert members["kind"] == "restart"
    assert members["verdicts"] == {"0": (3, False)}
    assert job.order() == [0, 1, 2, 8]


def test_a_report_may_request_a_restart() -> None:
    job = started(2)
    job.say(0, "report", lines={}, restart=True)
    assert job.last(1)["restart"]
    job.report(1)
    assert job.last(0)["kind"] == "restart"


def test_ranks_join_and_leave_at_a_pause() -> None:
    job = started(3, 1, 3).hello(5, 6)
    job.say(5, "ready")
    assert "update" not in {m["type"] for m in job.mail[0]}  # the job is full
    job.say(1, "leaving")
    assert job.last(0) == {"type": "update", "number": 1, "joining": 1, "leaving": 1}
    for worker in (0, 1, 2):
        assert job.epoch == 0
        sets = {"1": compress([0, 1]), "2": compress([1, 2])}
        job.say(worker, "pause", number=1, sets=sets, next_set=3)
    assert job.last(1)["type"] == "dismissed"
    members = job.last(5)
    assert members["kind"] == "resize" and members["next_set"] == 3
    assert expand(members["previous"]) == (0, 2, -1)
    assert members["sets"] == {"1": compress([0]), "2": compress([1])}
    assert job.order() == [0, 2, 5]
    job.membership.process_ended(1, "it ended", job.now)
    job.take()
    assert job.last(0)["type"] == "members"


@pytest.mark.parametrize("min_np", [1, 3])
def test_when_all_leave_the_job_ends_at_once(min_np: int) -> None:
    job = started(3, min_np, 3).hello(7)
    for worker in (0, 1, 2):
        job.say(worker, "leaving")
    for worker in (0, 1, 2):
        number = job.last(worker, "update")["number"]
        job.say(worker, "pause", number=number)
    assert {job.last(worker)["type"] for worker in (0, 1, 2)} == {"dismissed"}
    assert job.membership.phase == "stopped"
    assert job.news[-1] == ("stop", "every rank has left, as it was asked to")
    assert job.last(7)["type"] == "dismissed"  # no member needs a newcomer


def test_a_newcomer_that_waits_for_a_place_may_leave() -> None:
    job = started(2, 1, 2).hello(5, 6)
    for worker in (5, 6):
        job.say(worker, "ready")
    job.say(5, "leaving")
    assert job.last(5)["type"] == "dismissed"
    job.lose(1)
    job.report(0)
    job.say(0, "pause", number=job.last(0, "update")["number"])
    assert job.order() == [0, 6]


def test_leave_requests_may_arrive_after_the_pauses() -> None:
    job = started(3, 3, 3)
    job.say(1, "leaving")
    for worker in (0, 1, 2):
        job.say(worker, "pause", number=1)
    assert job.membership.phase == "waiting"
    job.say(2, "leaving")
    assert job.membership.phase == "waiting"
    job.say(0, "leaving")
    assert {job.last(worker)["type"] for worker in (0, 1, 2)} == {"dismissed"}
    assert job.news[-1] == ("stop", "every rank has left, as it was asked to")


def test_a_loss_voids_pauses() -> None:
    job = started(3, 1, 4).hello(5)
    job.say(5, "ready")
    job.say(0, "pause", number=1)
    job.lose(2)
    job.report(0, 1)
    assert job.last(0, "members")["kind"] == "repair"
    assert job.last(0)["type"] == "update"  # the change is announced again
    job.say(1, "pause", number=2)
    assert job.epoch == 1
    job.say(0, "pause", number=2)
    assert job.order() == [0, 1, 5]


def test_too_few_survivors_wait_for_joining_ranks() -> None:
    job = started(3, 3)
    job.lose(0)
    job.report(1, 2, line=(4, 5, True))
    assert job.membership.phase == "waiting"
    assert job.last(1)["text"] == "2 of at least 3 ranks: waiting up to 600 s"
    job.hello(9)
    job.say(9, "ready")
    assert (job.order(), job.last(1)["kind"]) == ([1, 2, 9], "restart")
    assert job.last(1)["verdicts"] == {"0": (4, False)}


def test_the_wait_for_joining_ranks_is_limited() -> None:
    job = started(2, 2)
    job.lose(0)
    job.report(1)
    job.wait(599)
    assert job.membership.phase == "waiting"
    job.wait(2)
    text = "1 of at least 2 ranks, and no more came within 600 s"
    assert job.news[-1] == ("stop", text)
    assert job.last(1) == {"type": "stopped", "text": text}


def test_joining_ranks_start_again_if_all_members_are_lost() -> None:
    job = started(2, 2).hello(4, 5)
    for worker in (0, 1):
        job.lose(worker)
        job.membership.process_ended(worker, "it ended", job.now)
    job.say(4, "ready")
    job.say(5, "ready")
    assert [n for n in job.news if n[0] == "ready"] == [
        ("ready", 4, ""),
        ("ready", 5, ""),
    ]
    assert (job.order(), job.last(5)["kind"]) == ([4, 5], "start")


def test_no_new_start_while_lost_members_may_still_run() -> None:
    job = started(2, 1).hello(4)
    job.say(4, "ready")
    job.lose(0)
    job.membership.process_ended(0, "it ended", job.now)
    job.report(1)
    assert (job.order(), job.epoch) == ([1], 1)
    job.lose(1)
    job.membership.process_ended(1, "lost its host", job.now, heirs=False)
    job.take()
    assert (job.membership.phase, job.epoch) == ("waiting", 1)
    # The host of the lost process is reachable again and reports its end.
    job.membership.process_ended(1, "it ended", job.now)
    job.take()
    assert (job.order(), job.last(4)["kind"]) == ([4], "start")


def test_a_joining_rank_must_have_the_same_version_and_settings() -> None:
    job = Job(1).hello(0, version="1.0", settings={"ring_bytes": 1})
    job.hello(1, version="1.1", settings={"ring_bytes": 1})
    assert job.last(1)["text"] == "worker 1 runs ringjax 1.1, the members 1.0"
    job.hello(2, version="1.0", settings={"ring_bytes": 2})
    assert job.last(2)["type"] == "refused"
    assert job.last(2)["text"] == (
        "RINGJAX_RING_BYTES must be alike on all ranks: "
        "it is 1 on the members and 2 on worker 2"
    )


@pytest.mark.parametrize("on_loss", ["repair", "stop"])
def test_ranks_with_different_settings_cannot_begin_a_job(on_loss: Any) -> None:
    job = Job(3, on_loss=on_loss)
    for rank in range(3):
        settings = {"algorithm": "", "tcp_streams": 1 + rank // 2}
        job.hello(rank, size=3, version="1.0", settings=settings)
    text = "RINGJAX_TCP_STREAMS must be alike on all ranks: it is 1 on rank 0 and 2 on "
    assert {job.last(rank)["text"] for rank in range(3)} == {text + "rank 2"}
    assert job.news[-1] == ("stop", text + "rank 2")


def test_a_member_asks_for_the_addresses_of_ranks() -> None:
    job = Job(3, min_np=1)
    for worker, machine in enumerate(["a", "a", "b"]):
        job.hello(worker, machine=machine, addresses=f"{worker}:1", door=f"d{worker}")
    job.say(0, "locate", number=7, ranks=compress([1, 2]))
    reply = job.last(0)
    assert (reply["type"], reply["epoch"], reply["number"]) == ("located", 0, 7)
    assert {r: WorkerAddress.from_json(a) for r, a in reply["workers"].items()} == {
        "1": WorkerAddress("h", "1:1", "d1", near=True),
        "2": WorkerAddress("h", "2:1"),
    }
    job.lose(2)
    job.say(0, "locate", number=8, ranks=compress([1, 2]))
    assert set(job.last(0)["workers"]) == {"1"}


def test_no_rank_is_admitted_after_a_member_has_finished() -> None:
    job = started(3, 3).hello(7)
    job.say(7, "ready")
    job.say(0, "leave", lines={"0": (9, 9, True)})
    assert job.last(0)["type"] == "farewell"
    gone = job.last(1, "gone")
    told = (0, "has finished and left the job", {"0": (9, 9, True)})
    assert gone["ranks"] == [told]
    job.hello(8)
    assert job.last(8)["type"] == "dismissed"
    job.lose(2)  # enough ranks, and rank 0's report counts
    job.report(1, line=(8, 8, True))
    assert job.last(1)["verdicts"] == {"0": (9, True)}
    job.say(1, "leave")
    assert job.last(7)["text"] == "the job has finished without it"
    assert job.membership.phase == "stopped"
    assert [n[1] for n in job.news if n[0] == "finished"] == [0, 1]


def test_joining_ranks_without_a_state_are_dismissed() -> None:
    job = started(2, 2).hello(7)
    job.say(7, "ready")
    job.lose(1)
    job.report(0)
    assert job.order() == [0, 7]
    job.say(0, "leave", epoch=0)  # worker 0 left before it received epoch 1
    assert job.last(7)["type"] == "dismissed"


def test_a_suspicion_of_a_finished_rank() -> None:
    job = started(3)
    job.say(2, "leave")
    job.say(0, "suspect", rank=2, text="it has left")
    job.report(0, 1)
    assert (job.order(), job.last(0)["lost"].keys()) == ([0, 1], {"2"})


def test_the_last_messages_of_an_ended_process_count() -> None:
    job = started(2)
    job.membership.process_ended(0, "exit code 0", job.now)
    job.say(0, "leave")
    job.lose(0)
    assert ("fenced", 0) not in {n[:2] for n in job.news}
    job.membership.process_ended(1, "was killed", job.now)
    job.wait(0.2)
    assert job.membership.phase == "run"
    job.wait(0.1)
    assert ("fenced", 1, "was killed") in job.news


def test_a_reported_failure() -> None:
    job = started(2)
    job.say(0, "failure", text="ValueError: x")
    assert job.news[-2] == ("failure", 0, "ValueError: x")
    assert job.news[-1] == ("fenced", 0, "failed: ValueError: x")


def test_a_fenced_worker_stays_out() -> None:
    job = started(2)
    job.lose(1)
    memory = {"term": 0, "epoch": 0, "members": job.last(1, "members")}
    for rejoin in (memory, None):
        job.hello(1, rejoin=rejoin)
        assert job.last(1)["type"] == "fenced"


@pytest.mark.parametrize(
    "message",
    [
        {"type": "report", "epoch": 0, "lines": {"0": 3}},
        {"type": "suspect", "epoch": 0, "rank": 3},
        {"type": "suspect", "epoch": 0, "rank": "1"},
        {"type": "pause", "epoch": 0, "sets": {"x": []}},
        {"type": "leave", "lines": {"0": [1, 2]}},
        {"type": "locate", "epoch": 0},
        {"type": "locate", "epoch": 0, "ranks": [[0, 4, 1]]},
        {"type": "locate", "epoch": 0, "ranks": [[0, 1 << 40, 0]]},
    ],
)
def test_bad_messages_change_nothing(message: dict[str, Any]) -> None:
    job = started(3)
    with pytest.raises(ValueError, match="sent no report|suspects rank|asked for"):
        job.membership.on_message(1, message, job.now)
    job.take()
    assert (job.membership.phase, job.epoch) == ("run", 0)


@pytest.mark.parametrize(
    "rejoin", [{}, {"epoch": 3}, {"epoch": 0, "members": {"members": [1]}}]
)
def test_bad_rejoin_data(rejoin: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="sent"):
        Job(2).hello(0, rejoin=rejoin)
