"""`JaxMonitoring`: an observer that reports to `jax.monitoring`, under the names of `JAX`."""

from __future__ import annotations

from ckpt._arguments import invalid
from ckpt._events import Event
from ckpt.observers._names import BYTES, JAX, Operations


class JaxMonitoring:
    """Reports saves, restores and other operations to `jax.monitoring`.

    When an operation has ended, all listeners there get its outcome and, if it succeeded, the
    durations of the operation and its phases. docs/how-to/observing.md lists the names. Each
    follows the prefix and a slash: `/ckpt/save/ok`.

    Any number of managers may share one.

    Args:
        prefix: The beginning of every name.

    Raises:
        InvalidArgumentError: `prefix` is not a string, or is empty.

    Example:
        ```python
        mgr = ckpt.CheckpointManager(root, observers=[ckpt.observers.JaxMonitoring()])
        ```
    """

    def __init__(self, prefix: str = "/ckpt") -> None:
        if type(prefix) is not str or not prefix.rstrip("/"):
            what = "the beginning of the names, such as '/ckpt'"
            raise invalid("prefix", prefix, what, of="JaxMonitoring")
        # Imported late, so that tools can import the observers without jax.
        from jax import monitoring

        self._monitoring = monitoring
        self._prefix = prefix.rstrip("/")
        self._operations = Operations()

    def __call__(self, event: Event) -> None:
        """Take one event; called by the library."""
        found = self._operations.take(event)
        if found is None:
            return
        if found.end is not None:
            self._record(f"{found.name}/{found.end.outcome}")
            if found.is_ok:
                seconds = (found.end.ended_ns - found.end.began_ns) / 1e9
                self._record(f"{found.name}/seconds", seconds)
                self._record(f"{found.name}/bytes", found.end.nbytes)
        if found.is_ok:
            for phase in found.phases:
                self._record(f"{found.name}/{phase.name}_seconds", phase.seconds)
                moved = BYTES.get((found.name, phase.name))
                if moved is not None:
                    self._record(f"{found.name}/{moved}", phase.nbytes)

    def _record(self, name: str, value: float = 0) -> None:
        known = JAX.get(name)
        full = f"{self._prefix}/{name}"
        # Only names in the table are reported, so that every name is documented.
        if known is None:
            return
        if known == "event":
            self._monitoring.record_event(full)
        elif known == "duration":
            self._monitoring.record_event_duration_secs(full, value)
        else:
            self._monitoring.record_scalar(full, value)
