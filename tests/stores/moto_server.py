"""moto as a process of its own: prints its port, and ends with its input.

S3 compares and writes in one step. moto looks at the condition of a write first and writes then,
in a thread for every request, so that of two writers who meet in between both would win.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

_compared = S3Response.put_object
_guard = threading.Lock()


def put_object(response: Any) -> Any:
    with _guard:
        return _compared(response)


responses: Any = S3Response
responses.put_object = put_object

if __name__ == "__main__":
    server = ThreadedMotoServer("127.0.0.1", 0, False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)  # noqa: T201
    sys.stdin.read()
