"""Vital signs: what an array's values come to, the same however it is cut. Pure, numpy only."""
