"""Checkpoints of Orbax, described as manifests of this library.

    open_orbax            step          the directory, its items, its small files
      parse_tree          tree          `_METADATA`: the tree, and the kinds of its leaves
      read_database       database      the keys of an OCDBT database, and the places of values
        parse_node        ocdbt_nodes
      parse_array         zarr_arrays   one array: its shape, and the places of its chunks

The result is an ordinary manifest whose chunks lie in Orbax's files. The engine therefore does the
whole restore, with its usual bounds of memory.
"""
