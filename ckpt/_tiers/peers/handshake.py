"""The handshake of two agents of a job: each proves that it knows the key. Pure.

Both send a random number, and prove the key by the HMAC of both numbers and of their own role. So
the key is never sent, no proof is valid a second time, and no proof of one side is valid for the
other. This is the mutual challenge and response of ISO/IEC 9798-4, with HMAC-SHA-256 (RFC 2104,
RFC 6234).
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

Role = Literal["server", "client"]

KEY_BYTES = NONCE_BYTES = 32


def new_key() -> str:
    """Return a new key of a job, in hexadecimal."""
    return secrets.token_hex(KEY_BYTES)


def new_nonce() -> str:
    """Return a random number that is used once, in hexadecimal."""
    return secrets.token_hex(NONCE_BYTES)


def proof_of(key: str, role: Role, server_nonce: str, client_nonce: str) -> str:
    """Return the proof that one side of a connection knows the key."""
    # The length prevents a client, which chooses its own number, from moving bytes between the two.
    length = str(len(server_nonce))
    said = "\0".join(["ckpt parts 1", role, length, server_nonce, client_nonce])
    return hmac.new(bytes.fromhex(key), said.encode(), "sha256").hexdigest()


def is_proof(given: str, key: str, role: Role, server_nonce: str, client_nonce: str) -> bool:
    """Return True if the other side's proof is right; takes the same time for any answer."""
    wanted = proof_of(key, role, server_nonce, client_nonce)
    return hmac.compare_digest(given.encode(), wanted.encode())
