"""The values that hooks get: tensors inside containers, sharded tensors, sparse tensors."""
