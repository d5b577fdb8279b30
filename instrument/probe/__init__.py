"""Capture: the probe that attaches a plan to a model, and the recorder that collects the rows of a step."""
