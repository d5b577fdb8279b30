"""The commands: one module for each verb of `instrument VERB` except `run` and `plan`, and the code that they share."""
