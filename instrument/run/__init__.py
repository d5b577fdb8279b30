"""A run: the model, the data, the loop, the folder that it leaves; and the same hooks on a loop of one's own."""
