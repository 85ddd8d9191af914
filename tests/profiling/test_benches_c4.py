"""The benchmarks of the C4 operators run, compare what they time with a reference, and fail where it is wrong."""

import json

import pytest

from profiling import bench_c4_prefill_gather, bench_c4_select

BENCHES = {"c4_select": bench_c4_select, "c4_prefill_gather": bench_c4_prefill_gather}


@pytest.mark.parametrize("name", BENCHES)
def test_runs_on_the_cpu_and_writes_its_results(name, tmp_path):
    assert BENCHES[name].main(["--device", "cpu", "--quick", "--commit", "abc1234", "--json", str(tmp_path)]) == 0
    (file,) = tmp_path.glob(f"{name}-*.json")
    cases = json.loads(file.read_text())["cases"]
    assert cases and all(case["error"] == 0 and case["us"] > 0 and case["bytes"] > 0 for case in cases)


def test_a_wrong_remap_fails_the_run(tmp_path, monkeypatch):
    right = bench_c4_prefill_gather.reference.c4_remap

    def other_positions(topk, *arguments):
        right(topk.flip(1), *arguments)

    monkeypatch.setattr(bench_c4_prefill_gather.reference, "c4_remap", other_positions)
    assert bench_c4_prefill_gather.main(["--device", "cpu", "--quick", "--json", str(tmp_path)]) == 1


def test_a_wrong_order_of_candidates_fails_the_run(tmp_path, monkeypatch):
    right = bench_c4_select.candidates_of
    monkeypatch.setattr(bench_c4_select, "candidates_of", lambda scores, pools: right(-scores, pools))
    assert bench_c4_select.main(["--device", "cpu", "--quick", "--json", str(tmp_path)]) == 1


def test_refuses_more_rows_than_tokens(capsys):
    with pytest.raises(SystemExit):
        bench_c4_select.main(["--device", "cpu", "--rows", "9000", "--contexts", "8192"])
    assert "allowed: up to the context" in capsys.readouterr().err
