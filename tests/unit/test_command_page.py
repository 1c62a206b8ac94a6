"""The page of the command: it has every command, and its examples are calls that there are."""

from __future__ import annotations

import re

import click
import pytest

from ckpt.cli import commands
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "reference" / "command.md").read_text(encoding="utf-8")
# It is told of where all commands are.
ELSEWHERE = {"completion"}
CALLS = re.findall(r"^\$ ckpt (\S+)(.*?)(?: +#.*)?$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(set(commands.NAMES) - ELSEWHERE))
def test_every_command_is_described(name: str) -> None:
    assert re.search(rf"^### .*`ckpt {name}`", PAGE, re.MULTILINE), name


def test_completion_is_described() -> None:
    assert "ckpt completion bash" in PAGE


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_examples_use_options_that_there_are(name: str, arguments: str) -> None:
    command = commands.load(name)
    known = {
        option
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert set(re.findall(r"(?<=\s)--?[a-z][a-z-]*", arguments)) <= known


@pytest.mark.parametrize("name", commands.NAMES)
def test_each_option_says_what_it_is_for(name: str) -> None:
    command = commands.load(name)
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.opts
