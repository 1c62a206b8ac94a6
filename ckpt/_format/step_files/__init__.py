"""The files of a step: their names, files outside of the step, and the parts of a job."""
