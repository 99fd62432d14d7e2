"""Methods for comparison: h2o, double_sparsity, hshare, infinigen and magicpig. Each is offered to Saccade under the
entry point ``saccade.methods`` (pyproject.toml), as any package's methods are."""
