"""The folders of runs: their record and lock, their state before a run, their remote copy, and operations on locked folders."""
