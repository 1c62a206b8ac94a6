"""Traces of saves and restores: events as a timeline, and pictures of it."""
