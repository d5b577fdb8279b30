"""Definitions of what is recorded: tables, statistics, kinds of hooks, the interface of sinks. Does not import torch."""
