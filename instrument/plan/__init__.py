"""The plan: specs resolved against a model, with estimated cost, and its display."""
