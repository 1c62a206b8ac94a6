"""Patterns over leaf paths: what they cover, what their stars stand for, what was perhaps meant."""

from __future__ import annotations

from fnmatch import translate
from re import fullmatch
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt._tree.leaf_names import (
    ROOT,
    compile_pattern,
    compile_rule,
    fill_stars,
    natural_key,
    near_miss,
    suggestion,
)
from ckpt.errors import InvalidArgumentError

KEYS = st.text("ab1", min_size=1, max_size=3)
PATHS = st.lists(KEYS, min_size=1, max_size=5)
# No brackets: they mean something to fnmatch, to which these patterns are compared.
PATTERNS = st.lists(st.one_of(st.just("**"), st.text("ab*?", min_size=1, max_size=3)), min_size=1)


def is_glob(pattern: str, key: str) -> bool:
    return fullmatch(translate(pattern), key) is not None


def prefixes_matched(pattern: list[str], path: list[str]) -> set[int]:
    """By the definition: how many keys the pattern may stand for, counting from the first."""
    ends = {0}
    for key in pattern:
        if key == "**":
            ends = {more for end in ends for more in range(end, len(path) + 1)}
        else:
            ends = {end + 1 for end in ends if end < len(path) and is_glob(key, path[end])}
    return ends


@given(PATTERNS, PATHS)
@example(["**", "a", "**", "b"], ["a", "a", "b", "b"])
@example(["**"], ["a"])
@example(["a", "**"], ["a"])
def test_a_pattern_covers_what_it_matches_and_all_below(
    pattern: list[str], path: list[str]
) -> None:
    # `**` beside other text within a key is two stars of that key.
    compiled = compile_pattern(".".join(pattern))
    ends = prefixes_matched(pattern, path)
    assert compiled.covers(".".join(path)) == bool(ends)
    found = compiled.split(".".join(path))
    assert (found is not None) == bool(ends)
    if found is not None:
        assert found[1] == ".".join(path[min(ends) :])


@given(st.lists(st.one_of(KEYS, st.just("*")), min_size=1, max_size=5), PATHS)
def test_the_stars_put_back_give_the_path_again(pattern: list[str], path: list[str]) -> None:
    text = ".".join(pattern)
    found = compile_pattern(text).split(".".join(path))
    if found is not None:
        assert fill_stars(text, *found) == ".".join(path)


def test_a_slash_within_a_key_may_be_written_as_it_is() -> None:
    stored = "params.mlp%2F~%2Flinear_0.w"
    for text in ("params.mlp/~/linear_*", "params.mlp%2F~%2Flinear_*"):
        assert compile_pattern(text).split(stored) == (("0",), "w")
        assert fill_stars(text, ["0"], "w") == stored
    # It is part of a key, and parts no keys.
    assert not compile_pattern("params/mlp/~/linear_0").covers(stored)
    assert not compile_pattern("params/w").covers("params.w")


def test_a_star_stays_within_its_key_and_nothing_but_stars_is_special() -> None:
    assert not compile_pattern("a*c").covers("a.b.c")
    assert compile_pattern("*").split("a.b") == (("a",), "b")
    assert compile_pattern("*.w").split("a.w.x") == (("a",), "x")
    assert compile_pattern("l_*.*").split("l_10.q") == (("10", "q"), "")
    for text in ("a+", "[ab]", "a|b", "(a)", "^a", "\\w"):
        assert compile_pattern(text).covers(text)
        assert not compile_pattern(text).covers("a")
    assert not compile_pattern("param").covers("params")
    assert not compile_pattern("params.w").covers("params")


@pytest.mark.parametrize("wrong", ["", None, 5, b"a", ["a"]])
def test_what_is_no_text_is_no_pattern(wrong: object) -> None:
    with pytest.raises(InvalidArgumentError):
        compile_pattern(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [5, None, b"a", [5], ["a", None], {"a": "b"}])
def test_what_is_no_rule_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidArgumentError):
        compile_rule(wrong)  # type: ignore[arg-type]


def test_a_rule_may_be_any_collection_of_patterns_and_predicates() -> None:
    rules: list[Any] = [["a", str.isupper], ("a", str.isupper)]
    for rule in rules:
        (one, other) = compile_rule(rule)
        assert (one[0], one[1]("a.b"), one[1]("A")) == ("a", True, False)
        assert (other[0], other[1]("a.b"), other[1]("A")) == ("isupper", False, True)


@pytest.mark.parametrize(
    ("text", "stars", "below", "path"),
    [
        ("b.*", ["3"], "w", "b.3.w"),
        ("b", [], "w.x", "b.w.x"),
        ("", [], "w", "w"),
        ("", [], "", ROOT),
        ("*_*", ["a", "b"], "", "a_b"),
    ],
)
def test_a_path_is_filled_in(text: str, stars: list[str], below: str, path: str) -> None:
    assert fill_stars(text, stars, below) == path


@pytest.mark.parametrize(("text", "stars"), [("a", ["1"]), ("*", []), ("*.*", ["1"])])
def test_stars_that_do_not_go_up_are_refused(text: str, stars: list[str]) -> None:
    with pytest.raises(InvalidArgumentError):
        fill_stars(text, stars, "")


@given(st.lists(st.integers(0, 10**20), max_size=8))
def test_numbers_in_texts_are_ordered_by_value(numbers: list[int]) -> None:
    texts = [f"layer_{number}" for number in numbers]
    assert sorted(texts, key=natural_key) == [f"layer_{number}" for number in sorted(numbers)]


@given(st.lists(st.text("a1_\u00b2\u0663", max_size=4), max_size=6, unique=True))
def test_any_texts_have_one_order(texts: list[str]) -> None:
    up, down = sorted(texts), sorted(texts, reverse=True)
    assert sorted(up, key=natural_key) == sorted(down, key=natural_key)


STORED = ["params.embed", *(f"params.layers.{n}.kernel" for n in range(20)), "opt.mu.embed", "step"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("param", "params"),
        ("params.layer", "params.layers"),
        ("params.layer.3", "params.layers.3"),
        ("params.layers.3.kernle", "params.layers.3.kernel"),
        ("params.layers.*.kernels", "params.layers.*.kernel"),
        ("**.emb", "**.embed"),
        ("params.embedding.table", "params.embed"),
        ("stepp", "step"),
    ],
)
def test_a_typing_mistake_is_corrected_where_it_was_made(text: str, meant: str) -> None:
    assert near_miss(text, STORED) == f" (is it {meant!r}?)"


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("weights", "at the top there is 'params', 'opt', 'step'"),
        ("opt.nu", "below 'opt' there is 'mu'"),
        ("params.layers.77", "below 'params.layers' there is '0', '1', '2', '3', '4', '5', '6', "),
    ],
)
def test_where_nothing_is_like_it_what_is_there_is_listed(text: str, there: str) -> None:
    assert there in suggestion(text, STORED)
    assert len(suggestion(text, STORED)) < 120


@given(PATTERNS.map(".".join), st.lists(PATHS.map(".".join), max_size=6))
def test_a_hint_covers_something(text: str, names: list[str]) -> None:
    hint = near_miss(text, names)
    if hint:
        meant = hint.removeprefix(" (is it '").removesuffix("'?)")
        assert any(map(compile_pattern(meant).covers, names))
    assert isinstance(suggestion(text, names), str)
