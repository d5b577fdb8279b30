"""Training runs: model, data, training loop and run folder. `attach` adds hooks to a custom training loop."""
