"""The commands: one module for each verb of `instrument VERB`, and the code that they share."""
