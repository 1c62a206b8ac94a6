"""The tiers of a run, as users describe them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ckpt._arguments import invalid, number_of_seconds, true_or_false, whole_number
from ckpt.keep._keep_policies import KeepPolicyLike, as_keep_rules
from ckpt.save_when._save_policies import SavePolicyLike, check_save_policy
from ckpt.storage._local.config import Local
from ckpt.storage._object.config import GCS, S3

# As in `storage._resolve`, which needs TensorStore.
PathLike = str | os.PathLike[str] | Local | S3 | GCS

# No other machine can reach this address.
LOOPBACK = "127.0.0.1"
_LARGEST_PORT = 65535
# Folder of one process of a job in the directory of a tier; the group is the number of processes.
PART_FOLDER = re.compile(r"process_[0-9]+-of-([0-9]+)")
# Longer than the notice that any system gives.
_LONGEST_GRACE_SECONDS = 86400.0
_LONGEST_KEPT_SECONDS = 7 * 86400.0
_FASTEST = 1e15


@dataclass(frozen=True, slots=True)
class PeerCopies:
    """Copies of snapshots on the hosts of other processes of a job.

    In a job of n processes, the part of a snapshot that process i has saved is copied to the host
    of process i + `distance` (mod n), into shared memory. If a host is lost, a restarted job
    fetches that part from the copy, and reads no arrays from the root.

    The agents of the processes read from each other over TCP. They prove to each other that they
    know a key, which the job shares through its coordinator, and compare received parts with their
    digests. Nothing is encrypted: use a network that belongs to the job.

    Attributes:
        address: Address of this host in the network of the job; each process gives its own. The
            agent listens at no other address. The default can be reached only from the same
            machine.
        port: The port to listen at; 0 takes any free port.
        distance: Distance to the process that holds a copy. None takes the least distance at which
            as many processes as possible have their copies on another machine.

    Raises:
        InvalidArgumentError: An argument is invalid.

    Example:
        ```python
        peers = ckpt.tiers.PeerCopies(address="10.0.0.7")
        memory = ckpt.tiers.SharedMemory(peers=peers)
        mgr = ckpt.CheckpointManager("gs://bucket/runs/a", tiers=[memory])
        ```
    """

    address: str = LOOPBACK
    port: int = 0
    distance: int | None = None

    def __post_init__(self) -> None:
        of = "PeerCopies"
        address: object = self.address
        if not isinstance(address, str) or not address.strip():
            raise invalid("address", address, "an address of this host, such as '10.0.0.7'", of=of)
        if address in ("0.0.0.0", "::", "*"):
            raise invalid(
                "address", address, "one address of this host; all of them is too many", of=of
            )
        port = whole_number("port", self.port, of=of, least=0, most=_LARGEST_PORT)
        object.__setattr__(self, "port", port)
        if self.distance is not None:
            distance = whole_number("distance", self.distance, of=of, least=1)
            object.__setattr__(self, "distance", distance)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Snapshots in the memory of the host, which outlive the process.

    `CheckpointManager.snapshot` puts the state there. A process that is restarted on the same host
    finds the last whole snapshot and goes on from it. If the process dies, a small helper process,
    the agent, writes that snapshot to the root, as an ordinary step.

    Attributes:
        budget_bytes: The most memory, in bytes, that snapshots may take. A new snapshot is taken
            while the one before is kept, which needs twice the size of the state; with `peers` four
            times, or up to six while copies are slow. None is half of the memory of the machine.
        flush: True to write the last snapshot to the root when the process dies, when it gets
            SIGTERM or a signal of `save_when.Preempted`, and when the manager is closed,
            also by an exception. Newer steps in the root make this unnecessary. In a job, the
            agents of all processes write it together, once such an end has come to each of them.
        grace_seconds: Time for which this host lives on after such a signal. The agents of a job
            of several processes wait for each other no longer.
        kept_seconds: Time for which a snapshot waits for a restarted process after its process has
            died. Then its memory is released.
        directory: A folder in a file system in memory, for the snapshots.
        peers: In jobs of several processes, copies on other hosts; None for none.

    Raises:
        InvalidArgumentError: An argument is invalid.

    Example:
        ```python
        memory = ckpt.tiers.SharedMemory(budget_bytes=8 << 30)
        async with ckpt.CheckpointManager("runs/a", tiers=[memory]) as mgr:
            start, state = await mgr.resume(init_state)
            await mgr.snapshot(start, state)
        ```
    """

    budget_bytes: int | None = None
    flush: bool = True
    grace_seconds: float = 25.0
    kept_seconds: float = 3600.0
    directory: str = "/dev/shm"
    peers: PeerCopies | None = None

    def __post_init__(self) -> None:
        of = "SharedMemory"
        if self.budget_bytes is not None:
            hint = ", in bytes; or None for half of the machine's memory"
            budget = whole_number("budget_bytes", self.budget_bytes, of=of, least=1, hint=hint)
            object.__setattr__(self, "budget_bytes", budget)
        true_or_false("flush", self.flush, of=of)
        number_of_seconds("grace_seconds", self.grace_seconds, of=of, most=_LONGEST_GRACE_SECONDS)
        number_of_seconds("kept_seconds", self.kept_seconds, of=of, most=_LONGEST_KEPT_SECONDS)
        directory: object = self.directory
        if not isinstance(directory, str) or not os.path.isabs(directory):
            raise invalid("directory", directory, "the text of an absolute path: '/dev/shm'", of=of)
        peers: object = self.peers
        if peers is not None and not isinstance(peers, PeerCopies):
            hint = "ckpt.tiers.PeerCopies(address='10.0.0.7'), or None"
            raise invalid("peers", peers, hint, of=of)


@dataclass(frozen=True, slots=True)
class Tier:
    """A place for steps that is nearer than the root, such as a local disk.

    Saves are committed at the nearest tier. From there the agent copies them on, to the next tier
    or to the root, while training continues: compared with their digests, and visible there only
    once they are whole. In a job of several processes, each saves its part to a folder of its own,
    `process_I-of-N`, and their agents make one step of the root from all parts.

    Attributes:
        path: A directory, a URL, or a store of `ckpt.storage`, as for the root of a manager. In a
            job it is a directory.
        keep: The steps that stay here, as for a manager. Steps that still wait to be copied on
            stay, too. None keeps all.
        drain: The steps that are copied on: a policy of `ckpt.save_when`, such as
            `EverySteps(1000)`, or a function of step, previous steps and `SaveContext`. None
            copies all. The newest step is copied in any case when the run ends, however it ends.
        bytes_per_second: The most bytes per second with which steps are copied on; None for no
            limit.
        most_waiting: The most steps that may wait for the next place while it is slow or cannot be
            reached. If more wait, the oldest one is given up, with an error in the log.

    Raises:
        InvalidArgumentError: An argument is invalid.

    Example:
        ```python
        disk = ckpt.tiers.Tier("nvme/run", keep=ckpt.keep.Latest(2))
        async with ckpt.CheckpointManager("runs/a", tiers=[disk]) as mgr:
            commit = await mgr.save(step, state)
            await commit  # on the disk
            await commit.in_root  # in the root, too
        ```
    """

    path: PathLike
    keep: KeepPolicyLike | int | None = None
    drain: SavePolicyLike | None = None
    bytes_per_second: float | None = None
    most_waiting: int = 16

    def __post_init__(self) -> None:
        if self.keep is not None:
            as_keep_rules(self.keep)
        if self.drain is not None:
            check_save_policy(self.drain)
        rate: object = self.bytes_per_second
        if rate is not None and not (
            isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < _FASTEST
        ):
            raise invalid("bytes_per_second", rate, "a number above 0, or None", of="Tier")
        most = whole_number("most_waiting", self.most_waiting, of="Tier", least=1)
        object.__setattr__(self, "most_waiting", most)
