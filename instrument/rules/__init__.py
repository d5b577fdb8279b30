"""Rules: they read the rows of each step, and report what is wrong."""
