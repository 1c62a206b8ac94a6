"""What each leaf is: its kind, dtype, shape and sharding, and the text form of Python scalars."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from ckpt.manifest import LeafEntry

__all__ = [
    "ARRAY_KINDS",
    "SCALAR_KINDS",
    "Classifier",
    "LeafSpec",
    "classify",
    "decode_scalar",
    "encode_scalar",
    "parse_dtype",
    "scalar_array",
]

ARRAY_KINDS = frozenset({"jax", "numpy", "numpy_scalar"})
SCALAR_KINDS = frozenset({"bool", "int", "float", "complex", "str", "bytes"})

# A closed list: dtypes are parsed from files, and only these may come out of one.
_NUMPY_DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
_ML_DTYPES = [
    "bfloat16",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn",
    "int2",
    "int4",
    "uint2",
    "uint4",
]
DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in _NUMPY_DTYPES},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES if hasattr(ml_dtypes, name)},
}


# A train state has fewer different leaves than this; a program that saves ever new ones must not
# fill the memory.
_MOST_KNOWN = 100_000


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What a leaf is, without its values.

    Two trees whose specs and structure are equal are saved by the same plan.

    Attributes:
        kind: As in the manifest.
        dtype: Name of the logical dtype; of a Python scalar that of the array under which other
            readers find it, or None where there is no such array.
        shape: Global shape.
        sharding: Where a `jax.Array` lies; None for everything else.
        committed: Whether a `jax.Array` is bound to its place; jax moves others freely.
        weak_type: Whether a `jax.Array` is weakly typed.
    """

    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    sharding: jax.sharding.Sharding | None = None
    committed: bool = True
    weak_type: bool = False

    @property
    def nbytes(self) -> int:
        """Logical bytes of the whole array; 0 where there is none."""
        if self.dtype is None:
            return 0
        return int(np.prod(self.shape, dtype=object)) * DTYPES[self.dtype].itemsize


def parse_dtype(name: str | None) -> np.dtype[Any]:
    """Return the dtype called `name` in a manifest.

    Raises:
        CorruptCheckpointError: The name is not in the closed list of storable dtypes.
    """
    found = DTYPES.get(name or "")
    if found is None:
        raise CorruptCheckpointError(f"a stored leaf has the unknown dtype {name!r:.80}")
    return found


def classify(leaf: Any, name: str) -> LeafSpec:
    """Return what `leaf` is.

    Args:
        leaf: A leaf of a tree about to be saved.
        name: Its stored name, for messages.

    Raises:
        UnsupportedLeafError: The leaf is of a kind or dtype that cannot be stored, or an array
            whose buffer is gone (donated or deleted).
    """
    if isinstance(leaf, jax.Array):
        return _classify_jax(leaf, name)
    if isinstance(leaf, np.ndarray | np.generic):
        kind = "numpy" if isinstance(leaf, np.ndarray) else "numpy_scalar"
        if type(leaf) is not np.ndarray and kind == "numpy":
            raise UnsupportedLeafError(
                f"an array of the numpy subclass {type(leaf).__name__} cannot be stored; "
                "pass np.asarray(...) of it",
                leaf=name,
            )
        # np.generic holds str_, bytes_, datetime64 and void too; the dtype decides.
        return LeafSpec(kind, _dtype_name(leaf.dtype, name), leaf.shape)
    if type(leaf) in (bool, int, float, complex, str, bytes):
        if type(leaf) is str and not _is_unicode(leaf):
            raise UnsupportedLeafError(
                "a string with lone surrogates cannot be stored; save it as bytes", leaf=name
            )
        array = scalar_array(type(leaf).__name__, leaf)
        return LeafSpec(type(leaf).__name__, None if array is None else array.dtype.name)
    raise UnsupportedLeafError(
        f"a leaf of type {type(leaf).__module__}.{type(leaf).__qualname__} cannot be stored; "
        "leaves are jax or numpy arrays, numpy scalars, bool, int, float, complex, str or bytes",
        leaf=name,
    )


class Classifier:
    """Classifies leaves, and knows again what it has seen.

    What a jax array is follows from its type, its abstract value and its sharding, and the arrays
    of one train state share few of them: step after step, the very same objects. Looking one up
    costs 0.5 us, classifying it 7 us. Equal leaves get the same spec object, so that comparing the
    specs of two saves is comparing identities.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        # By identity, since hashing a sharding is slow; the objects are kept, so that no identity
        # is given to another one meanwhile.
        self._known: dict[tuple[int, int, bool, type], tuple[Any, Any, LeafSpec]] = {}
        self._specs: dict[LeafSpec, LeafSpec] = {}

    def classify(self, leaf: Any, name: str) -> LeafSpec:
        """Return what `leaf` is; see `classify`."""
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
            return classify(leaf, name)
        if leaf.is_deleted():
            return classify(leaf, name)
        aval, sharding = leaf.aval, leaf.sharding
        key = (id(aval), id(sharding), leaf.committed, type(leaf))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
                self._specs.clear()
            spec = classify(leaf, name)
            known = self._known[key] = (aval, sharding, self._specs.setdefault(spec, spec))
        return known[2]


def _classify_jax(leaf: jax.Array, name: str) -> LeafSpec:
    if isinstance(leaf, jax.core.Tracer):
        raise UnsupportedLeafError(
            "a traced value has no bytes to store; call save() outside jit, grad and vmap",
            leaf=name,
        )
    if leaf.is_deleted():
        raise UnsupportedLeafError(
            "the array's buffer is gone: it was donated to a jitted function or deleted before "
            "save() was called. Save the function's output instead of its donated input.",
            leaf=name,
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise UnsupportedLeafError(
            "typed PRNG keys cannot be stored yet; save jax.random.key_data(key) and rebuild "
            "with jax.random.wrap_key_data",
            leaf=name,
        )
    if not leaf.is_fully_addressable:
        raise UnsupportedLeafError(
            "the array has shards on devices of other processes; this version saves from one "
            "process only",
            leaf=name,
        )
    if getattr(getattr(leaf.sharding, "spec", None), "unreduced", None):
        raise UnsupportedLeafError(
            "the array is a sum that was not computed yet (unreduced); reshard it first", leaf=name
        )
    dtype = _dtype_name(leaf.dtype, name)
    return LeafSpec("jax", dtype, leaf.shape, leaf.sharding, leaf.committed, leaf.weak_type)


def _dtype_name(dtype: np.dtype[Any], name: str) -> str:
    text = dtype.name
    if DTYPES.get(text) != dtype:
        hint = "; convert it to native byte order" if DTYPES.get(text) else ""
        raise UnsupportedLeafError(f"arrays of dtype {dtype} cannot be stored{hint}", leaf=name)
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def scalar_array(kind: str, value: Any) -> np.ndarray[Any, Any] | None:
    """Return the 0-d array under which zarr readers find a Python scalar, or None for none.

    The exact value is in the manifest; the array is there for other readers only. An int beyond 64
    bits has no such array.
    """
    if kind == "bool":
        return np.asarray(value, np.bool_)
    if kind == "int" and -(2**63) <= value < 2**63:
        return np.asarray(value, np.int64)
    if kind == "float":
        return np.asarray(value, np.float64)
    return None


def encode_scalar(kind: str, value: Any) -> str | bool:
    """Return the manifest form of a Python scalar; exact, but for the payload of a NaN."""
    if kind in ("bool", "str"):
        return value  # type: ignore[no-any-return]
    if kind == "int":
        # Hexadecimal beyond 64 bits: Python limits how long a decimal text it converts.
        return str(value) if -(2**63) <= value < 2**63 else hex(value)
    if kind == "bytes":
        return base64.b64encode(value).decode()
    return repr(value)


def decode_scalar(entry: LeafEntry) -> Any:
    """Return the Python scalar of a manifest entry; the inverse of `encode_scalar`.

    Raises:
        CorruptCheckpointError: The text is not a value of its kind.
    """
    value = entry.value
    try:
        match entry.kind, value:
            case "bool", bool():
                return value
            case "str", str():
                return value
            case "int", str():
                return int(value, 0)
            case "float", str():
                return float(value)
            case "complex", str():
                return complex(value)
            case "bytes", str():
                return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"the stored value {value!r:.60} is not a {entry.kind}", leaf=entry.name
        ) from error
    raise CorruptCheckpointError(
        f"a stored leaf of kind {entry.kind!r:.60} has the value {value!r:.60}", leaf=entry.name
    )
