"""A step's rows: the probe that attaches a plan to a model, and the recorder that gathers what its hooks see."""
