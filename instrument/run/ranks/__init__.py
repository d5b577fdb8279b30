"""Several processes that make one run."""
