"""The commands of `python -m torch_sparse_mla`, a module each.

`add_parser` declares the options, `run` returns the exit code.
"""
