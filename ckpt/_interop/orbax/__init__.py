"""Checkpoints of Orbax: what they hold is described as a manifest of this library.

    open_orbax            step          the directory, its items, its small files
      parse_tree          tree          `_METADATA`: the tree, and what its leaves are
      read_database       database      the keys of an OCDBT database, and where their values are
        parse_node        ocdbt_nodes
      parse_array         zarr_arrays   one array: its shape, and where its chunks are

What comes out is an ordinary manifest whose chunks lie in Orbax's files. So everything that
restores, and everything that bounds its memory, is the engine's.
"""
