"""The files of a step: their names, those that lie elsewhere, and the parts of a job."""
