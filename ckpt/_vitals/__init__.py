"""Vital signs: figures about an array's values, the same however it is cut. Pure, numpy only."""
