"""The operator table against what is registered, and how the package is imported."""

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_sparse_mla
from torch_sparse_mla._ops import NAMESPACE, OPS, native_library

PACKAGE = Path(torch_sparse_mla.__file__).parent
TESTS = Path(__file__).parents[1]

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


def schema_of(op) -> torch._C.FunctionSchema:
    return getattr(getattr(torch.ops, NAMESPACE), op.name).default._schema


def family_of(op) -> str:
    """The folder: "decode" for `torch_sparse_mla.decode.reference`."""
    return op.reference.__module__.split(".")[1]


@every_op
def test_returns_nothing_and_declares_what_it_mutates(op):
    schema = schema_of(op)
    assert list(schema.returns) == []
    assert any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)


@every_op
def test_mutated_arguments_are_named_as_outputs_or_state(op):
    """A reader of a call sees by the names what it writes; inputs are never written."""
    written = {argument.name for argument in schema_of(op).arguments if argument.alias_info is not None}
    outputs = {"out", "lse", "workspace", "workspaces", "plan", "gathered", "slots", "counts", "candidates", "topk"}
    assert written <= outputs | {"cache", "state", "ring", "pools", "resident"}


@every_op
def test_has_a_fake_and_a_cpu_kernel(op):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.qualified_name, "Meta")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.qualified_name, "CPU")
    assert torch.Tag.pt2_compliant_tag in getattr(getattr(torch.ops, NAMESPACE), op.name).default.tags


@pytest.mark.gpu
@every_op
def test_has_a_cuda_kernel(op):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.qualified_name, "CUDA")
    assert callable(op.load_triton())


@every_op
def test_reference_and_check_take_the_arguments_of_the_schema(op):
    names = [argument.name for argument in schema_of(op).arguments]
    defaults = {
        argument.name: argument.default_value for argument in schema_of(op).arguments if argument.has_default_value()
    }
    for function in (op.reference, op.check):
        parameters = inspect.signature(function).parameters
        assert list(parameters) == names
        given = {name: value.default for name, value in parameters.items() if value.default is not value.empty}
        assert given == defaults
    assert op.reference.__name__ == op.name
    assert op.check.__name__ == f"check_{op.name}"
    assert op.triton.split(":")[1] == op.name


@every_op
def test_public_function_is_documented(op):
    function = getattr(torch_sparse_mla, op.name)
    assert op.name in torch_sparse_mla.__all__
    documentation = inspect.getdoc(function)
    summary = documentation.splitlines()[0]
    assert summary.endswith(".") and len(summary) < 121
    for section in ("Args:", "Raises:", "Capture:"):
        assert section in documentation, section
    arguments = documentation.split("Args:")[1].split("Raises:")[0]
    for name in inspect.signature(function).parameters:
        assert name in arguments, f"{name} is not described"


@every_op
def test_has_tests_of_its_name_and_an_opcheck(op):
    folder = TESTS / family_of(op)
    own = (folder / f"test_{op.name}.py").read_text()
    family = "".join(path.read_text() for path in sorted(folder.glob("test_*.py")))
    assert "def test_opcheck" in own or f"def test_{op.name}_opcheck" in family


def test_no_operator_is_registered_beyond_the_table():
    registered = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(f"{NAMESPACE}::")
    }
    assert registered == set(OPS)


def test_splitting_ops_are_registered_operators():
    assert "torch_sparse_mla::sparse_ckv_decode" in torch_sparse_mla.SPLITTING_OPS
    for name in torch_sparse_mla.SPLITTING_OPS:
        namespace, op = name.split("::")
        assert namespace == NAMESPACE
        assert str(getattr(getattr(torch.ops, namespace), op).default) == f"{namespace}.{op}.default"
        assert torch.Tag.cudagraph_unsafe not in getattr(getattr(torch.ops, namespace), op).default.tags


@every_op
def test_explain_names_the_cpu_kernel(op):
    explained = torch_sparse_mla.explain(op.name)
    assert (explained["op"], explained["device"]) == (op.name, "cpu")
    assert explained["kernel"] in (("reference",) if native_library is None else ("reference", "native C++"))
    assert explained["why"]


@pytest.mark.gpu
@every_op
def test_explain_names_the_cuda_kernel(op):
    explained = torch_sparse_mla.explain(op.name, "cuda:0")
    native = bool(op.native_cuda) and torch.cuda.get_device_capability(0) == (9, 0)
    assert explained["kernel"] == ("native C++" if native and "without nvcc" not in explained["why"] else "triton")


def test_explain_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    explained = torch_sparse_mla.explain("sparse_ckv_decode", torch.device("cuda"))
    assert (explained["kernel"], explained["why"]) == ("none", "PyTorch sees no CUDA device")


def test_explain_rejects_what_it_does_not_know():
    with pytest.raises(ValueError, match=r"explain: op: got 'decode'; allowed: one of .*sparse_ckv_decode"):
        torch_sparse_mla.explain("decode")
    for device in ("meta", "gpu", "cpu:x"):
        with pytest.raises(ValueError, match=rf"explain: device: got '{device}'; allowed: cpu or cuda"):
            torch_sparse_mla.explain("sparse_ckv_decode", device)


def run_python(source: str, **environment: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


IMPORT_TWICE = """
import sys
import torch_sparse_mla

def import_again(folder):
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_sparse_mla"]:
        del sys.modules[name]
    if folder:
        sys.path.insert(0, folder)
    try:
        import torch_sparse_mla
    except ImportError as error:
        print("ImportError:", error)

import_again(None)
import_again({folder!r})
"""


def test_rejects_a_second_import_and_a_second_copy(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "torch_sparse_mla", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    result = run_python(IMPORT_TWICE.format(folder=str(tmp_path)))
    assert result.returncode == 0, result.stderr
    again, copy = result.stdout.splitlines()
    for line, folder in ((again, PACKAGE), (copy, tmp_path / "torch_sparse_mla")):
        assert line.startswith("ImportError: torch_sparse_mla: the operator namespace 'torch_sparse_mla' is registered")
        assert str(folder) in line
        assert "Keep one copy on sys.path" in line and "start a new process" in line


WITHOUT_NATIVE = """
import torch, torch_sparse_mla
print([torch_sparse_mla.explain(op)["kernel"] for op in torch_sparse_mla._ops.OPS])
print(torch_sparse_mla.explain("sparse_ckv_decode")["why"])
out, lse = torch_sparse_mla.merge_partial_attention(torch.ones(2, 1, 1, 512), torch.zeros(2, 1, 1))
print(float(out.sum()))
"""


def test_native_code_can_be_turned_off():
    result = run_python(WITHOUT_NATIVE, TORCH_SPARSE_MLA_NATIVE="0")
    assert result.returncode == 0, result.stderr
    kernels, why, total = result.stdout.splitlines()
    assert kernels == str(["reference"] * len(OPS))
    assert why == "the native library is not in use: TORCH_SPARSE_MLA_NATIVE=0"
    assert float(total) == 512


def test_the_form_of_the_kernels_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch_sparse_mla._ops.registration, "native_cuda_ops", {"sparse_ckv_decode"})
    monkeypatch.delenv("TORCH_SPARSE_MLA_NATIVE", raising=False)
    forms = "33 heads and more in blocks of 16 heads (narrow) or of 64 (wide): "
    said = torch_sparse_mla.explain("sparse_ckv_decode", "cuda")
    assert said["kernel"] == "native C++"
    assert said["why"].endswith(forms + "whichever a model of clocks finds faster")
    for form in ("narrow", "wide"):
        monkeypatch.setenv("TORCH_SPARSE_MLA_NATIVE", form)
        why = torch_sparse_mla.explain("sparse_ckv_decode", "cuda")["why"]
        assert why.endswith(f"{forms}TORCH_SPARSE_MLA_NATIVE={form}")
    monkeypatch.setenv("TORCH_SPARSE_MLA_NATIVE", "Wide")
    with pytest.raises(ValueError, match="TORCH_SPARSE_MLA_NATIVE: got 'Wide'; allowed: 0, 1, narrow or wide"):
        torch_sparse_mla.explain("sparse_ckv_decode", "cuda")


def test_the_wide_form_needs_the_library_as_ever():
    result = run_python(
        "import torch_sparse_mla; print(torch_sparse_mla._ops.native_error)", TORCH_SPARSE_MLA_NATIVE="wide"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(torch_sparse_mla._ops.native_error)


def test_rejects_an_unknown_native_flag():
    result = run_python("import torch_sparse_mla", TORCH_SPARSE_MLA_NATIVE="maybe")
    assert result.returncode != 0
    assert "environment variable TORCH_SPARSE_MLA_NATIVE: got 'maybe'; allowed: 0, 1, narrow or wide" in result.stderr


MENDED_IMPORT = """
import os
try:
    import torch_sparse_mla
except ValueError as error:
    kept = error
os.environ["TORCH_SPARSE_MLA_NATIVE"] = "1"
import torch_sparse_mla
print(torch_sparse_mla.explain("read_ckv_records")["kernel"])
"""


def test_a_bad_flag_leaves_the_process_able_to_import():
    result = run_python(MENDED_IMPORT, TORCH_SPARSE_MLA_NATIVE="maybe")
    assert result.stdout == "reference\n", result.stderr
