"""What numpy saved, `*.npz` and `*.npy`, described as a manifest over these files."""
