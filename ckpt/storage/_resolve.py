"""Storage for the paths, URLs and stores that users give."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from ckpt._arguments import invalid, shown
from ckpt._redaction import redact
from ckpt._settings import Timeouts
from ckpt.errors import CheckpointError, InvalidArgumentError
from ckpt.storage._base import Storage
from ckpt.storage._local.config import Local
from ckpt.storage._local.storage import LocalStorage
from ckpt.storage._object.config import GCS, S3, Memory, StoreConfig, parent_of, parts_of
from ckpt.storage._store import Store

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# Entry point group in which packages register schemes.
ENTRY_POINTS = "ckpt.storage"
_BUILT_IN = ("file", "gs", "memory", "s3")
# A path, a URL, or a store.
PathLike = str | os.PathLike[str] | Local | S3 | GCS | Memory | Store

_DEFAULT_TIMEOUTS = Timeouts()
_STORES: dict[str, Callable[[str], StoreConfig]] = {"s3": S3, "gs": GCS, "memory": Memory}
# Names of the same schemes in other programs.
_OTHER_NAMES = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):(/?)")


def open_root(
    path: PathLike, timeouts: Timeouts = _DEFAULT_TIMEOUTS, *, create: bool = True
) -> Storage:
    """Return the storage whose root is `path`.

    Args:
        path: The root: a path, a URL or a store.
        timeouts: How long leases last.
        create: True makes the root if it does not exist.

    Raises:
        InvalidArgumentError: `path` is not a path, or no storage serves it.

    Example:
        ```python
        storage = ckpt.storage.open_root("runs/a")
        print(storage.location)
        ```
    """
    return _opened(path, _drilled(_place(path), reads=not create), timeouts, create)


def _drilled(place: _Place, *, reads: bool) -> _Place:
    if "CKPT_DRILL_ROOT" not in os.environ:
        return place
    from ckpt.storage._scratch import in_scratch

    return in_scratch(place, reads=reads)


def _opened(path: PathLike, place: _Place, timeouts: Timeouts, create: bool) -> Storage:
    """Return the storage of a place, with the settings of the path that it is of."""
    if isinstance(place, Path):
        own = replace(path, path=place) if isinstance(path, Local) else place
        return LocalStorage(own, timeouts, create=create)
    # Imported late: it needs TensorStore, and a root on a disk does not.
    from ckpt.storage._object.storage import ObjectStorage

    store = _open_installed(place) if isinstance(place, _Url) else place
    return ObjectStorage(store, timeouts, create=create)


def local_path(path: PathLike) -> Path | None:
    """Return the path of a place on a disk; None for one in a store.

    Raises:
        InvalidArgumentError: `path` is not a path.
    """
    place = _place(path)
    return place if isinstance(place, Path) else None


def open_beside(storage: Storage, folder: str) -> Storage:
    """Return the storage of a folder that files of a root refer to.

    Args:
        storage: The root. A folder in the same bucket is opened with the same settings, since a URL
            has no room for them.
        folder: Path or URL of the folder.

    Raises:
        InvalidArgumentError: There is no storage for it.
    """
    own, place = getattr(storage, "config", None), _place(folder)
    if (
        isinstance(own, S3 | GCS | Memory)
        and type(place) is type(own)
        and parts_of(place)[0] == parts_of(own)[0]
    ):
        return open_root(replace(own, url=place.url), create=False)
    return open_root(folder, create=False)


def refuse_inside(source: str, target: str) -> None:
    """Refuse a target inside the source that it is made of.

    Raises:
        InvalidArgumentError: `target` is inside `source`.
    """
    above, below = (os.path.join(os.path.realpath(each), "") for each in (source, target))
    if below.startswith(above) and below != above:
        raise InvalidArgumentError(
            f"{shown(target)}: what is made of {shown(source)} cannot be written there, into the "
            "source itself. Choose a place beside it"
        )


def followed(storage: Storage, step_dir: str, path: str) -> tuple[Storage, str, str]:
    """Return the real place of a file, if it is a symbolic link on a disk.

    Caches of models consist of links; a user who passes the path of a link means the file behind
    it.

    Returns:
        A storage, the directory in it and the path of the file there.
    """
    if not isinstance(storage, LocalStorage):
        return storage, step_dir, path
    real = Path(os.path.realpath(Path(storage.location, step_dir, path)))
    return LocalStorage(real.parent, _DEFAULT_TIMEOUTS, create=False), "", real.name


def check_trash(
    root: PathLike, trash: str | os.PathLike[str], is_step: Callable[[str], bool]
) -> None:
    """Raise if a trash folder could be taken for a step of the root, or is inside one.

    Args:
        root: The root.
        trash: A folder below it, or an absolute path.
        is_step: Returns True if a directory of the root may be a step.

    Raises:
        InvalidArgumentError: The folder is the root itself, or could be a step, or is inside one.
    """
    local = _place(root)
    if not isinstance(local, Path):
        if os.path.isabs(trash):
            raise InvalidArgumentError(
                f"Deletion(trash={os.fspath(trash)!r:.120}): expected a plain name, such as "
                "'trash': in a store, a step goes to the trash without being moved"
            )
        return
    top = Path(os.path.realpath(local))
    folder = Path(os.path.realpath(top / trash))
    if not folder.is_relative_to(top):
        return
    parts = folder.relative_to(top).parts
    if len(parts) != 1 or is_step(parts[0]) or parts[0] == "metadata" or parts[0].startswith("."):
        raise InvalidArgumentError(
            f"Deletion(trash={os.fspath(trash)!r:.120}): expected a folder of its own directly "
            f"below {shown(root)}, that is not a step and not 'metadata', or one elsewhere"
        )


def open_step_dir(path: PathLike, *, follow: bool = False) -> tuple[Storage, str]:
    """Return the storage and the step directory of a single checkpoint at `path`.

    Args:
        path: The path.
        follow: True follows a symbolic link of that name. Readers do: links that the user names are
            trusted, links in a checkpoint are not.

    Raises:
        InvalidArgumentError: As `open_root`, or the path has no last name.
    """
    given = _drilled(_place(path), reads=follow)
    above: _Place
    if isinstance(given, S3 | GCS | Memory):
        above, name = parent_of(given)
    elif isinstance(given, _Url):
        text, _, name = given.text.rstrip("/").rpartition("/")
        if not name or text.endswith(":/"):
            raise invalid("path", path, "the URL of a checkpoint, not of a root")
        above = _Url(given.scheme, text)
    elif isinstance(given, Path):
        local = Path(os.path.realpath(given) if follow else os.path.abspath(given))
        above, name = local.parent, local.name
        if not name:
            raise invalid("path", path, "the path of a directory, not a root")
    else:
        alone = _Alone(given)
        above, name = cast("Store", alone), alone.name
    return _opened(path, above, _DEFAULT_TIMEOUTS, True), name


class _Url(Struct, frozen=True):
    """A URL whose scheme is not built in."""

    scheme: str
    text: str


# A path, a store, or a URL of which an installed package makes one.
_Place = Path | StoreConfig | Store | _Url


class _Alone:
    """The objects of a checkpoint, with keys as the folder that it is in would have them.

    A store that is given as an object has nothing above its place. So what writers keep beside a
    checkpoint, such as leases, is in it.
    """

    def __init__(self, store: Store) -> None:
        self.location, _, name = store.location.rstrip("/").rpartition("/")
        self.name = name or "checkpoint"
        self.limits = store.limits
        for each in ("get", "put", "swap", "delete", "delete_if", "list", "copy"):
            if hasattr(store, each):
                setattr(self, each, self._below(getattr(store, each)))

    def _below(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same method, for keys that may begin with the name of the checkpoint."""
        start = f"{self.name}/"
        return lambda *args: call(
            *(each.removeprefix(start) if isinstance(each, str) else each for each in args)
        )


def _open_installed(place: _Url) -> Store:
    """Return the store that an installed package opens for a URL.

    The registered function is called as `open(url)`.

    Raises:
        InvalidArgumentError: There is no such package, it cannot be used, or does not accept the
            URL.
        CheckpointError: The function raised it.
    """
    url = place.text
    point = next((each for each in _points() if each.name == place.scheme), None)
    if point is None:
        usual = _OTHER_NAMES.get(place.scheme)
        advice = (
            "Install the package that provides it, or give a path of a local or mounted file system"
        )
        raise InvalidArgumentError(
            f"path={shown(url)}: no storage is known for {place.scheme!r:.40}, only "
            f"{', '.join(_schemes())}. {f'Use {usual}://' if usual else advice}"
        )
    what = f"path={shown(url)}: {point.value!r:.120}, which is installed for {place.scheme}://,"
    try:
        opened: Any = point.load()(url)
    except CheckpointError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"{what} raised {type(error).__name__}: {error}"
        ) from _if_harmless(error)
    missing = [name for name in dir(Store) if name[0] != "_" and not hasattr(opened, name)]
    if missing:
        raise InvalidArgumentError(
            f"{what} gave {type(opened).__name__}, which is not a store: it lacks "
            f"{', '.join(missing[:5])}"
        )
    return cast("Store", opened)


def _schemes() -> list[str]:
    """Return the schemes of all stores that are built in or installed."""
    return sorted({*_BUILT_IN, *(point.name for point in _points())})


def _points() -> list[EntryPoint]:
    # Imported late: it takes 20 ms, and most programs use built-in schemes.
    from importlib.metadata import entry_points

    return list(entry_points(group=ENTRY_POINTS))


def _if_harmless(error: Exception) -> Exception | None:
    """Return an error, or None if its traceback would show secrets."""
    text = "".join(traceback.format_exception(error))
    return error if redact(text) == text else None


def _place(path: PathLike) -> _Place:
    # A class has the methods of its instances.
    if isinstance(path, S3 | GCS | Memory | Store) and not isinstance(path, type):
        return path
    try:
        text: object = os.fspath(cast("str", path))
    except TypeError as error:
        what = f"a string, a path object or a store, not {type(path).__name__}"
        raise invalid("path", path, what) from error
    if not isinstance(text, str) or not text or "\0" in text:
        raise invalid("path", text, "the path of a directory")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return _absolute(text)
    kind = scheme[1].lower()
    if not scheme[2] and kind not in _OTHER_NAMES and kind not in _schemes():
        return _absolute(text)
    if kind in _STORES:
        return _STORES[kind](text)
    if not scheme[2]:
        raise InvalidArgumentError(
            f"path={shown(text)}: expected a URL such as '{_OTHER_NAMES.get(kind, kind)}://...'. "
            f"Write ./{kind}:... for a path of that name"
        )
    if kind != "file":
        return _Url(kind, text)
    parts = urlsplit(text)
    if parts.query or parts.fragment or "\0" in unquote(parts.path):
        raise InvalidArgumentError(
            f"path={shown(text)}: a file URL has no query and no fragment; write %3F and %23"
        )
    if parts.netloc not in ("", "localhost"):
        raise InvalidArgumentError(f"path={shown(text)}: a file URL of another host")
    return _absolute(unquote(parts.path))


def _absolute(text: str) -> Path:
    """Return a path made absolute now: a program may change its working directory later."""
    given = os.path.expanduser(text)
    if given.startswith("~"):
        raise InvalidArgumentError(
            f"path={shown(text)}: there is no user of that name. Write ./~... for a name that "
            "begins with ~"
        )
    try:
        return Path(given).absolute()
    except FileNotFoundError as error:
        raise InvalidArgumentError(
            f"path={shown(text)}: the working directory was deleted, so that no relative path "
            "leads anywhere. Pass an absolute path"
        ) from error
