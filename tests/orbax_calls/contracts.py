"""What a program sees of Orbax, in Orbax's own calls: each contract is run on both modules.

A contract is a generator. It gets a module (`orbax.checkpoint`, or `ckpt_orbax`) and an empty
directory, and yields what it sees. What Orbax gives is not written down: it is found in the same
run. Where `ckpt_orbax` differs, the decorator says why, and which outcomes differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "CONTRACTS",
    "REFUSED",
    "Contract",
    "contract",
    "differs",
    "outcomes",
    "refuses",
    "tried",
]

Body = Callable[[Any, Path], Iterator[Any]]

# The outcome of what `ckpt_orbax` refuses.
REFUSED = "NotImplementedError"
# Errors that programs catch, the most special first.
_ERRORS = (
    *(FileNotFoundError, FileExistsError, KeyError, ValueError, TypeError, NotImplementedError),
    *(AttributeError, OSError),
)


@dataclass(frozen=True)
class Contract:
    """A contract.

    Attributes:
        name: Its name.
        body: Its calls.
        why: Why `ckpt_orbax` differs; empty if it does not.
        differs: What `ckpt_orbax` yields, by number of the outcome, where it differs.
    """

    name: str
    body: Body
    why: str = ""
    differs: Mapping[int, Any] = field(default_factory=dict)

    @property
    def is_refused(self) -> bool:
        """True if `ckpt_orbax` refuses what Orbax does."""
        return REFUSED in self.differs.values()


CONTRACTS: dict[str, Contract] = {}


def contract(function: Body) -> Body:
    """Add a contract that holds."""
    return _added(function, "", {})


def differs(why: str, outcomes: Mapping[int, Any]) -> Callable[[Body], Body]:
    """Add a contract of which some outcomes differ, for a reason."""
    return lambda function: _added(function, why, outcomes)


def refuses(what: str) -> Callable[[Body], Body]:
    """Add a contract of one outcome that is refused."""
    return lambda function: _added(function, what, {0: REFUSED})


def _added(function: Body, why: str, outcomes: Mapping[int, Any]) -> Body:
    assert inspect.isgeneratorfunction(function)
    name = function.__name__
    assert name not in CONTRACTS
    CONTRACTS[name] = Contract(name, function, why, outcomes)
    return function


def tried(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the kind of its error."""
    try:
        return call()
    except Exception as error:
        if type(error).__name__ == "StepAlreadyExistsError":
            return "StepAlreadyExistsError"
        return next((each.__name__ for each in _ERRORS if isinstance(error, each)), repr(error))


def outcomes(each: Contract, module: Any, root: Path) -> list[Any]:
    """Return what a contract yields, in a form that can be compared."""
    return [_plain(outcome) for outcome in each.body(module, root)]


def _plain(value: Any) -> Any:
    if isinstance(value, jax.Array):
        place = _place(value.sharding)
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(value).tolist()
            return ["key", str(jax.random.key_impl(value)), data, place]
        return ["jax", str(value.dtype), np.asarray(value).tolist(), place]
    if isinstance(value, np.ndarray):
        return ["numpy", str(value.dtype), value.tolist()]
    if isinstance(value, np.generic):
        return [str(value.dtype), value.item()]
    if isinstance(value, Mapping) or type(value).__name__ in ("Composite", "CompositeArgs"):
        return {str(key): _plain(each) for key, each in sorted(value.items())}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [type(value).__name__, *map(_plain, value)]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_plain, value)]
    return value


def _place(sharding: Any) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{sharding.spec} on {dict(sharding.mesh.shape)}"
    return f"{len(sharding.device_set)} device"
