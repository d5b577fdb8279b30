"""The probe, which attaches a plan to a model, and the recorder, which collects the rows of a step."""
