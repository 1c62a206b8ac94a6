"""A job that has lost a host goes on from memory: its peer has held its part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_jobs import Result, run_processes, started
from tests.support.snapshots import shared_memory

PROGRAM = "peers_in_job.py"
DEVICES = {2: 2, 3: 1, 4: 1}


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


class Hosts:
    """Machines with memory of their own, as far as a job can tell."""

    def __init__(self, top: Path, count: int) -> None:
        self.folders = [top / f"host-{number}" for number in range(count)]
        for folder in self.folders:
            folder.mkdir()

    def lose(self, number: int) -> None:
        """A machine is lost with its memory, and another one takes its place."""
        shutil.rmtree(self.folders[number])
        self.folders[number].mkdir()

    def swap(self, one: int, other: int) -> None:
        """Processes come back with other numbers."""
        folders = self.folders
        folders[one], folders[other] = folders[other], folders[one]

    def held(self) -> dict[int, list[tuple[int, int]]]:
        """Return, by host, the parts of others that it holds: process and step."""
        return {
            number: sorted(
                (int(each.parent.name), int(each.name))
                for each in folder.glob("ckpt-*/*/held/*/*")
                if each.name.isdecimal()
            )
            for number, folder in enumerate(self.folders)
        }


def settings(hosts: Hosts, then: str, snapshots: int, **given: Any) -> str:
    folders = [str(each) for each in hosts.folders]
    return json.dumps({"hosts": folders, "then": then, "snapshots": snapshots, **given})


def killed(root: Path, hosts: Hosts, snapshots: int = 2, **given: Any) -> Sequence[Result]:
    """Run a job that is killed after its last snapshot."""
    count = len(hosts.folders)
    told = settings(hosts, "wait", snapshots, **given)
    with started(count, PROGRAM, root, told, devices_per_process=DEVICES[count]) as job:
        for child in job.children:
            child.reached("the end")
        for child in job.children:
            child.kill()
        return job.results()


def ended(root: Path, hosts: Hosts, snapshots: int = 1, **given: Any) -> Sequence[Result]:
    """Run a job to its end."""
    count = len(hosts.folders)
    told = settings(hosts, "end", snapshots, **given)
    return run_processes(count, PROGRAM, root, told, devices_per_process=DEVICES[count])


def starts(results: Sequence[Result]) -> set[tuple[int, bool]]:
    return {(each.value["start"], each.value["right"]) for each in results}


@pytest.mark.parametrize(("count", "lost"), [(2, 0), (3, 2), (4, 1)])
def test_a_job_that_has_lost_one_host_goes_on_from_memory(
    count: int, lost: int, tmp_path: Path, memory: Path
) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, count)
    assert starts(killed(root, hosts)) == {(0, True)}
    assert all(((n - 1) % count, 1) in held for n, held in hosts.held().items())
    hosts.lose(lost)
    # The root has no step at all.
    results = killed(root, hosts)
    assert starts(results) == {(2, True)}
    for each in results:
        assert each.value["places"][0].startswith(str(memory))
        assert len(each.value["places"]) == 1
    # And again, of another host.
    hosts.lose((lost + 1) % count)
    assert starts(ended(root, hosts)) == {(4, True)}
    # A clean end gives all memory back.
    assert [list(each.iterdir()) for each in hosts.folders] == [[]] * count


def test_processes_may_come_back_with_other_numbers(tmp_path: Path, memory: Path) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 4)
    killed(root, hosts)
    hosts.swap(0, 3)
    hosts.swap(1, 2)
    hosts.lose(2)
    assert starts(ended(root, hosts)) == {(2, True)}


def test_a_loss_of_host_and_peer_goes_on_from_the_root(tmp_path: Path, memory: Path) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 3)
    killed(root, hosts)
    hosts.lose(0)
    hosts.lose(1)
    assert starts(ended(root, hosts)) == {(0, True)}


def test_a_run_that_goes_back_does_not_find_what_came_after(tmp_path: Path, memory: Path) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 3)
    killed(root, hosts, first=10)
    killed(root, hosts, 1, first=5)
    hosts.lose(0)
    assert starts(ended(root, hosts)) == {(6, True)}


def test_a_snapshot_that_was_deleted_is_not_found_again(tmp_path: Path, memory: Path) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    killed(root, hosts, 1, delete=0)
    assert hosts.held() == {0: [], 1: []}
    hosts.lose(0)
    assert starts(ended(root, hosts)) == {(0, True)}
