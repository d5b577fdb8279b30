"""What is recorded: the tables with their columns, the statistics, the kinds of hooks, and the interface of sinks. Imports no torch."""
