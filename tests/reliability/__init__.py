"""Campaigns: the same attack many times over, counted. Small counts in the tests, large by hand."""
