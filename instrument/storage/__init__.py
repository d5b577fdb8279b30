"""Where rows, recorded tensors and run records are written and found: Parquet, remote folders, the folders of runs."""
