"""Results files: what is written can be read, and what does not fit is refused by name."""

import copy
import json

import pytest
import torch

from profiling import results

from . import documents


def test_written_file_is_read_back(tmp_path):
    document = documents.decode_document()
    path = results.write(document, tmp_path)
    assert path.name == "sparse_ckv_decode-nvidia-h200.json"
    assert results.load(tmp_path) == [document]


def test_file_has_one_case_a_line(tmp_path):
    document = documents.records_document()
    lines = results.write(document, tmp_path).read_text().splitlines()
    assert sum(line.startswith('    {"op"') for line in lines) == len(document["cases"])


def test_new_document_says_where_it_comes_from():
    document = results.document("records", torch.device("cpu"), 0.01, "abc", {})
    document["cases"] = documents.records_document()["cases"]
    results.validate(document, "here")
    assert document["device"] == f"cpu-{torch.get_num_threads()}-cores"
    assert (document["torch"], document["commit"]) == (torch.__version__, "abc")


@pytest.mark.parametrize(
    ("field", "value"),
    [("date", None), ("commit", ""), ("copy_tb_per_s", 0), ("peers", ["flashmla"]), ("cases", [])],
)
def test_rejects_document(tmp_path, field, value):
    document = documents.decode_document() | {field: value}
    with pytest.raises(ValueError, match=f"sparse_ckv_decode-nvidia-h200.json: field '{field}'"):
        results.write(document, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "value"),
    [("impl", None), ("mode", "guess"), ("us", True), ("us", 1e9), ("bytes", -1), ("flops", "1"), ("floor_us", "low")],
)
def test_rejects_case(field, value):
    document = copy.deepcopy(documents.decode_document())
    document["cases"][2][field] = value
    with pytest.raises(ValueError, match=f"case 2: field '{field}'"):
        results.validate(document, "here")


@pytest.mark.parametrize(
    ("field", "value"), [("tokens_equal", 1), ("context", None), ("model", 3), ("speedup", "fast"), ("world", True)]
)
def test_rejects_demo_run(tmp_path, field, value):
    document = documents.demo_document()
    document["runs"][1][field] = value
    (tmp_path / "demo-cpu.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"demo-cpu.json run 1: field '{field}'"):
        results.load(tmp_path)


def test_rejects_file_under_a_wrong_name(tmp_path):
    results.write(documents.decode_document(), tmp_path).rename(tmp_path / "sparse_ckv_decode-other.json")
    with pytest.raises(ValueError, match="those of the file name"):
        results.load(tmp_path)
