"""The Python process: signals, the compiler that is imported late, and import names that have moved."""
