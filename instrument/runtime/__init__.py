"""The Python process: signals, forked child processes, the compiler that is imported late, and import names that have moved."""
