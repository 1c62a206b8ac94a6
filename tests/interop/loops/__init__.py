"""Train loops as public code bases have them, moved here by the page about moving from Orbax.

Each module has `before(root)`, which trains some steps with the library that the code base had, and
`train(root, until)`, the loop as it is after the move. That prints a line for each step; its last
line is a digest of all bits of the state.
"""
