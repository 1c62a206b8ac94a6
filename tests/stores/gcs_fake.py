"""A small fake of Google Cloud Storage: what TensorStore's `gcs` driver asks for, and no more.

Uploads (media), reads of ranges, listings page by page, deletions; conditions on generations are
obeyed everywhere, and no generation is given twice. Of the XML API it has copies, and looks at an
object, as obstore asks for them. Faults come from the proxy in front of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from tests.stores.wire import Head, Loopback, read_head, read_pieces, send

__all__ = ["GcsFake"]

_UPLOAD, _OBJECTS, _DOWNLOAD = "/upload/storage/v1/b/", "/storage/v1/b/", "/download/storage/v1/b/"
_PAGE = 1000


@dataclass(frozen=True)
class _Object:
    generation: int
    data: bytes


class GcsFake:
    """Buckets in memory, served on `port` while the block lasts.

    Attributes:
        buckets: Objects by name, by bucket. A bucket that is not there is an error.
        read_only: Buckets in which nothing may be changed.
        tokens: Bearer tokens that are let in; None for everybody.
    """

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, _Object]] = {}
        self.read_only: set[str] = set()
        self.tokens: set[str] | None = None
        self._generation = 1_000_000
        self._server = Loopback(self._serve)

    def __enter__(self) -> GcsFake:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    def put(self, bucket: str, name: str, data: bytes) -> None:
        """Write an object as another program does."""
        self._generation += 1
        self.buckets[bucket][name] = _Object(self._generation, data)

    @property
    def port(self) -> int:
        return self._server.port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await read_head(reader)) is not None:
            if head.headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = b"".join([piece async for piece in read_pieces(reader, head)])
            status, answer, headers = self._answer(head, body)
            await send(writer, status, answer, **headers)

    def _answer(self, head: Head, body: bytes) -> tuple[int, bytes, dict[str, Any]]:
        method, query = head.first[0], head.query
        given = head.headers.get("authorization", "").removeprefix("Bearer ")
        if self.tokens is not None and given not in self.tokens:
            return _error(401, f"Invalid Credentials: authorization: Bearer {given}")
        apis = (_UPLOAD, _DOWNLOAD, _OBJECTS)
        start = next((each for each in apis if head.path.startswith(each)), "/")
        bucket, _, rest = head.path.removeprefix(start).partition("/")
        objects = self.buckets.get(bucket)
        if objects is None:
            return _error(404, "The specified bucket does not exist.")
        if method in ("POST", "DELETE", "PUT") and bucket in self.read_only:
            return _error(403, "the caller does not have storage.objects.create access")
        if start == "/":
            return self._of_xml(method, bucket, rest, head)
        if start == _UPLOAD:
            if query.get("uploadType") == "resumable":
                return self._begin_upload(bucket, head)
            name = query["name"]
        elif not rest:
            return 200, json.dumps({"name": bucket}).encode(), {"Content_Type": "application/json"}
        elif rest in ("o", "o/"):
            return self._list(objects, query)
        else:
            name = rest.removeprefix("o/")
        found = objects.get(name)
        generation = found.generation if found else 0
        if int(query.get("ifGenerationMatch", generation)) != generation:
            return _error(412, "At least one of the pre-conditions you specified did not hold.")
        if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == generation:
            return (304, b"", {}) if method == "GET" else _error(412, "conditionNotMet")
        if start == _UPLOAD:
            self.put(bucket, name, body)
            return 200, _described(name, objects[name]), {"Content_Type": "application/json"}
        if found is None:
            return _error(404, f"No such object: {bucket}/{name}")
        if method == "DELETE":
            del objects[name]
            return 204, b"", {}
        return _read(name, found, head)

    def _of_xml(
        self, method: str, bucket: str, name: str, head: Head
    ) -> tuple[int, bytes, dict[str, Any]]:
        """Copy an object, or tell its size."""
        objects, source = self.buckets[bucket], ""
        if method == "PUT":
            source = unquote(head.headers["x-goog-copy-source"]).removeprefix(f"{bucket}/")
        found = objects.get(source or name)
        if found is None:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        if source:
            self.put(bucket, name, found.data)
            return 200, b"<CopyObjectResult/>", {}
        changed = "Thu, 01 Jan 2026 00:00:00 GMT"
        headers = {"length": len(found.data), "ETag": f'"{found.generation}"'}
        return 200, b"", {**headers, "Last_Modified": changed}

    def _begin_upload(self, bucket: str, head: Head) -> tuple[int, bytes, dict[str, Any]]:
        """Begin an upload whose bytes come with a request of their own, as gcsfs does it."""
        name = quote(head.query["name"], safe="")
        where = f"http://{head.headers['host']}{_UPLOAD}{bucket}/o?name={name}"
        return 200, b"", {"Location": where}

    def _list(
        self, objects: dict[str, _Object], query: dict[str, str]
    ) -> tuple[int, bytes, dict[str, Any]]:
        prefix, start = query.get("prefix", ""), query.get("startOffset", "")
        end, after = query.get("endOffset"), query.get("pageToken", "")
        names = sorted(
            name
            for name in objects
            if name.startswith(prefix)
            and name >= start
            and (not end or name < end)
            and name > after
        )
        folders: list[str] = []
        if mark := query.get("delimiter"):
            ends = {name: name.find(mark, len(prefix)) for name in names}
            folders = sorted({name[: end + 1] for name, end in ends.items() if end >= 0})
            names = [name for name, end in ends.items() if end < 0]
        size = min(int(query.get("maxResults", _PAGE)), _PAGE)
        answer: dict[str, Any] = {
            "items": [json.loads(_described(name, objects[name])) for name in names[:size]],
            "prefixes": folders,
        }
        if len(names) > size:
            answer["nextPageToken"] = names[size - 1]
        return 200, json.dumps(answer).encode(), {"Content_Type": "application/json"}


def _read(name: str, found: _Object, head: Head) -> tuple[int, bytes, dict[str, Any]]:
    if head.query.get("alt") != "media":
        return 200, _described(name, found), {"Content_Type": "application/json"}
    headers = {"x_goog_generation": found.generation, "Content_Type": "application/octet-stream"}
    wanted = head.headers.get("range")
    if wanted is None:
        return 200, found.data, headers
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    size = len(found.data)
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= size:
        return 416, b"", {"Content_Range": f"bytes */{size}"}
    headers["Content_Range"] = f"bytes {start}-{stop - 1}/{size}"
    return 206, found.data[start:stop], headers


def _described(name: str, found: _Object) -> bytes:
    return json.dumps(
        {
            "name": name,
            "generation": str(found.generation),
            "metageneration": "1",
            "size": str(len(found.data)),
            "updated": "2026-01-01T00:00:00.000Z",
            "timeCreated": "2026-01-01T00:00:00.000Z",
        }
    ).encode()


def _error(status: int, message: str) -> tuple[int, bytes, dict[str, Any]]:
    answer = {"error": {"code": status, "message": message}}
    return status, json.dumps(answer).encode(), {"Content_Type": "application/json"}


def _main() -> None:
    """Serve a bucket until the input ends; the port is printed."""
    with GcsFake() as fake:
        fake.buckets[sys.argv[1]] = {}
        sys.stdout.write(f"{fake.port}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _main()
