"""The model of jobs that lose hosts, and the simulation behind it."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from docs.explanation.scaling import coordination_service, pull_rate, recovery_simulation
from docs.explanation.scaling.coordination_service import RATE, Talk
from docs.explanation.scaling.recovery_model import chance_of_loss, rack_of
from docs.explanation.scaling.recovery_simulation import HOSTS, cases_of
from docs.explanation.scaling.scale_report import LOSSES, Given, recovery, steady
from docs.explanation.scaling.scale_simulation import Case

FOUND = json.loads(recovery_simulation.RESULTS.read_text(encoding="utf-8"))
JOBS = FOUND["jobs"]
GIVEN = Given(1e9)
TALK = {"seconds": 0.5, "requests": 10.0, "told": 400.0, "heard": 800.0}
# Four hosts with a gigabyte each, in two replicas of two; the manifest is handed on.
JOB: dict[str, Any] = {
    "name": "small", "hosts": 4, "shards": 16, "replicas": 2, "bytes": 2e9, "handed": 1000,
    "share_files": 10, "share_bytes": 0.5e9, "manifest_bytes": 1000, "decode": 0.001,
    "part_bytes": 1e9, "part_manifest_bytes": 500, "part_decode": 0.002,
    "root": TALK, "memory": TALK, "copies": TALK, "exchange": TALK,
}  # fmt: skip
# What is said with process 0, by the other three.
SAID = 3 * (400 + 800) / 4


def test_every_job_is_recorded() -> None:
    assert [(job["name"], job["hosts"]) for job in JOBS] == [
        (case.name, hosts) for hosts in HOSTS for case in cases_of(hosts)
    ]


def test_the_simulation_runs_the_real_code() -> None:
    # Two replicas: in the memory of a host is all that its devices hold.
    case = Case("smoke", 4, 16, 8, 8, 3200)
    found = recovery_simulation.simulated(case)
    small = 8 * 4096 * 4 * 2
    assert found["part_bytes"] == pytest.approx(found["bytes"] / 2, abs=small)
    assert found["share_bytes"] == pytest.approx(found["bytes"] / 4, abs=small)
    # A digest of each chunk, also of those that other hosts have.
    assert found["part_manifest_bytes"] > 16 * (8 * 16 + 8)
    assert found["handed"] == found["manifest_bytes"]
    assert found["root"]["heard"] > 3 * found["handed"]


@pytest.mark.parametrize(
    "of",
    [
        lambda hosts: coordination_service.from_root(hosts, b""),
        coordination_service.from_memory,
        coordination_service.rounds,
        coordination_service.exchanges,
    ],
)
def test_what_is_said_grows_with_the_hosts(of: Any) -> None:
    few, more, many = (of(hosts) for hosts in (8, 16, 24))
    for less, greater in ((few, more), (more, many)):
        assert all(a < b for a, b in zip(less, greater, strict=True))
    # Every process asks for as much.
    assert many.requests - more.requests == more.requests - few.requests
    # The service answers one request after the other.
    assert all(each.seconds >= each.requests / RATE for each in (few, more, many))


def test_what_the_primary_hands_on_goes_to_all_others() -> None:
    manifest = random.Random(0).randbytes(10_000)
    plain, handed = (coordination_service.from_root(5, data) for data in (b"", manifest))
    # What the processes say of themselves varies by some bytes.
    assert handed.heard - plain.heard == pytest.approx(4 * 10_000, abs=200)
    assert handed.told - plain.told == pytest.approx(10_000, abs=200)


def test_a_pull_brings_the_bytes() -> None:
    assert pull_rate.measured(1 << 20) > 0


def test_a_host_pulls_its_part_and_nothing_is_read() -> None:
    found = recovery(JOB, "memory", "a host", GIVEN)
    assert found["from"] == "memory"
    assert found["store"] == 0
    assert found["most"] == pytest.approx(1e9 + 500 + SAID)
    assert found["mean"] == pytest.approx((2 * (1e9 + 500) + 2 * SAID) / 4)
    assert found["coordination"] == 0.5
    assert found["manifest"] == 0.002
    assert found["data"] == pytest.approx(1.0000005 + 1e9 / GIVEN.memory)
    assert found["total"] == pytest.approx(0.502 + found["data"])


def test_without_memory_all_is_read_after_all_have_said_so() -> None:
    tried, plain = (recovery(JOB, way, "all", GIVEN) for way in ("memory", "root"))
    assert tried["from"] == plain["from"] == "root"
    assert plain["store"] == tried["store"] == 4e9 + 1000
    assert tried["coordination"] == plain["coordination"] + 0.5
    # A host at a gigabyte a second.
    assert plain["data"] == pytest.approx(1.0)
    assert plain["mean"] == pytest.approx((4e9 + 1000 + 2 * SAID) / 4)
    assert recovery(JOB, "root", "all", Given(1e9, store=1e9))["data"] == pytest.approx(4.0)


def test_replicas_read_each_byte_once() -> None:
    found = recovery(JOB, "broadcast", "all", GIVEN)
    assert found["store"] == pytest.approx(2e9 + 1000)
    # A gigabyte in four rounds; of each half is read and half is exchanged.
    assert found["coordination"] == 0.5 + 4 * 0.5
    assert found["data"] == pytest.approx(0.125 + 3 * 0.125 + 0.125e9 / GIVEN.nic)
    assert found["mean"] == pytest.approx((2e9 + 1000 + 2 * 2e9 + 2 * SAID) / 4)


def test_copies_are_sent_and_received_by_all() -> None:
    found = steady(JOB, GIVEN)
    assert found["sent"] == found["received"] == pytest.approx(1e9 + 500 + SAID / 4)
    assert found["round"] == pytest.approx(1.5000005)
    assert found["share_60"] == pytest.approx(found["sent"] / 60 / GIVEN.nic)
    # Snapshots that come faster than copies are not all copied.
    slow = steady(JOB, Given(1e6))
    assert slow["share_60"] == pytest.approx(slow["sent"] / slow["round"] / GIVEN.nic)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job['name']}, {job['hosts']}")
def test_bytes_are_conserved_and_more_losses_never_help(job: dict[str, Any]) -> None:
    lost = [recovery(job, "memory", loss, GIVEN) for loss in LOSSES]
    hosts, part = job["hosts"], job["part_bytes"] + job["part_manifest_bytes"]
    said = 2 * (job["memory"]["told"] + job["memory"]["heard"]) * (hosts - 1) / hosts
    for found, pulled in zip(lost, (1, hosts, rack_of(hosts)), strict=False):
        assert found["mean"] * hosts == pytest.approx(2 * pulled * part + said)
        assert found["store"] == 0
        assert found["most"] >= found["mean"]
    alone, _, rack, _ = lost
    assert alone["total"] <= rack["total"]
    assert alone["mean"] <= rack["mean"]
    root = recovery(job, "root", "all", GIVEN)
    readers = 1 if job["handed"] else hosts
    manifests = readers * job["manifest_bytes"]
    assert root["store"] == pytest.approx(hosts * job["part_bytes"] + manifests)
    shared = recovery(job, "broadcast", "all", GIVEN)
    read = hosts * job["part_bytes"] / job["replicas"] + manifests
    assert shared["store"] == pytest.approx(read)


def test_the_losses_that_were_tried_agree_with_the_formula() -> None:
    for each in FOUND["chances"]:
        exact = float(chance_of_loss(each["hosts"], each["distance"], each["lost"]))
        spread = math.sqrt(exact * (1 - exact) / each["trials"])
        assert abs(each["parts_lost"] / each["trials"] - exact) <= 5 * spread + 1e-9


def test_losses_are_tried_with_the_model() -> None:
    assert recovery_simulation.losses(8, 1, 1, 50) == 0
    assert recovery_simulation.losses(8, 1, 8, 50) == 50


def test_a_talk_is_written_as_it_is() -> None:
    assert Talk(**TALK)._asdict() == TALK
