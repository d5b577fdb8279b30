"""The dry run: a few steps are executed to estimate the time and the output of the complete run."""
