"""The package's one form of argument error."""

from typing import NoReturn


def reject(op: str, argument: str, given: object, allowed: str) -> NoReturn:
    """Raise a ValueError that names the operator or function, the argument, what was given and what is allowed."""
    raise ValueError(f"torch_sparse_mla::{op}: argument '{argument}': got {given}; allowed: {allowed}")
