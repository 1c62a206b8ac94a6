"""The on-disk format: manifest, zarr, OCDBT, digests, dtypes and regions. Pure, no I/O."""
