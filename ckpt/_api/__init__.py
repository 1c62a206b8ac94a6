"""The faces of the library: the calls of its users. No logic of their own."""
