"""Ahead-of-time compilation of Triton kernels, for tests that look at what the compiler made of them. No GPU needed."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from torch_sparse_mla.triton_launch import AotConfiguration


def compiled(configuration: AotConfiguration, capability: int) -> CompiledKernel:
    _, kernel, signature, constexprs, options = configuration
    types = {name: spec.split(":")[0] for name, spec in signature.items()} | dict.fromkeys(constexprs, "constexpr")
    assert set(types) == set(kernel.arg_names), f"signature and constexprs name {sorted(types)}"
    attributes = {
        (kernel.arg_names.index(name),): [["tt.divisibility", int(spec.split(":")[1])]]
        for name, spec in signature.items()
        if ":" in spec
    }
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constexprs, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
