"""Built-in actions and functions of `modify`. Each file has the fields of its actions and what they do.

The files are imported before a configuration is parsed. They import torch inside functions only.
"""
