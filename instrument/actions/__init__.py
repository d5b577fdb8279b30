"""What is done at a site: a pure function on a tensor first, and a thin class around it that reads the spec."""
