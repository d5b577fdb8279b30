"""The configurations that are installed with the package; Hydra reads the YAML files beside this one."""
