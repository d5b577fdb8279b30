"""The command line: Hydra in, exit code out."""
