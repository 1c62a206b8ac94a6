"""The saves of one root: their order, their policies, and what they replace."""
