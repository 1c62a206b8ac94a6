"""Source files: data files of a virtual step, which lie where another library wrote them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Text = Annotated[str, Meta(pattern=r"^[^\x00]{1,4096}\Z")]


class SourceFile(Struct, frozen=True):
    """A file outside of the step that holds chunks of it.

    Attributes:
        folder: Path of its directory, or URL of its place in a store.
        path: Path of the file in the folder, with `/`.
        size: Number of bytes that belong to the step, from the beginning of the file.
        fingerprint: A text that changes whenever the file changes. It is compared as long as the
            chunks have no digests.
    """

    folder: Text
    path: Text
    size: Annotated[int, Meta(ge=0, le=1 << 62)]
    fingerprint: str

    @property
    def location(self) -> str:
        """The whole path or URL."""
        return f"{self.folder.rstrip('/')}/{self.path}"
