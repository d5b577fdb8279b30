"""Relations that hold in every correct training, one file each, and what they read of the training."""
