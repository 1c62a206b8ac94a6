"""Sizes from which restored arrays get their memory in another way. Imports no jax."""

from __future__ import annotations

# Of the buffers of larger arrays, jax may take over the memory.
MOST_LENT = 64 << 20
# For less, the compiler that makes blank arrays costs more time and memory than copies do.
LEAST_BLANK = 128 << 20
# A numpy array has a byte for each value of these, and an array of jax may have less.
LESS_THAN_A_BYTE = frozenset({"int2", "int4", "uint2", "uint4", "float4_e2m1fn"})
