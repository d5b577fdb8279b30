"""The command line: compose a configuration with Hydra, run a job, return an exit code."""
