"""What an object holds is stored, or the save is refused by name: nothing of it is ever lost."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt._tree.registered_nodes import difference
from ckpt._tree.structure import describe
from ckpt.errors import UnsupportedLeafError


class Point(NamedTuple):
    x: Any


class NamedPoint(Point):
    pass


@dataclasses.dataclass
class Plain:
    x: Any


class Derived(Plain):
    pass


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


class MoreSlots(Slotted):
    __slots__ = ("__hidden", "extra")

    def hide(self, value: Any) -> None:
        self.__hidden = value


@dataclasses.dataclass
class Undeclared:
    def __init__(self, x: Any) -> None:
        self.params = x


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    x: Any


@flax.struct.dataclass
class Struct:
    x: Any


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    x: Any
    _hidden: Any = None


@pydantic.dataclasses.dataclass(config={"extra": "allow"})
class Lenient:
    x: Any


class Texts(dict[str, Any]):
    pass


class Items(list[Any]):
    pass


class Pair(tuple[Any, ...]):
    __slots__ = ()


class Bag(Pair):
    pass


class Generator(np.random.Generator):
    pass


def own(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: kind([("x", x)])


KINDS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "namedtuple": (NamedPoint, NamedPoint),
    "dataclass": (Plain, Plain),
    "subclass": (Derived, Derived),
    "slots": (MoreSlots, MoreSlots),
    "registered": (Node, Node),
    "struct": (Struct, Struct),
    "model": (lambda x: Model(x=x), Model),
    "lenient": (Lenient, Lenient),
    "ordered": (own(OrderedDict), OrderedDict),
    "default": (lambda x: defaultdict(list, x=x), defaultdict),
    "dict": (own(Texts), Texts),
    "list": (lambda x: Items([x]), Items),
    "tuple": (lambda x: Bag([x]), Bag),
    "undeclared": (Undeclared, Undeclared),
}
VALUES = st.integers(-5, 5) | st.text("ab", max_size=2) | st.lists(st.integers(0, 3), max_size=2)
NAMES = st.sampled_from(["extra", "_hidden", "w"])


def attach(item: Any, name: str, value: Any) -> bool:
    """Set an attribute as a program does, also on frozen objects; tell whether it is there."""
    try:
        setattr(item, name, value)
    except dataclasses.FrozenInstanceError:
        object.__setattr__(item, name, value)
    except AttributeError:
        return False
    return True


def like(found: Any, kind: Any, path: Path) -> Any:
    """The object again, by its class where it was saved as JSON."""
    return ckpt.sync.load(path, kind) if type(found) is dict else found


@given(st.sampled_from(sorted(KINDS)), VALUES, st.dictionaries(NAMES, VALUES, max_size=2))
@settings(max_examples=120, deadline=None)
def test_what_an_object_holds_is_stored_or_refused(
    which: str, x: Any, extra: dict[str, Any]
) -> None:
    make, kind = KINDS[which]
    item = make(x)
    extra = {name: value for name, value in extra.items() if attach(item, name, value)}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x"
        refusal = ""
        try:
            ckpt.sync.save(path, item)
        except UnsupportedLeafError as error:
            refusal = str(error)
        assert path.exists() == (not refusal)
        if refusal:
            # Those are leaves, of which nothing is stored.
            named = which in ("dict", "list", "tuple") or any(
                repr(name) in refusal for name in [*extra, "params"]
            )
            assert named
            assert kind.__name__ in refusal
            return
        found = like(ckpt.sync.load(path), kind, path)
    assert difference(item, found) is None
    for name, value in extra.items():
        assert getattr(found, name) == value


@pytest.mark.parametrize("which", sorted(KINDS.keys() - {"dict", "list", "tuple", "undeclared"}))
def test_an_object_without_more_than_it_declares_is_stored(which: str, tmp_path: Path) -> None:
    make, kind = KINDS[which]
    ckpt.sync.save(tmp_path / "x", make(3))
    assert difference(make(3), like(ckpt.sync.load(tmp_path / "x"), kind, tmp_path / "x")) is None


def refused(tree: Any, *words: str, **options: Any) -> UnsupportedLeafError:
    with tempfile.TemporaryDirectory() as directory:
        with pytest.raises(UnsupportedLeafError) as caught:
            ckpt.sync.save(Path(directory) / "x", tree, **options)
        assert list(Path(directory).iterdir()) == []
    for word in words:
        assert word in str(caught.value)
    return caught.value


def with_extra(item: Any, value: Any = 1) -> Any:
    object.__setattr__(item, "extra", value)
    return item


@pytest.mark.parametrize(
    "node", [NamedPoint(1), Node(1), Struct(1), OrderedDict(a=1)], ids=lambda node: type(node)
)
def test_a_node_deep_in_a_tree_is_named_by_its_path(node: Any) -> None:
    tree = {"a": [0, {"b": with_extra(node)}]}
    error = refused(tree, type(node).__qualname__, "'extra'", "__ckpt_omit__ = ('extra',)")
    assert error.leaf == "a.1.b"
    assert error.item == "default"


def test_an_array_in_an_attribute_is_not_lost() -> None:
    refused(with_extra(Node(jnp.ones(2)), jnp.ones(2)), "'extra'")
    refused(Undeclared(jnp.ones(2)), "Undeclared", "'params'")


def test_a_private_slot_is_named_as_python_calls_it() -> None:
    item = MoreSlots(1)
    item.hide(5)
    refused(item, "'_MoreSlots__hidden'")


@dataclasses.dataclass
class Outer:
    items: list[Plain]
    by_name: dict[str, Plain] = dataclasses.field(default_factory=dict)
    ordered: OrderedDict[str, int] = dataclasses.field(default_factory=OrderedDict)


@pytest.mark.parametrize(
    ("item", "leaf"),
    [
        (Outer([Plain(1), with_extra(Plain(2))]), "items.1"),
        (Outer([], {"a": with_extra(Plain(2))}), "by_name.a"),
        (Outer([], ordered=with_extra(OrderedDict(a=1))), "ordered"),
    ],
)
def test_what_is_inside_of_a_dataclass_is_looked_at(item: Any, leaf: str) -> None:
    assert refused(item, "'extra'").leaf == leaf


def test_a_state_that_an_object_returns_is_a_tree_like_others() -> None:
    class Loader:
        def get_state(self) -> Any:
            return {"at": with_extra(OrderedDict(a=np.ones(2)))}

        def set_state(self, state: Any) -> None:
            raise AssertionError

    refused(Loader(), "OrderedDict", "'extra'")


def test_a_tree_whose_leaves_are_packed_is_looked_at_before(tmp_path: Path) -> None:
    money = ckpt.handlers.LeafType(Plain, pack=lambda leaf: leaf.x, unpack=Plain)
    handlers = [ckpt.handlers.PyTreeHandler(leaf_types=[money])]
    refused({"a": with_extra(OrderedDict(b=Plain(1)))}, "'extra'", handlers=handlers)
    # What is packed is for its own function to say.
    ckpt.sync.save(tmp_path / "x", {"a": with_extra(Plain(1))}, handlers=handlers)
    assert ckpt.sync.load(tmp_path / "x", handlers=handlers) == {"a": Plain(1)}


def test_a_random_generator_of_a_subclass_is_looked_at() -> None:
    refused(with_extra(Generator(np.random.PCG64(0))), "Generator", "'extra'")


# -- what is no state ----------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Spared:
    x: Any
    __ckpt_omit__: ClassVar[Any] = ("lock",)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.double = [self.x, self.x]

    @functools.cached_property
    def cached(self) -> object:
        return object()


@dataclasses.dataclass
class SparedConfig:
    x: int
    __ckpt_omit__: ClassVar[Any] = "lock"

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.double = self.x * 2

    @functools.cached_property
    def cached(self) -> object:
        return object()


class SparedModel(pydantic.BaseModel):
    __ckpt_omit__ = ("_lock",)
    x: int
    _count: int = 3
    _names: list[str] = pydantic.PrivateAttr(default_factory=list)
    _lock: Any = pydantic.PrivateAttr(default_factory=threading.Lock)

    @functools.cached_property
    def cached(self) -> object:
        return object()


@pytest.mark.parametrize("make", [Spared, SparedConfig, lambda x: SparedModel(x=x)])
def test_caches_defaults_and_what_the_class_leaves_out_are_no_state(
    make: Callable[[Any], Any], tmp_path: Path
) -> None:
    item = make(2)
    assert item.cached is item.cached
    if not isinstance(item, SparedModel):
        item.weak, item.proxy = weakref.ref(Spared), weakref.proxy(weakref.WeakSet())
    ckpt.sync.save(tmp_path / "x", item)
    found = ckpt.sync.load(tmp_path / "x", type(item) if type(item) is not Spared else None)
    assert (type(found), found.x) == (type(item), 2)
    for name in ("_locks", "lo", "ock"):
        if not isinstance(item, SparedModel):
            refused(changed(make(2), name), repr(name))


def changed(item: Any, name: str) -> Any:
    setattr(item, name, 1)
    return item


def test_a_subclass_leaves_out_what_its_base_does(tmp_path: Path) -> None:
    class More(SparedConfig):
        __ckpt_omit__ = ("cache",)

    item = More(1)
    item.cache = {"a": object()}  # type: ignore[attr-defined]
    ckpt.sync.save(tmp_path / "x", item)


def test_an_attribute_that_the_constructor_does_not_set_again_is_refused() -> None:
    refused(changed(Spared(1), "double"), "Spared", "'double'")
    refused(changed(SparedConfig(1), "double"), "SparedConfig", "'double'")
    model = SparedModel(x=1)
    model._names.append("a")
    refused(model, "SparedModel", "'_names'")


def test_a_class_with_flatten_functions_leaves_out_what_it_means_to() -> None:
    @jax.tree_util.register_pytree_node_class
    @dataclasses.dataclass
    class Own:
        x: Any

        def tree_flatten(self) -> Any:
            return (self.x,), None

        @classmethod
        def tree_unflatten(cls, aux: Any, children: Any) -> Any:
            return cls(*children)

    assert describe(with_extra(Own(1)), saved=True).leaves == (1,)


def test_a_target_may_hold_more(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", Node(1))
    assert ckpt.sync.load(tmp_path / "x", with_extra(Node(0))) == Node(1)


# -- arguments of Orbax --------------------------------------------------------------------------

ARGUMENTS = {
    "StandardSave": lambda: ocp.args.StandardSave({"a": 1}),
    "PyTreeSave": lambda: ocp.args.PyTreeSave({"a": 1}),
    "JsonSave": lambda: ocp.args.JsonSave({"a": 1}),
    "StandardRestore": lambda: ocp.args.StandardRestore({"a": 1}),
    "Composite": lambda: ocp.args.Composite(state=ocp.args.StandardSave({"a": 1})),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_orbax_is_no_state(name: str, tmp_path: Path) -> None:
    given = ARGUMENTS[name]()
    words = (f"args.{name}(...)", "pass the object itself")
    refused(given, *words)
    assert refused({"a": [given]}, *words).leaf == "a.0"
    refused(None, *words, items={"config": given}, handlers={"config": ckpt.handlers.JsonHandler()})
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for options in ({"init": given}, {"items": {"state": given}}):
            with pytest.raises(UnsupportedLeafError, match="itself"):
                mgr.resume(**options)
        mgr.save(0, {"a": 1}, durable=True)
        with pytest.raises(UnsupportedLeafError, match="itself"):
            mgr.restore(0, given)
