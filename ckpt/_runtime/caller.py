"""Settings of jax in the calling thread, for the threads that do the work.

A mesh, a default device and the switch for 64 bits hold for one thread alone if they are set by a
`with` block, or by `jax.set_mesh`. Settings of the whole program, such as a guard against transfers
that nobody has asked for, are meant for the program's own code: a save was asked for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    import jax


class Caller(Struct, frozen=True):
    """The settings of a calling thread.

    Attributes:
        mesh: The mesh that is set; None without one. An abstract mesh has no devices.
        device: Device for new arrays, or the name of its platform; None leaves it to jax.
        x64: True if jax may have numbers of 64 bits; None leaves it to the thread that asks.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
    device: Any = None
    x64: bool | None = None


# Settings that would forbid or change the library's own work, with the values that it needs.
_OURS = (
    *(
        (f"transfer_guard{which}", "allow")
        for which in ("", "_host_to_device", "_device_to_device", "_device_to_host")
    ),
    ("debug_nans", False),
    ("debug_infs", False),
    ("disable_jit", False),
    ("enable_checks", False),
    ("numpy_rank_promotion", "allow"),
    ("numpy_dtype_promotion", "standard"),
)
_CALLER: ContextVar[Caller] = ContextVar("ckpt_caller")


def look() -> Caller:
    """Return the settings of this thread."""
    jax = _jax()
    if jax is None:
        return Caller()
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        # jax refuses this while it traces a function.
        with contextlib.suppress(ValueError):
            concrete = jax.sharding.get_mesh()
            mesh = mesh if concrete.empty else concrete
    config = jax.config
    return Caller(None if mesh.empty else mesh, config.jax_default_device, config.jax_enable_x64)


def serve(caller: Caller) -> None:
    """Work for a caller from now on, in this task and in all that it starts."""
    _CALLER.set(caller)


def caller() -> Caller:
    """Return the settings of the thread that this task works for, or else of this thread."""
    found = _CALLER.get(None)
    # The caller may have called before jax was imported.
    return look() if found is None or found.x64 is None else found


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Run the body in this thread as if the program had set nothing but the switch for 64 bits."""
    jax = _jax()
    with contextlib.ExitStack() as stack:
        if jax is not None:
            wanted = [*_OURS, ("enable_x64", caller().x64)]
            for name, value in wanted:
                if getattr(jax.config, f"jax_{name}") not in (value, None):
                    stack.enter_context(getattr(jax, name)(value))
        yield


def _jax() -> Any:
    """Return jax; None in a program without it, or while another thread imports it."""
    jax = sys.modules.get("jax")
    # A module that is being imported does not have all of its parts.
    return None if getattr(getattr(jax, "__spec__", None), "_initializing", False) else jax
