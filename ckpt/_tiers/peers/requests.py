"""What the keepers of a job say to each other over TCP: JSON, one message a line.

    server   Hello      a random number
    client   Answer     another one, and the proof that it knows the key
    server   Welcome    its own proof
    client   Open       which part of which snapshot
    server   Opened     the files of that part, or why there are none
    client   Read       which bytes of which of these files; as often as it likes
    server   these bytes

The server only reads: nothing that a client sends is written anywhere. A client can name the files
that it was told of, and no others.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

# Of a message of which there is not yet a proof, and of any other one but the list of files.
MOST_HELLO_BYTES, MOST_BYTES, MOST_FILES_BYTES = 1024, 1 << 16, 64 << 20
# So long may the proofs take.
HELLO_SECONDS = 10.0


class Hello(Struct, frozen=True, tag="ckpt-parts-1"):
    """The first line of a connection.

    Attributes:
        nonce: A random number of the server.
    """

    nonce: str


class Answer(Struct, frozen=True, tag="answer"):
    """The answer of the client.

    Attributes:
        nonce: A random number of the client.
        proof: As of `proof_of`.
    """

    nonce: str
    proof: str


class Welcome(Struct, frozen=True, tag="welcome"):
    """The server knows the key, too.

    Attributes:
        proof: As of `proof_of`.
    """

    proof: str


class Open(Struct, frozen=True, tag="open"):
    """Asks for what one process has saved of a snapshot.

    Attributes:
        part: Number of that process.
        step: The snapshot.
        save: `Manifest.save` of it.
    """

    part: int
    step: int
    save: str


class Opened(Struct, frozen=True, tag="opened"):
    """The files of a part.

    Attributes:
        files: The size in bytes of each, by path.
        problem: Why there are none; empty if there are.
    """

    files: dict[str, Annotated[int, Meta(ge=0)]] = field(default_factory=dict)
    problem: str = ""


class Read(Struct, frozen=True, tag="read"):
    """Asks for bytes of a file; they follow at once.

    Attributes:
        path: One of the files that were told.
        offset: Where to begin.
        nbytes: How many.
    """

    path: str
    offset: int
    nbytes: int
