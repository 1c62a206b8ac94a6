"""The verify flow: compare a step with its manifest, byte by byte."""
