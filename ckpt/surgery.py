"""Model surgery: arrays are joined, taken apart or brought to another form while they are restored.

```python
adapt = ckpt.Adapt(transforms=[ckpt.surgery.stack("layers.*", to="layers")])
state = ckpt.sync.load("runs/unrolled", like=scanned, adapt=adapt)
```

Nothing is read twice and no whole array is made on the host first: every device reads the parts it
needs of the stored arrays.

A path is a pattern as in `ckpt.Adapt`. It stands for the leaf that it matches and for all leaves
below, which keep the rest of their path: `stack("layers.*", to="layers")` makes
`layers.attention.kernel` out of `layers.0.attention.kernel`, `layers.1.attention.kernel` and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ckpt._arguments import invalid
from ckpt._plan import targets
from ckpt._plan.adapt import Transform
from ckpt._plan.targets import VirtualArray, concatenated, cut, drop_axis, insert_axis, stored_text
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_names import Pattern, compile_pattern, fill_stars, natural_key, suggestion
from ckpt.errors import InvalidArgumentError, TargetMismatchError

__all__ = ["concatenate", "repeat", "reshape", "split", "stack", "transpose", "unstack"]


def __dir__() -> list[str]:
    return __all__


Sources = Mapping[str, VirtualArray]


def stack(paths: str, to: str, axis: int = 0) -> Transform:
    """Return a transform that stacks arrays of equal shape and dtype along a new axis.

    Args:
        paths: The arrays; the last `*` counts them, and they are stacked in the order of its
            numbers or texts. Earlier stars tell stacks apart.
        to: Path of the stack, with one `*` less.
        axis: Place of the new axis; a negative one counts from the end of the result.

    Example:
        ```python
        join = ckpt.surgery.stack("layers.*", to="layers")
        tree = await ckpt.load("runs/unrolled", adapt=ckpt.Adapt(transforms=[join]))
        ```
    """
    pattern = compile_pattern(paths)
    if "*" not in paths.replace("**", ""):
        raise InvalidArgumentError(f"stack: {paths!r:.80} has no '*' that counts arrays")
    _check_places("stack", [paths], [to], axis, fewer=1)

    def transform(sources: Sources) -> Sources:
        groups: dict[str, dict[str, str]] = {}
        for name, (stars, below) in _matches("stack", pattern, sources).items():
            members = groups.setdefault(fill_stars(to, stars[:-1], below), {})
            other = members.setdefault(stars[-1], name)
            if other != name:
                raise TargetMismatchError(
                    f"stack: {other!r:.80} and {name!r:.80} are both number {stars[-1]!r:.40} of "
                    f"{fill_stars(to, stars[:-1], below)!r:.80}"
                )
        made = {}
        for path, members in groups.items():
            names = [members[star] for star in sorted(members, key=natural_key)]
            parts = [_array("stack", name, sources) for name in names]
            _check_same("stack", names, parts, None)
            place = _axis("stack", path, axis, len(parts[0].shape) + 1)
            made[path] = concatenated([insert_axis(part, place) for part in parts], place)
        taken = {name for members in groups.values() for name in members.values()}
        return _replaced("stack", sources, taken, made)

    return transform


def unstack(paths: str, to: str, axis: int = 0) -> Transform:
    """Return a transform that takes arrays apart along an axis, and removes the axis.

    Args:
        paths: The arrays.
        to: Path of each part, with one `*` more than `paths`; it stands for the part's number.
        axis: The axis; a negative one counts from the end.

    Example:
        ```python
        part = ckpt.surgery.unstack("layers", to="layers.*")
        tree = await ckpt.load("runs/scanned", adapt=ckpt.Adapt(transforms=[part]))
        ```
    """
    pattern = compile_pattern(paths)
    _check_places("unstack", [paths], [to], axis, fewer=-1)

    def transform(sources: Sources) -> Sources:
        made: dict[str, VirtualArray] = {}
        matches = _matches("unstack", pattern, sources)
        for name, (stars, below) in matches.items():
            source = _array("unstack", name, sources)
            place = _axis("unstack", name, axis, len(source.shape))
            for number in range(source.shape[place]):
                path = fill_stars(to, (*stars, str(number)), below)
                _add("unstack", made, path, drop_axis(cut(source, place, number, 1), place))
        return _replaced("unstack", sources, set(matches), made)

    return transform


def concatenate(paths: Sequence[str], to: str, axis: int = 0) -> Transform:
    """Return a transform that concatenates arrays along an existing axis.

    Args:
        paths: The arrays, in this order; each with the same number of `*`.
        to: Path of the result, with as many `*`.
        axis: The axis; a negative one counts from the end.

    Example:
        ```python
        names = ["layers.*.query", "layers.*.key"]
        join = ckpt.surgery.concatenate(names, to="layers.*.both", axis=1)
        tree = await ckpt.load("runs/unrolled", adapt=ckpt.Adapt(transforms=[join]))
        ```
    """
    _check_list("concatenate", "paths", paths)
    patterns = [compile_pattern(path) for path in paths]
    _check_places("concatenate", paths, [to], axis)

    def transform(sources: Sources) -> Sources:
        groups: dict[str, list[str]] = {}
        taken: set[str] = set()
        for number, pattern in enumerate(patterns):
            matches = _matches("concatenate", pattern, sources)
            taken |= matches.keys()
            for name, (stars, below) in matches.items():
                names = groups.setdefault(fill_stars(to, stars, below), [])
                if len(names) > number:
                    raise TargetMismatchError(
                        f"concatenate: {names[-1]!r:.80} and {name!r:.80} are both part "
                        f"{number + 1} of {fill_stars(to, stars, below)!r:.80}"
                    )
                names.append(name)
        made = {}
        for path, names in groups.items():
            if len(names) != len(patterns):
                raise TargetMismatchError(
                    f"concatenate: {path!r:.80} has {len(names)} of {len(patterns)} parts: "
                    f"{', '.join(names)!s:.300}"
                )
            parts = [_array("concatenate", name, sources) for name in names]
            place = _axis("concatenate", path, axis, len(parts[0].shape))
            _check_same("concatenate", names, parts, place)
            made[path] = concatenated(parts, place)
        return _replaced("concatenate", sources, taken, made)

    return transform


def split(
    paths: str, to: Sequence[str], axis: int = 0, sizes: Sequence[int] | None = None
) -> Transform:
    """Return a transform that cuts arrays into consecutive parts along an axis.

    Args:
        paths: The arrays.
        to: Path of every part, each with as many `*` as `paths`.
        axis: The axis; a negative one counts from the end.
        sizes: Length of every part; None cuts into equal parts.

    Example:
        ```python
        part = ckpt.surgery.split("layers.query", to=["layers.left", "layers.right"], axis=-1)
        tree = await ckpt.load("runs/scanned", adapt=ckpt.Adapt(transforms=[part]))
        ```
    """
    pattern = compile_pattern(paths)
    _check_list("split", "to", to)
    _check_places("split", [paths], to, axis)
    given: object = sizes
    if given is not None and not (
        isinstance(given, Sequence) and all(type(size) is int and size >= 0 for size in given)
    ):
        raise invalid("sizes", sizes, "a list of whole numbers", of="split")
    if sizes is not None and len(sizes) != len(to):
        raise InvalidArgumentError(f"split: {len(sizes)} sizes for {len(to)} parts")

    def transform(sources: Sources) -> Sources:
        made: dict[str, VirtualArray] = {}
        matches = _matches("split", pattern, sources)
        for name, (stars, below) in matches.items():
            source = _array("split", name, sources)
            place = _axis("split", name, axis, len(source.shape))
            length = source.shape[place]
            lengths = [length // len(to)] * len(to) if sizes is None else list(sizes)
            if sum(lengths) != length:
                raise TargetMismatchError(
                    f"split: {name!r:.80} has length {length} along axis {axis}, which is not "
                    f"{len(to)} parts of {lengths if sizes is not None else 'equal length'}"
                )
            start = 0
            for path, part in zip(to, lengths, strict=True):
                _add("split", made, fill_stars(path, stars, below), cut(source, place, start, part))
                start += part
        return _replaced("split", sources, set(matches), made)

    return transform


def repeat(paths: str, times: int, axis: int = 0) -> Transform:
    """Return a transform that repeats every slice of arrays along an axis, as `numpy.repeat` does.

    The heads `a, b` become `a, a, b, b` with `times=2`. So the key and value heads of grouped-query
    attention become as many as there are query heads. The stored arrays are still read once.

    Args:
        paths: The arrays, which keep their paths.
        times: Number of times that each slice is there afterwards.
        axis: The axis; a negative one counts from the end.

    Example:
        ```python
        heads = ckpt.surgery.repeat("layers.key", times=4, axis=1)
        tree = await ckpt.load("runs/scanned", adapt=ckpt.Adapt(transforms=[heads]))
        ```
    """
    if type(times) is not int or times < 1:
        raise invalid("times", times, "a whole number, at least 1", of="repeat")
    _check_places("repeat", [paths], [], axis)

    def made(name: str, source: VirtualArray) -> VirtualArray:
        place = _axis("repeat", name, axis, len(source.shape))
        return targets.repeat(source, place, times)

    return _transform_each("repeat", paths, made)


def transpose(paths: str, axes: Sequence[int] | None = None) -> Transform:
    """Return a transform that brings the axes of arrays to another order, as `numpy.transpose`.

    The weight of a linear layer is `[out, in]` in torch, and a kernel of a JAX model `[in, out]`.

    Args:
        paths: The arrays, which keep their paths.
        axes: For every axis of the result, its axis in the array; negative ones count from the end.
            None reverses the axes.

    Example:
        ```python
        turned = ckpt.surgery.transpose("layers.*")
        tree = await ckpt.load("runs/scanned", adapt=ckpt.Adapt(transforms=[turned]))
        ```
    """
    _check_numbers("transpose", "axes", axes, "axes")
    order = None if axes is None else tuple(axes)

    def made(name: str, source: VirtualArray) -> VirtualArray:
        rank = len(source.shape)
        given = range(rank)[::-1] if order is None else order
        places = [_axis("transpose", name, axis, rank) for axis in given]
        if sorted(places) != list(range(rank)):
            raise TargetMismatchError(
                f"transpose: axes {list(given)} are not each of the {rank} axes of "
                f"{stored_text(source)} once",
                leaf=name,
            )
        return targets.transpose(source, places)

    return _transform_each("transpose", paths, made)


def reshape(paths: str, shape: Sequence[int]) -> Transform:
    """Return a transform that brings arrays to another shape, as `numpy.reshape` does in C order.

    So heads that are stored as one axis become two: `[d, h * k]` as `[d, h, k]`.

    It is refused if the rows of one shape end within those of the other so often that an array
    falls into too many pieces, as from `[20001, 20000]` to `[20000, 20001]`. Restore such an array
    as it is stored, and reshape it with jax.

    Args:
        paths: The arrays, which keep their paths.
        shape: The shape; one length may be -1, which stands for the rest.

    Example:
        ```python
        heads = ckpt.surgery.reshape("layers.query", shape=[2, 4, 2, -1])
        tree = await ckpt.load("runs/scanned", adapt=ckpt.Adapt(transforms=[heads]))
        ```
    """
    _check_numbers("reshape", "shape", shape, "lengths")
    wanted = tuple(shape)
    if min(wanted, default=0) < -1 or wanted.count(-1) > 1:
        what = "lengths of which one may be -1"
        raise invalid("shape", shape, what, of="reshape")

    def made(name: str, source: VirtualArray) -> VirtualArray:
        found = _full_shape(wanted, math.prod(source.shape))
        if found is None:
            raise TargetMismatchError(
                f"reshape: {stored_text(source)} cannot have the shape {list(wanted)}", leaf=name
            )
        reshaped = targets.reshape(source, found)
        if reshaped is None:
            raise TargetMismatchError(
                f"reshape: {stored_text(source)} falls into more than "
                f"{targets.MOST_SLICES} pieces as {list(found)}, since the rows of one end "
                "within those of the other. Leave it out here, and reshape it with jax once it is "
                "restored",
                leaf=name,
            )
        return reshaped

    return _transform_each("reshape", paths, made)


def _full_shape(shape: tuple[int, ...], size: int) -> tuple[int, ...] | None:
    """Return a shape with its -1 filled in; None if arrays of `size` elements cannot have it."""
    known = math.prod(length for length in shape if length != -1)
    if -1 in shape and known:
        shape = tuple(size // known if length == -1 else length for length in shape)
    return shape if -1 not in shape and math.prod(shape) == size else None


def _transform_each(
    what: str, paths: str, made: Callable[[str, VirtualArray], VirtualArray]
) -> Transform:
    """Return a transform that makes a new array from each one, at the same path."""
    pattern = compile_pattern(paths)

    def transform(sources: Sources) -> Sources:
        new = dict(sources)
        for name in _matches(what, pattern, sources):
            new[name] = made(name, _array(what, name, sources))
        return new

    return transform


def _check_numbers(what: str, name: str, given: object, noun: str) -> None:
    if name == "axes" and given is None:
        return
    if not isinstance(given, Sequence) or not all(type(each) is int for each in given):
        raise invalid(name, given, f"a list of {noun}", of=what)


def _check_list(what: str, name: str, given: object) -> None:
    # A string is a sequence of its characters.
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise invalid(name, given, "a list of paths", of=what)


def _check_places(
    what: str, paths: Sequence[str], to: Sequence[object], axis: object, fewer: int = 0
) -> None:
    """Check the paths without a checkpoint; `to` has `fewer` `*` than `paths`."""
    if type(axis) is not int:
        raise invalid("axis", axis, "a whole number", of=what)
    for place in to:
        if not isinstance(place, str) or not place:
            raise invalid("to", place, "a path", of=what)
        for path in paths:
            stars = path.replace("**", "").count("*") - fewer
            if place.count("*") != stars:
                raise InvalidArgumentError(
                    f"{what}: to={place!r:.80} has {place.count('*')} '*', where {path!r:.80} "
                    f"asks for {stars}"
                )


def _matches(
    what: str, pattern: Pattern, sources: Sources
) -> dict[str, tuple[tuple[str, ...], str]]:
    found = {name: pattern.split(name) for name in sources}
    matches = {name: match for name, match in found.items() if match is not None}
    if not matches:
        raise TargetMismatchError(
            f"{what}: {pattern.text!r:.80} covers none of the {len(sources)} leaves"
            f"{suggestion(pattern.text, sources)}; no array was read"
        )
    return matches


def _array(what: str, name: str, sources: Sources) -> VirtualArray:
    source = sources[name]
    if source.entry.kind not in ARRAY_KINDS or source.entry.kind == "key":
        raise TargetMismatchError(
            f"{what}: {stored_text(source)} is not an array; write a pattern that leaves it out",
            leaf=name,
        )
    return source


def _check_same(
    what: str, names: Sequence[str], parts: Sequence[VirtualArray], axis: int | None
) -> None:
    """Check that parts have one dtype and one shape, but for `axis`."""
    first = parts[0]
    for name, part in zip(names, parts, strict=True):
        alike = len(part.shape) == len(first.shape) and all(
            place == axis or one == other
            for place, (one, other) in enumerate(zip(part.shape, first.shape, strict=True))
        )
        if not alike or part.entry.dtype != first.entry.dtype:
            raise TargetMismatchError(
                f"{what}: {part.entry.dtype}{list(part.shape)} does not go together with "
                f"{first.entry.dtype}{list(first.shape)} at {names[0]!r:.80}",
                leaf=name,
            )


def _axis(what: str, name: str, axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise TargetMismatchError(f"{what}: no axis {axis} where there are {rank}", leaf=name)
    return axis % rank


def _add(what: str, made: dict[str, VirtualArray], path: str, source: VirtualArray) -> None:
    if path in made:
        raise TargetMismatchError(f"{what}: two arrays become {path!r:.80}")
    made[path] = source


def _replaced(what: str, sources: Sources, taken: set[str], made: Sources) -> Sources:
    """Return the leaves with the made ones in the place of the taken ones."""
    left = {name: source for name, source in sources.items() if name not in taken}
    twice = next((path for path in made if path in left), None)
    if twice is not None:
        raise TargetMismatchError(f"{what}: there is a leaf at {twice!r:.80} already")
    return {**left, **made}
