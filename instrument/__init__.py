"""See and change what happens inside a PyTorch network: declared in YAML, recorded in Parquet."""
