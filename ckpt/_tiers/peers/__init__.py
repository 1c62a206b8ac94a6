"""Parts of snapshots on other hosts of a job: served, fetched, and recovered."""
