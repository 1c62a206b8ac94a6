"""What trees and items hold beside usual arrays: mapped files, configurations; and what returns."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors

# -- files that are mapped -------------------------------------------------------------------------


def test_an_array_in_a_mapped_file_is_an_array(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "table", np.float32, "w+", shape=(300, 40))
    mapped[:] = np.arange(12000).reshape(300, 40)
    ckpt.sync.save(tmp_path / "a", {"table": mapped, "part": mapped[3:5, ::2]})
    found: Any = ckpt.sync.load(tmp_path / "a")
    assert type(found["table"]) is np.ndarray
    assert np.array_equal(found["table"], mapped)
    assert np.array_equal(found["part"], mapped[3:5, ::2])
    like: dict[str, Any] = {"table": mapped, "part": ...}
    assert np.array_equal(ckpt.sync.load(tmp_path / "a", like=like)["table"], mapped)
    ckpt.sync.save(tmp_path / "alone", mapped)
    assert np.array_equal(ckpt.sync.load(tmp_path / "alone"), mapped)


# -- configurations --------------------------------------------------------------------------------


class Config:
    """Has keys like a dict and is none, as `ml_collections.ConfigDict`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = {
            key: Config(value) if isinstance(value, dict) else value
            for key, value in values.items()
        }

    def keys(self) -> Any:
        return self._values.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]


class ConfigList(Sequence[Any]):
    """Is a sequence and no list, as `omegaconf.ListConfig`."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = values

    def __getitem__(self, place: Any) -> Any:
        return self._values[place]

    def __len__(self) -> int:
        return len(self._values)


def own() -> Any:
    return Config({"rate": 1e-3, "model": {"width": 3, "names": ConfigList(["a", "b"])}})


def of_ml_collections() -> Any:
    values = {"rate": 1e-3, "model": {"width": 3, "names": ("a", "b")}}
    return pytest.importorskip("ml_collections").ConfigDict(values)


def of_omegaconf() -> Any:
    values = {"rate": 1e-3, "model": {"width": 3, "names": ["a", "b"]}}
    return pytest.importorskip("omegaconf").OmegaConf.create(values)


PLAIN = {"rate": 1e-3, "model": {"width": 3, "names": ["a", "b"]}}


@pytest.mark.parametrize("make", [own, of_ml_collections, of_omegaconf])
def test_a_configuration_is_metadata_or_an_item(make: Any, tmp_path: Path) -> None:
    config = make()
    with ckpt.sync.CheckpointManager(tmp_path, custom_metadata=config) as mgr:
        mgr.save(0, items={"state": {"w": jnp.ones(3)}, "config": config}, custom_metadata=config)
        assert mgr.restore(0)["config"] == PLAIN
        again = mgr.restore(0, items={"config": config})["config"]
        assert type(again) is type(config)
        assert again["model"]["width"] == 3
        assert mgr.metadata(0).info.custom_metadata == PLAIN
        assert mgr.root_metadata() == PLAIN
        with pytest.raises(errors.UnsupportedLeafError, match="saved as metadata=config"):
            mgr.save(1, {"w": jnp.ones(3), "config": config}).result()


# -- results can be sent to other processes --------------------------------------------------------


def test_what_calls_return_can_be_pickled(tmp_path: Path) -> None:
    reports: list[ckpt.types.RestoreReport] = []
    tree = {"w": jnp.ones(3), "n": 7}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        info = mgr.save(0, tree, metrics={"loss": 1.0}, custom_metadata={"a": [1]}, durable=True)
        mgr.restore(0, adapt=ckpt.Adapt(report=reports.append))
        returned: list[Any] = [
            info,
            mgr.metadata(0),
            mgr.verify(0),
            reports[0],
            mgr.root_metadata(),
        ]
    returned.append(ckpt.types.UnknownNode("a:B", {"x": 1}, static=[2]))
    for each in returned:
        assert pickle.loads(pickle.dumps(each)) == each
    assert pickle.loads(pickle.dumps(returned[1])).tree["w"].shape == (3,)
