"""`exact(model)`: batch-invariant operations in place of torch's own."""
