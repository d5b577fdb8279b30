"""What a field of the configuration can be: types, globs, targets (`_target_`) and registered names. Imports no torch."""
