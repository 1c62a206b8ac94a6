"""Sizes from which restored arrays get their memory in another way. Imports no jax."""

from __future__ import annotations

# Bytes of the largest array whose buffer is reused; jax may take over larger buffers.
MOST_LENT = 64 << 20
# Below this size, the compiler that makes blank arrays costs more time and memory than copies.
LEAST_BLANK = 128 << 20
# Dtypes of which numpy stores one value per byte, and jax may store more.
LESS_THAN_A_BYTE = frozenset({"int2", "int4", "uint2", "uint4", "float4_e2m1fn"})
