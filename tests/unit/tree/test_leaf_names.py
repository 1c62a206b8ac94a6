"""Stored names: injective, reversible, and Orbax's dotted name wherever that is unambiguous."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt._tree.leaf_names import (
    ROOT,
    branch_of,
    escape_key,
    join_keys,
    leaf_of_item,
    sibling_names,
    split_leaf,
    unescape_key,
)
from ckpt.errors import InvalidArgumentError
from ckpt.testing.strategies import keys, string_keys

# `characters()` has lone surrogates too, as undecodable file names do.
TEXTS = st.one_of(string_keys(), st.text(st.characters(), max_size=8))
IDENTIFIERS = st.from_regex(r"[^\W\d]\w{0,6}", fullmatch=True).filter(str.isidentifier)

# Characters that no key of a database and no message should have to carry.
CONTROLS = set(map(chr, [*range(32), *range(127, 161), *range(0x2028, 0x202F)]))


def dotted(path: list[str]) -> str:
    return join_keys([escape_key(key) for key in path])


@given(TEXTS)
def test_an_escaped_key_can_be_turned_back(key: str) -> None:
    assert unescape_key(escape_key(key)) == key


def test_every_short_text_of_the_characters_that_matter_has_a_name_of_its_own() -> None:
    alphabet = "%./\\e2Ek "
    texts = ["".join(t) for n in range(5) for t in itertools.product(alphabet, repeat=n)]
    assert len({escape_key(text) for text in texts}) == len(texts)


@given(TEXTS)
def test_a_name_holds_nothing_that_stores_or_paths_give_a_meaning(key: str) -> None:
    name = escape_key(key)
    assert name
    assert not set(name) & CONTROLS
    assert not set(name) & set("./\\")
    name.encode()


@given(st.one_of(IDENTIFIERS, st.integers(0, 10**6).map(str), st.sampled_from(["layer-1", "a b"])))
def test_an_ordinary_key_is_its_own_name(key: str) -> None:
    assert escape_key(key) == key


@given(st.lists(IDENTIFIERS, min_size=1, max_size=5))
def test_identifiers_give_the_plain_dotted_name(path: list[str]) -> None:
    assert dotted(path) == ".".join(path)


def test_the_name_of_a_network_is_the_one_orbax_uses() -> None:
    path: list[str | int] = ["params", "layers", 0, "kernel"]
    assert join_keys([sibling_names([key])[0] for key in path]) == "params.layers.0.kernel"


def test_a_nested_key_and_a_dotted_key_are_told_apart() -> None:
    assert dotted(["a", "b"]) == "a.b"
    assert dotted(["a.b"]) == "a%2Eb"


@pytest.mark.parametrize(
    ("key", "name"),
    [("", "%e"), ("a/b", "a%2Fb"), ("%", "%25"), ("..", "%2E%2E"), ("\n", "%0A"), ("é", "é")],
)
def test_how_keys_are_escaped_is_part_of_the_format(key: str, name: str) -> None:
    assert escape_key(key) == name


@given(st.lists(TEXTS, max_size=5), st.lists(TEXTS, max_size=5))
def test_different_paths_have_different_names(one: list[str], other: list[str]) -> None:
    assert (dotted(one) == dotted(other)) == (one == other)


@given(st.lists(TEXTS, min_size=1, max_size=5))
def test_a_path_can_be_read_from_its_name(path: list[str]) -> None:
    assert [unescape_key(name) for name in dotted(path).split(".")] == path


@given(TEXTS)
def test_no_key_takes_the_name_of_a_leaf_without_a_key(key: str) -> None:
    assert join_keys([]) == ROOT
    assert dotted([key]) != ROOT


@given(st.lists(keys(), unique=True, max_size=8))
def test_siblings_have_different_names_whatever_their_types(siblings: list[object]) -> None:
    names = sibling_names(siblings)
    assert len(names) == len(siblings)
    assert len(set(names)) == len(names)
    assert all(not set(name) & (CONTROLS | set("./\\")) for name in names)


def test_a_number_gives_way_to_a_string_of_the_same_text() -> None:
    assert sibling_names([1, "1", "%k1"]) == ["%k1", "1", "%25k1"]
    assert sibling_names([1, "2"]) == ["1", "2"]


@given(st.lists(st.sampled_from([1, "1", True, "True", b"b", "b'b'"]), unique=True))
def test_a_string_keeps_its_name_beside_any_sibling(siblings: list[object]) -> None:
    for key, name in zip(siblings, sibling_names(siblings), strict=True):
        if isinstance(key, str):
            assert name == escape_key(key)


def test_two_keys_of_one_text_that_are_no_strings_are_refused() -> None:
    class Key:
        def __str__(self) -> str:
            return "same"

    with pytest.raises(ValueError, match="same"):
        sibling_names([Key(), Key()])


@given(
    st.one_of(
        st.text(max_size=6),
        st.text("%012eEkKaAfF+-_ .", max_size=6),
        st.sampled_from(["", "%", "%2", "%2e", "%FF", "%ED%A0", "a.b", "%ka", "%root", "%61"]),
    )
)
def test_what_is_not_an_escaped_key_is_refused(text: str) -> None:
    try:
        key = unescape_key(text)
    except ValueError:
        return
    assert escape_key(key) == text


ITEM_NAMES = st.lists(
    st.from_regex(r"[A-Za-z0-9_.-]{1,4}", fullmatch=True), min_size=1, max_size=3, unique=True
)


@given(ITEM_NAMES, st.lists(TEXTS, min_size=1, max_size=3), st.data())
def test_a_leaf_of_an_item_is_found_again(items: list[str], path: list[str], data: Any) -> None:
    item, name = data.draw(st.sampled_from(items)), dotted(path)
    written = leaf_of_item(item, name)
    assert split_leaf(written, items) == (item, name)
    assert branch_of(written, items, unnamed=False) == (item, name)
    assert split_leaf(item, items) == (item, "")
    # Without names of items, all of the text is a path.
    assert split_leaf(name, ()) == (None, name)
    assert branch_of(name, [item], unnamed=True) == (item, name)
    assert leaf_of_item("", name) == name


def test_a_branch_of_several_items_names_one() -> None:
    for text, hint in {"params.w": "a:params.w", "b.w": "b:w", "c:w": "a:w"}.items():
        with pytest.raises(InvalidArgumentError, match=rf"several items \(a, b\): .*'{hint}'"):
            branch_of(text, ["a", "b"], unnamed=False)
