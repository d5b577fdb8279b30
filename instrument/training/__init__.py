"""Training runs: model, data, training loop, several processes and sweeps."""
