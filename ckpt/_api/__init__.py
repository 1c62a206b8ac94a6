"""The faces of the library: what users call. No logic of their own."""
