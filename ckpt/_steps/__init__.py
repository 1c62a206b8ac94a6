"""Everything decided about the steps of one root."""
