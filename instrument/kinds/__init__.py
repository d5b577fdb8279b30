"""Where PyTorch lets us in: one file a family of hook kinds."""
