"""The random state handler, for numpy's random generators: their exact state."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ckpt._format.manifest import ItemEntry
from ckpt._plan.adapt import Adapt
from ckpt._tree.registered_nodes import held, lost_attribute
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, TargetMismatchError
from ckpt.handlers._base import Deferred, ItemReader, ItemWriter, entry_data, text_of
from ckpt.handlers._json import json_bytes, json_value

_FILE = "state.json"
# A name from a file is looked up only here.
_BIT_GENERATORS: Mapping[str, type[np.random.BitGenerator]] = MappingProxyType(
    {
        "MT19937": np.random.MT19937,
        "PCG64": np.random.PCG64,
        "PCG64DXSM": np.random.PCG64DXSM,
        "Philox": np.random.Philox,
        "SFC64": np.random.SFC64,
    }
)
_KINDS: Mapping[str, type] = MappingProxyType(
    {
        "generator": np.random.Generator,
        "bit_generator": np.random.BitGenerator,
        "random_state": np.random.RandomState,
    }
)
# numpy does not check these numbers, and would read past its buffers with greater ones.
_GREATEST = {"pos": 624, "buffer_pos": 4, "has_gauss": 1, "has_uint32": 1, "uinteger": 2**32 - 1}
# Largest pool of a seed sequence. numpy's own is 4; the time to make one grows with its square.
_MOST_POOL = 256


class RandomStateHandler:
    """Saves `np.random.Generator`, `BitGenerator` and `RandomState` with numpy's bit generators.

    Example:
        ```python
        rng = np.random.default_rng(0)
        await mgr.save(step, items={"model": state, "rng": rng})
        ```
    """

    name = "random_state"
    # Every process draws other numbers.
    per_process = True

    def accepts(self, item: Any) -> bool:
        """Return True if `item` is a random generator of numpy."""
        return isinstance(item, tuple(_KINDS.values()))

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Take the generator's state; see `Handler.stage`.

        Raises:
            InvalidArgumentError: Its bit generator is not one of numpy's own.
        """
        kind, name, encoded = await writer.in_thread(_take, item)

        async def commit() -> ItemEntry:
            await writer.write_file(_FILE, encoded)
            data = {"type": kind, "bit_generator": name}
            return ItemEntry(handler=self.name, nbytes=len(encoded), data={**data})

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        """Return `like` with its state set; without `like`, a new generator.

        A new generator goes on to `spawn` the same children; `like` keeps its own.

        Raises:
            TargetMismatchError: `like` is of another type, or has another bit generator.
            CorruptCheckpointError: The stored state is damaged.
        """
        data = entry_data(entry, self.name)
        kind, name = text_of(data, "type"), text_of(data, "bit_generator")
        if kind not in _KINDS or name not in _BIT_GENERATORS:
            raise CorruptCheckpointError(
                f"{kind!r:.40} of {name!r:.40} is not a generator of numpy"
            )
        if like is not None and like is not _KINDS[kind]:
            if not isinstance(like, _KINDS[kind]) or _name_of(like) != name:
                raise TargetMismatchError(
                    f"the item is a numpy {_KINDS[kind].__name__} with the bit generator {name}, "
                    f"and like= is {like!r:.80}"
                )
            target = like
        else:
            target = None
        document = json_value(await reader.read_file(_FILE))
        return await reader.in_thread(_restored, kind, name, document, target)


def _bit_generator(item: Any) -> Any:
    return item.bit_generator if isinstance(item, np.random.Generator) else item


def _name_of(item: Any) -> str:
    if isinstance(item, np.random.RandomState):
        state: Any = item.get_state(legacy=False)
        return str(state["bit_generator"])
    return type(_bit_generator(item)).__name__


def _take(item: Any) -> tuple[str, str, bytes]:
    kind = next((kind for kind, known in _KINDS.items() if isinstance(item, known)), None)
    if kind is None:
        raise InvalidArgumentError(
            f"expected a random generator of numpy, not an object of type {type(item).__name__}"
        )
    for attribute in held(item):
        raise lost_attribute(type(item), attribute)
    name = _name_of(item)
    seeds = None
    if kind == "random_state":
        state = item.get_state(legacy=False)
    else:
        bits = _bit_generator(item)
        if type(bits) is not _BIT_GENERATORS.get(name):
            raise InvalidArgumentError(
                f"the bit generator {name} is not one of numpy's own "
                f"({', '.join(_BIT_GENERATORS)}); save its state as bytes"
            )
        with bits.lock:
            state = bits.state
        seeds = _seeds_of(bits)
    if name not in _BIT_GENERATORS:
        raise InvalidArgumentError(f"the bit generator {name} is not one of numpy's own")
    return kind, name, json_bytes({"state": _encoded(state), "seed_sequence": seeds})


def _seeds_of(bits: Any) -> Any:
    """Return the seeds of the children of a generator, or None if they are not numpy's."""
    seeds = bits.seed_seq
    if type(seeds) is not np.random.SeedSequence:
        return None
    return _encoded({key: value for key, value in seeds.state.items() if value is not None})


def _encoded(value: Any) -> Any:
    """Return a state as JSON values; numbers as text, since numbers of JSON end at 64 bits."""
    if isinstance(value, dict):
        return {str(key): _encoded(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        stored = value.astype(value.dtype.newbyteorder("<"))
        return {"dtype": value.dtype.name, "hex": stored.tobytes().hex()}
    if isinstance(value, list | tuple):
        return [_encoded(each) for each in value]
    if isinstance(value, float):
        return {"float": value.hex()}
    return value if isinstance(value, str) else {"int": str(int(value))}


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if isinstance(value, str):
        return value
    match value:
        case {"dtype": dtype, "hex": str(text)} if dtype in ("uint32", "uint64"):
            return np.frombuffer(bytes.fromhex(text), np.dtype(dtype).newbyteorder("<")).astype(
                dtype
            )
        case {"float": str(text)}:
            return float.fromhex(text)
        case {"int": str(text)}:
            return int(text)
        case dict():
            return {key: _checked(key, _decoded(each)) for key, each in value.items()}
    raise ValueError(f"{value!r:.80}")


def _checked(key: str, value: Any) -> Any:
    if key in _GREATEST and not (type(value) is int and 0 <= value <= _GREATEST[key]):
        raise ValueError(f"{key}={value!r:.40}")
    return value


def _restored(kind: str, name: str, document: Any, target: Any) -> Any:
    """Set the whole state of `target`, or of a new generator; on failure, `target` is unchanged."""
    try:
        state = _decoded(document["state"])
        if state["bit_generator"] != name:
            raise ValueError(f"the state of another bit generator, {state['bit_generator']!r:.40}")
        made = _make_state(kind, name, document.get("seed_sequence"))
        _set_state(made, state)
        if target is None:
            return made
        _set_state(target, state)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"the stored file is not a state of {name}: {type(error).__name__}: {error!s:.200}"
        ) from error
    return target


def _make_state(kind: str, name: str, seeds: Any) -> Any:
    known = {"entropy": 0} if seeds is None else _decoded(seeds)
    if not 0 < int(known.get("pool_size", 1)) <= _MOST_POOL:
        raise ValueError("its seed sequence has a pool of a size that numpy has not")
    sequence = np.random.SeedSequence(**known)
    bits: Any = _BIT_GENERATORS[name](sequence)
    if kind == "bit_generator":
        return bits
    return np.random.Generator(bits) if kind == "generator" else np.random.RandomState(bits)


def _set_state(target: Any, state: dict[str, Any]) -> None:
    if isinstance(target, np.random.RandomState):
        target.set_state(state)
        return
    bits = _bit_generator(target)
    with bits.lock:
        bits.state = state
