"""What is asked: the vocabulary and the shape of a configuration. Nothing here imports torch."""
