"""A run in progress, in the terminal and in the browser. Command line: `python -m instrument.watch RUN`."""
