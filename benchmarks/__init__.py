"""Side-by-side measurements of checkpoint libraries. Run with `python -m benchmarks`."""
