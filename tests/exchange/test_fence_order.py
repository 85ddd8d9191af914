"""The rule that no test on an x86 host can see broken: payload, fence, then flag, in the compiled code (PTX)."""

import functools
import re

import pytest

from torch_sparse_mla.exchange import triton_kernels, triton_kernels_pack_unpack

from ..compiled_triton import compiled

CONFIGURATIONS = {
    entry.name: entry
    for module in (triton_kernels, triton_kernels_pack_unpack)
    for entry in module.aot_configurations(90)
}


@functools.cache
def ptx_lines(name: str) -> list[str]:
    return compiled(CONFIGURATIONS[name], 90).asm["ptx"].splitlines()


def positions(lines: list[str], pattern: str) -> list[int]:
    return [number for number, line in enumerate(lines) if re.search(pattern, line)]


PUSH_FORMS, WAIT_FORMS, PACK_FORMS, UNPACK_FORMS = (
    [name for name in CONFIGURATIONS if name.startswith(kernel)] for kernel in ("push", "wait", "pack", "unpack")
)
# Records of four bytes are loaded like flags and counters, from which no pattern can tell them; the loop is the same.
WAIT_FORMS.remove("wait-4")


def test_there_are_forms_of_vectors_and_bytes_and_of_several_launches():
    for kernel in ("push", "wait", "pack", "unpack"):
        for form in ("656", "37", "656-more-layers-follow", "37-more-layers-follow"):
            assert f"{kernel}-{form}" in CONFIGURATIONS


@pytest.mark.parametrize("form", PUSH_FORMS)
def test_push_fences_for_the_system_between_payload_and_flags(form):
    lines = ptx_lines(form)
    payload = positions(lines, r"st\.global\.(v4\.b32|b8)")
    (fence,) = positions(lines, r"fence\.acq_rel\.sys")
    assert payload and max(payload) < fence
    counted = positions(lines, COUNTED)
    if form.endswith("more-layers-follow"):
        assert not counted
        return
    (counted,) = counted
    flag = positions(lines, r"st\.release\.sys\.global\.b64")[-1]
    assert [number for number in positions(lines, r"bar\.sync") if fence < number < counted]
    assert fence < counted < flag


def test_every_record_moves_in_vectors_of_16_bytes():
    for name in ("push-656", "wait-656", "pack-656", "unpack-656"):
        lines = ptx_lines(name)
        assert positions(lines, r"ld\.global\.v4\.b32") and positions(lines, r"st\.global\.v4\.b32")
    assert len(positions(ptx_lines("push-656"), r"st\.global\.v4")) == 8


@pytest.mark.parametrize("form", WAIT_FORMS)
def test_wait_polls_with_acquire_before_it_reads_and_leaves_the_loop_in_time(form):
    lines = ptx_lines(form)
    polls = positions(lines, r"(acquire\.sys|sys\.acquire)\.b64")
    payload = positions(lines, r"ld\.global\.(v4\.b32|b8)")
    clocks = positions(lines, r"%globaltimer")
    assert len(polls) == 2 and len(clocks) == 2 and payload
    assert polls[0] < clocks[0] < polls[1] < clocks[1] < min(payload)
    # In the loop the time that passed is compared with the parameter, and the branch back depends on it.
    label = re.match(r"\$\w+", lines[positions(lines[: polls[1]], r"^\$L__BB\w+:")[-1]])[0]
    (back,) = positions(lines, rf"@%p\d+\s+bra\s+{re.escape(label)};")
    (limit,) = (re.search(r"%rd\d+", lines[line])[0] for line in positions(lines, timeout_parameter(form)))
    (late,) = (
        match[1]
        for line in lines[clocks[1] : back]
        if (match := re.search(rf"setp\.(?:le|gt)\.s64\s+(%p\d+), %rd\d+, {limit};", line))
    )
    (goes_on,) = (match[1] for line in lines[clocks[1] : back] if (match := re.search(r"(%p\d+), .*" + late, line)))
    assert f"@{goes_on} " in lines[back] and back < min(payload)


def timeout_parameter(form: str) -> str:
    """Its load: constants are no parameters of the compiled kernel."""
    configuration = CONFIGURATIONS[form]
    parameters = [name for name in configuration.kernel.arg_names if name in configuration.signature]
    return rf"ld\.param\.b64.*_param_{parameters.index('timeout_ns')}\]"


COUNTED = r"atom\.(global\.)?(gpu\.acq_rel|acq_rel\.gpu).*add"


@pytest.mark.parametrize("form", PACK_FORMS)
def test_pack_fences_for_the_system_what_it_stores_at_peers(form):
    """The flag that follows is written by the stream, which knows of the kernel's end and not of its stores."""
    lines = ptx_lines(form)
    payload = positions(lines, r"st\.global\.(v4\.b32|b8)")
    (fence,) = positions(lines, r"fence\.acq_rel\.sys")
    assert payload and max(payload) < fence
    counted = positions(lines, COUNTED)
    if form.endswith("more-layers-follow"):
        assert not counted
        return
    (counted,) = counted
    assert [number for number in positions(lines, r"bar\.sync") if fence < number < counted]


@pytest.mark.parametrize("form", UNPACK_FORMS)
def test_unpack_gives_leave_after_every_block_has_read_and_the_flags_are_taken_back(form):
    lines = ptx_lines(form)
    read = positions(lines, r"ld\.global\.(v4\.b32|b8)")
    counted = positions(lines, COUNTED)
    if form.endswith("more-layers-follow"):
        assert not counted
        return
    (counted,) = counted
    assert [number for number in positions(lines, r"bar\.sync") if max(read) < number < counted]
    leave = [number for number in positions(lines, r"st\.release\.sys") if number > counted]
    if form.endswith("without-leave"):
        assert not leave
    else:
        (leave,) = leave
        # The last of the plain stores: a flag.
        assert counted < max(positions(lines[:leave], r"st\.global\.b32"))
