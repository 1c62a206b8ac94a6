"""A job that has lost a host goes on from memory: its peer has held its part."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.peer_jobs import (
    DEVICES,
    PROGRAM,
    Hosts,
    agent_of,
    kill_agent,
    settings,
    wait_for_line,
)
from tests.support.ports import free_port
from tests.support.real_jobs import Job, Result, run_processes, started
from tests.support.snapshots import shared_memory


@pytest.fixture
def memory() -> Iterator[Path]:
    with shared_memory() as folder:
        yield folder


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


@contextlib.contextmanager
def running(root: Path, hosts: Hosts, **given: Any) -> Iterator[Job]:
    """Run a job, which may stand at pauses."""
    count = len(hosts.folders)
    told = settings(hosts, given.pop("then", "wait"), 0, **given)
    with started(count, PROGRAM, root, told, devices_per_process=DEVICES[count]) as job:
        yield job


def paused(job: Job, after: Sequence[int] = ()) -> None:
    """Wait until all stand at the next pause, and let them go on with the next call of this."""
    for child in job.children:
        for step in after:
            wait_for_line(child, f"held {step}")
        child.reached("pause")


def go_on(job: Job) -> None:
    for child in job.children:
        child.go_on()


def end_all(job: Job) -> Sequence[Result]:
    for child in job.children:
        child.reached("the end")
    for child in job.children:
        child.kill()
    return job.results()


def starts(results: Sequence[Result]) -> set[tuple[int, bool]]:
    return {(each.value["start"], each.value["right"]) for each in results}


@pytest.mark.parametrize(("count", "lost"), [(2, 0), (4, 3)])
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
    root, hosts = tmp_path / "run", Hosts(memory, 2)
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


def test_a_run_that_goes_back_in_the_middle_has_copies_of_what_comes_then(
    tmp_path: Path, memory: Path
) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    results = killed(root, hosts, steps=[10, 11, 5, 6])
    assert [each.value["skipped"] for each in results] == [[]] * 2
    assert hosts.held() == {0: [(1, 6)], 1: [(0, 6)]}
    hosts.lose(1)
    assert starts(ended(root, hosts)) == {(7, True)}


def test_a_run_that_goes_back_without_its_agents_does_not_find_what_came_after(
    tmp_path: Path, memory: Path
) -> None:
    """They were killed, and what they hold is forgotten all the same."""
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    with running(root, hosts, steps=[10, None, 5]) as job:
        paused(job, [10])
        for child in job.children:
            kill_agent(child)
        go_on(job)
        end_all(job)
    held = hosts.held()
    assert {step for each in held.values() for _, step in each} <= {5}
    hosts.lose(1)
    [(start, right)] = starts(ended(root, hosts))
    assert (start, right) in {(6, True), (0, True)}


def test_a_run_without_copies_forgets_those_of_the_run_before(tmp_path: Path, memory: Path) -> None:
    """It goes back, and the next one has copies again."""
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    killed(root, hosts, steps=[10])
    killed(root, hosts, steps=[5], no_peers=True)
    assert starts(ended(root, hosts)) == {(6, True)}


def test_two_hosts_are_lost_one_after_the_other(tmp_path: Path, memory: Path) -> None:
    """No snapshot is taken in between: the copies that went with the first one are made anew."""
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    killed(root, hosts)
    hosts.lose(0)
    assert starts(killed(root, hosts, 0)) == {(2, True)}
    assert hosts.held() == {0: [(1, 1)], 1: [(0, 1)]}
    hosts.lose(1)
    assert starts(ended(root, hosts)) == {(2, True)}


def test_copies_under_old_numbers_go_again(tmp_path: Path, memory: Path) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 3)
    killed(root, hosts)
    hosts.swap(0, 1)
    assert starts(killed(root, hosts, 1)) == {(2, True)}
    assert hosts.held() == {0: [(2, 2)], 1: [(0, 2)], 2: [(1, 2)]}


def test_an_agent_that_was_killed_is_made_good(tmp_path: Path, memory: Path) -> None:
    """The next snapshot is copied already, though another agent listens at another port."""
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    with running(root, hosts, steps=[0, None, 1]) as job:
        paused(job, [0])
        kill_agent(job[1])
        go_on(job)
        results = end_all(job)
    assert [each.value["skipped"] for each in results] == [[]] * 2
    assert not any("is not held here" in each.errors for each in results)
    assert hosts.held() == {0: [(1, 1)], 1: [(0, 1)]}
    hosts.lose(1)
    assert starts(ended(root, hosts)) == {(2, True)}


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 2])
def test_an_agent_that_is_stopped_is_named_and_replaced(
    stopped: int, tmp_path: Path, memory: Path
) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 3)
    with running(root, hosts, steps=[0, None, 1, 2, 3], seconds=15.0) as job:
        paused(job, [0])
        os.kill(agent_of(job[stopped]), signal.SIGSTOP)
        go_on(job)
        results = end_all(job)
    assert [each.value["skipped"] for each in results] == [[]] * 3
    said = results[stopped].errors
    assert "its agent does not answer within 15 s" in said or "it is started again" in said
    assert all(("started again" in each.errors) is (each.index == stopped) for each in results)
    assert hosts.held() == {0: [(2, 3)], 1: [(0, 3)], 2: [(1, 3)]}
    hosts.lose(stopped)
    assert starts(ended(root, hosts)) == {(4, True)}


def test_a_port_that_is_taken_leaves_a_run_without_copies(tmp_path: Path, memory: Path) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        results = killed(root, hosts, ports=[0, port])
    for each in results:
        assert f"process 1: it cannot listen at 127.0.0.1:{port}: Address already" in each.errors
        assert each.errors.count("Training goes on without copies on peers") == 1
        assert each.value["skipped"] == []
        assert each.value["steps"] == [1]
    # What all have is found again.
    assert starts(ended(root, hosts)) == {(2, True)}


def test_an_address_of_another_host_leaves_a_run_without_copies(
    tmp_path: Path, memory: Path
) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    for each in ended(root, hosts, addresses=["203.0.113.7", "127.0.0.1"]):
        assert "process 0: it cannot listen at 203.0.113.7: Cannot assign" in each.errors
        assert each.value["skipped"] == []


def test_a_fixed_port_is_used_again_by_the_next_agent(tmp_path: Path, memory: Path) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    with running(root, hosts, steps=[0, None, 1], ports=[free_port(), 0]) as job:
        paused(job, [0])
        kill_agent(job[0])
        go_on(job)
        end_all(job)
    assert hosts.held() == {0: [(1, 1)], 1: [(0, 1)]}


def test_several_machines_need_addresses_that_others_reach(tmp_path: Path, memory: Path) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    boot_ids = [tmp_path / "a", tmp_path / "b"]
    for path in boot_ids:
        path.write_text(path.name)
    for each in ended(root, hosts, boot_ids=[str(each) for each in boot_ids]):
        assert "runs on 2 machines, and process 0 listens at 127.0.0.1" in each.errors
        assert "give PeerCopies(address=...)" in each.errors
        assert each.value["skipped"] == []


def test_processes_of_a_machine_have_their_copies_on_another(tmp_path: Path, memory: Path) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 4)
    machines = [tmp_path / each for each in "aabb"]
    for each in machines:
        each.write_text(each.name)
    # Reached all the same: these are no addresses of the loopback as far as a job can tell.
    names = [socket.gethostname()] * 4
    killed(root, hosts, 1, boot_ids=[str(each) for each in machines], addresses=names)
    assert hosts.held() == {0: [(2, 0)], 1: [(3, 0)], 2: [(0, 0)], 3: [(1, 0)]}


def test_a_host_without_room_leaves_the_snapshot_before(tmp_path: Path, memory: Path) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    results = killed(root, hosts, steps=[0, 1, 2], full=1)
    assert [len(each.value["skipped"]) for each in results] == [2] * 2
    assert all(each.value["steps"] == [0] for each in results)
    assert all("File too large" in why for each in results for why in each.value["skipped"])
    hosts.lose(0)
    assert starts(ended(root, hosts)) == {(1, True)}


def test_a_damaged_copy_is_named_and_the_job_goes_on_from_the_root(
    tmp_path: Path, memory: Path
) -> None:
    """All processes do: none goes on from a part that others lack."""
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    killed(root, hosts)
    hosts.lose(0)
    hosts.damage(1, "ckpt-*/*/held/0/1")
    results = ended(root, hosts)
    assert starts(results) == {(0, True)}
    assert "process 1 at 127.0.0.1:" in results[0].errors
    assert "was changed after it was saved" in results[0].errors


def test_snapshots_that_are_faster_than_copies_stay_within_bounds(
    tmp_path: Path, memory: Path
) -> None:
    """Those that are not taken say why; and when copies go on, so do they."""
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    steps = [0, None, *range(1, 9), None, 20]
    with running(root, hosts, steps=steps, wait_for="nothing", look=True) as job:
        paused(job)
        agent = agent_of(job[1])
        os.kill(agent, signal.SIGSTOP)
        go_on(job)
        paused(job)
        os.kill(agent, signal.SIGCONT)
        go_on(job)
        results = end_all(job)
    for each in results:
        assert 1 <= each.value["most"]["own"] <= 4
        assert 1 <= each.value["most"]["held"] <= 2
        assert each.value["skipped"]
        assert all("take snapshots less often" in why for why in each.value["skipped"])
    assert len({str(each.value["steps"]) for each in results}) == 1


def test_what_a_killed_job_has_left_does_not_keep_the_next_one_from_snapshots(
    tmp_path: Path, memory: Path
) -> None:
    """Each host has as many as there may be."""
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    with running(root, hosts, steps=[0, "wait", None, 1, 2, 3], wait_for="commits") as job:
        paused(job)
        agents = [agent_of(child) for child in job.children]
        os.kill(agents[1], signal.SIGSTOP)
        go_on(job)
        for child in job.children:
            wait_for_line(child, "saved 3")
        assert hosts.own(0) == [0, 1, 2, 3]
        for child in job.children:
            child.kill()
        for agent in agents:
            os.kill(agent, signal.SIGKILL)
    results = killed(root, hosts, 2)
    assert starts(results) == {(4, True)}
    assert [each.value["skipped"] for each in results] == [[]] * 2
    assert hosts.own(0) == [5]
    assert hosts.held() == {0: [(1, 5)], 1: [(0, 5)]}


def test_a_process_that_fails_leaves_its_part_in_memory(tmp_path: Path, memory: Path) -> None:
    root, hosts = tmp_path / "run", Hosts(memory, 2)
    told = settings(hosts, "raise", 2)
    with started(2, PROGRAM, root, told, devices_per_process=DEVICES[2]) as job:
        for each in job.results():
            assert "RuntimeError: on purpose" in each.errors
            assert "the last snapshot stays in memory" in each.errors
    hosts.lose(1)
    assert starts(ended(root, hosts)) == {(2, True)}
