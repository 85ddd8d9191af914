"""The rule that no test on an x86 host can see broken: payload, fence, then flag, in the compiled code (PTX)."""

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torch_sparse_mla.exchange.triton_kernels import aot_configurations


def ptx_lines(name: str) -> list[str]:
    (configuration,) = (entry for entry in aot_configurations(90) if entry.name == name)
    _, kernel, signature, constexprs, options = configuration
    types = {key: value.split(":")[0] for key, value in signature.items()} | dict.fromkeys(constexprs, "constexpr")
    attributes = {
        (kernel.arg_names.index(key),): [["tt.divisibility", 16]] for key in signature if ":" in signature[key]
    }
    source = ASTSource(kernel, {key: types[key] for key in kernel.arg_names}, constexprs, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options)).asm["ptx"].splitlines()


def positions(lines: list[str], pattern: str) -> list[int]:
    return [number for number, line in enumerate(lines) if re.search(pattern, line)]


def test_push_fences_for_the_system_between_payload_and_flags():
    lines = ptx_lines("push-656-flags")
    payload = positions(lines, r"st\.global\.v4")
    (fence,) = positions(lines, r"fence\.acq_rel\.sys")
    (counted,) = positions(lines, r"atom\.(global\.)?(sys\.acq_rel|acq_rel\.sys).*add")
    flag = positions(lines, r"st\.release\.sys\.global")[-1]
    meeting = [number for number in positions(lines, r"bar\.sync") if fence < number < counted]
    assert payload and meeting
    assert max(payload) < fence < counted < flag


def test_every_record_moves_in_vectors_of_16_bytes():
    for name in ("push-656-flags", "wait-656-flags"):
        lines = ptx_lines(name)
        assert positions(lines, r"ld\.global\.v4\.b32") and positions(lines, r"st\.global\.v4\.b32")
    assert len(positions(ptx_lines("push-656-flags"), r"st\.global\.v4")) == 8


def test_wait_polls_with_acquire_before_it_reads():
    lines = ptx_lines("wait-656-flags")
    polls = positions(lines, r"(acquire\.sys|sys\.acquire)")
    payload = positions(lines, r"ld\.global\.v4")
    assert polls and payload
    assert max(polls) < min(payload)
