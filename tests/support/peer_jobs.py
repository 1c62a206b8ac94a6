"""Jobs whose snapshots have copies on the hosts of peers; each host is a folder."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
from pathlib import Path
from typing import Any

from tests.support.real_jobs import PATIENCE_S, Child

__all__ = ["DEVICES", "PROGRAM", "Hosts", "agent_of", "kill_agent", "settings", "wait_for_line"]

PROGRAM = "peers_in_job.py"
# Of each process, by how many there are.
DEVICES = {2: 2, 3: 1, 4: 1}


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

    def damage(self, number: int, where: str) -> None:
        """Flip a bit in the middle of the largest file of a step."""
        files = [each for each in self.folders[number].glob(f"{where}/**/*") if each.is_file()]
        path = max(files, key=lambda each: (each.stat().st_size, str(each)))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        # Parts that are unchanged share their files.
        path.unlink()
        path.write_bytes(data)

    def own(self, number: int) -> list[int]:
        """Return the snapshots that a process has of its own."""
        found = self.folders[number].glob("ckpt-*/*/steps/*")
        return sorted(int(each.name) for each in found if each.name.isdecimal())

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


def agent_of(child: Child) -> int:
    return int(next(each for each in child.lines if each.startswith("agent ")).split()[1])


def kill_agent(child: Child) -> None:
    """Kill an agent, and wait until it is dead: on a busy machine that takes its time."""
    pid = agent_of(child)
    dies = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([dies], [], [], PATIENCE_S)[0]
    finally:
        os.close(dies)


def wait_for_line(child: Child, line: str) -> None:
    child.wait_for(lambda lines: line in lines, f"no {line!r}", PATIENCE_S)
