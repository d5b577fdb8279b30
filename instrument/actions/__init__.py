"""Actions: what a hook does with a tensor. Each is a set of pure functions on tensors and a class that reads the spec."""
