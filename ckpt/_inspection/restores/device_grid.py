"""A grid of planned devices: the regions of arrays on each of them, without jax and devices.

A partition spec names, for every dimension of an array, the axes of the mesh over which it is cut.
The parts are equal, and devices that differ only in other axes hold the same part. This is the rule
of `jax.sharding.NamedSharding`, which also refuses parts that would not be equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from ckpt._format.regions import Region, whole
from ckpt.errors import InvalidArgumentError

Shape = tuple[int, ...]
# For every dimension, the axes of the mesh over which it is cut, the slowest first; dimensions at
# the end may be left out.
Spec = tuple[tuple[str, ...], ...]

# A plan for more devices takes minutes.
MOST_DEVICES = 1 << 16


class HeldPart(Struct, frozen=True):
    """The part of an array on the devices of one process.

    Attributes:
        regions: The distinct regions.
        elements: Number of elements on all of its devices, including replicas.
    """

    regions: tuple[Region, ...]
    elements: int


def everything(shape: Shape) -> HeldPart:
    """Return the part of a process that has the whole array once."""
    return HeldPart((whole(shape),), math.prod(shape))


class DeviceGrid(Struct, frozen=True):
    """A mesh of devices, each of which belongs to a process.

    Attributes:
        axes: Sizes of its axes, by name and in their order.
        owners: The process of every device, in C order of the mesh.
    """

    axes: Mapping[str, int]
    owners: tuple[int, ...]
    _known: dict[tuple[Shape, Spec], dict[int, HeldPart]] = field(default_factory=dict)

    def held(self, shape: Shape, spec: Spec) -> dict[int, HeldPart]:
        """Return the part of every process; `spec_problem` must have found nothing."""
        if (shape, spec) not in self._known:
            regions = regions_of(shape, spec, self.axes)
            mine: dict[int, list[Region]] = {}
            for owner, region in zip(self.owners, regions, strict=True):
                mine.setdefault(owner, []).append(region)
            self._known[shape, spec] = {
                owner: HeldPart(tuple(dict.fromkeys(each)), sum(region.size for region in each))
                for owner, each in mine.items()
            }
        return self._known[shape, spec]


def grid_of(axes: Mapping[str, int], processes: int) -> DeviceGrid:
    """Return a mesh whose devices are divided among processes in their order.

    Raises:
        InvalidArgumentError: The devices cannot be divided, or there are too many.
    """
    count = math.prod(axes.values())
    if count > MOST_DEVICES:
        raise InvalidArgumentError(
            f"a mesh of {count:,} devices; at most {MOST_DEVICES:,} are planned for"
        )
    if count % processes:
        raise InvalidArgumentError(
            f"{count} devices cannot be divided among {processes} processes. Give a number of "
            f"processes that divides {count}"
        )
    each = count // processes
    return DeviceGrid(axes, tuple(number // each for number in range(count)))


def spec_problem(shape: Shape, spec: Spec, axes: Mapping[str, int]) -> str | None:
    """Return the reason why an array cannot be cut by a spec, or None."""
    if len(spec) > len(shape):
        return f"it has {len(shape)} dimensions, and the spec is for {len(spec)}"
    names = list(itertools.chain(*spec))
    if len(set(names)) < len(names):
        return "one axis of the mesh cuts two dimensions"
    for number, (length, over) in enumerate(zip(shape, spec, strict=False)):
        parts = math.prod(axes[name] for name in over)
        if length % parts:
            return (
                f"dimension {number} of {length} elements is not divisible by the {parts} parts of "
                f"{'+'.join(over)}"
            )
    return None


def shard_shape(shape: Shape, spec: Spec, axes: Mapping[str, int]) -> Shape:
    """Return the shape of the equal parts of an array; `spec_problem` must have found nothing."""
    cut = [math.prod(axes[name] for name in over) for over in spec]
    cut += [1] * (len(shape) - len(cut))
    return tuple(length // parts for length, parts in zip(shape, cut, strict=True))


def regions_of(shape: Shape, spec: Spec, axes: Mapping[str, int]) -> Sequence[Region]:
    """Return the region on every device, in C order of the mesh."""
    place = {name: number for number, name in enumerate(axes)}
    cuts = [tuple((place[name], axes[name]) for name in over) for over in spec]
    cuts += [()] * (len(shape) - len(cuts))
    lengths = shard_shape(shape, spec, axes)
    found: list[Region] = []
    # Most devices hold a region that another device holds, too; they share the object.
    known: dict[Shape, Region] = {}
    for device in itertools.product(*map(range, axes.values())):
        offset = []
        for length, over in zip(lengths, cuts, strict=True):
            number = 0
            for axis, size in over:
                number = number * size + device[axis]
            offset.append(number * length)
        corner = tuple(offset)
        if corner not in known:
            known[corner] = Region(corner, lengths)
        found.append(known[corner])
    return found
