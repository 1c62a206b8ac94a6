"""The protocol between the agents of a job over TCP: JSON, one message per line.

    server   ServerHello          a random number
    client   ClientProof          another one, and the proof that it knows the key
    server   ServerProof          its own proof
    client   PartOpenRequest      the wanted part of a snapshot
    server   PartOpenResult       the files of that part, or why there are none
    client   PartReadRequest      a range of bytes of a file; repeated at will
    server   these bytes

The server only reads: it writes nothing that a client sends. A client can name only the files that
the server has listed.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, field

# Limits of a message without a proof so far, of other messages, and of the list of files.
MOST_HELLO_BYTES, MOST_BYTES, MOST_FILES_BYTES = 1024, 1 << 16, 64 << 20
# Time limit for the proofs.
HELLO_SECONDS = 10.0


class ServerHello(Struct, frozen=True, tag="ckpt-parts-1"):
    """The first line of a connection.

    Attributes:
        nonce: A random number of the server.
    """

    nonce: str


class ClientProof(Struct, frozen=True, tag="answer"):
    """The answer of the client.

    Attributes:
        nonce: A random number of the client.
        proof: Result of `proof_of`.
    """

    nonce: str
    proof: str


class ServerProof(Struct, frozen=True, tag="welcome"):
    """The server knows the key, too.

    Attributes:
        proof: Result of `proof_of`.
    """

    proof: str


class PartOpenRequest(Struct, frozen=True, tag="open"):
    """Asks for the part of a snapshot that one process has saved.

    Attributes:
        part: Number of that process.
        step: The snapshot.
        save: Its `Manifest.save`.
    """

    part: int
    step: int
    save: str


class PartOpenResult(Struct, frozen=True, tag="opened"):
    """The files of a part.

    Attributes:
        files: Size in bytes of each file, by path.
        problem: Reason why there are none; empty if there are.
    """

    files: dict[str, Annotated[int, Meta(ge=0)]] = field(default_factory=dict)
    problem: str = ""


class PartReadRequest(Struct, frozen=True, tag="read"):
    """Asks for bytes of a file; they follow at once.

    Attributes:
        path: One of the listed files.
        offset: Offset of the first byte.
        nbytes: Number of bytes.
    """

    path: str
    offset: int
    nbytes: int
