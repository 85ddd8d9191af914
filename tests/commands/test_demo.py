"""`demo`: what it prints and writes, what it refuses, and that a wrong operator makes it fail."""

import argparse
import json
import math

import pytest
import torch

from torch_sparse_mla.__main__ import main
from torch_sparse_mla.commands import demo, generation
from torch_sparse_mla.dcp import peers, strategies
from torch_sparse_mla.integrations import loopback_ranks, static_step, tiny_models
from torch_sparse_mla.integrations import transformers as integration

SMALL = ["demo", "--device", "cpu", "--model", "glm_moe_dsa", "--context", "128", "192", "--tokens", "4"]
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(params=[128, 1024], ids=["long_context_shared", "own_contexts"])
def longest_own_context(request, monkeypatch):
    """Both ways to a context: 192 is beyond 128, hence taken over from Transformers, and within 1024."""
    monkeypatch.setattr(generation, "LONGEST_OWN_CONTEXT", request.param)


def test_demo_writes_json_and_picture(longest_own_context, tmp_path, capsys):
    json_file, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    assert main([*SMALL, "--json", str(json_file), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "8 of 8 runs passed" in printed
    runs = json.loads(json_file.read_text())["runs"]
    layouts = ["bf16_mla", "fp8_ds_mla", "nvfp4_ds_mla", "nvfp4_ds_mla_fp8rope"]
    assert [(run["context"], run["layout"]) for run in runs] == [(c, layout) for c in (128, 192) for layout in layouts]
    for run in runs:
        place = {"model": "glm_moe_dsa", "device": "cpu", "mode": "eager", "world": 1, "strategy": "local"}
        assert {key: run[key] for key in place} == place
        assert run["faults"] == [] and len(run["tokens"]) == 4
        assert run["tokens_equal"] == (run["first_divergence"] is None) == (run["tokens"] == run["oracle_tokens"])
        assert 0 < run["max_logit_diff"] < 0.2
        assert run["ms_per_token"] > 0 and run["reference_ms_per_token"] > 0
        assert math.isclose(run["speedup"], run["reference_ms_per_token"] / run["ms_per_token"])
        assert run["reference_bytes_per_token"] == 4 * 576 * 4
        assert run["layout"] in printed
    assert [run["record_bytes_per_token"] for run in runs[:4]] == [4 * 1152, 4 * 656, 4 * 432, 4 * 368]
    content = picture.read_bytes()
    assert content.startswith(PNG_SIGNATURE) and len(content) > 10_000


def test_demo_runs_glm5_next_on_a_context_taken_over(monkeypatch, capsys):
    # Its linear-attention layers have states of their own to take over.
    monkeypatch.setattr(generation, "LONGEST_OWN_CONTEXT", 64)
    options = ["--layout", "fp8_mla_nope", "--context", "96", "--tokens", "3", "--prompt", "A prompt of one's own. "]
    assert main(["demo", "--device", "cpu", "--model", "glm5_next", *options]) == 0
    assert "1 of 1 runs passed" in capsys.readouterr().out


SHARDED = ["demo", "--device", "cpu", "--model", "glm_moe_dsa", "--context", "96", "--tokens", "3"]


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_demo_runs_every_strategy_over_ranks(world, tmp_path, capsys):
    json_file = tmp_path / "demo.json"
    options = ["--layout", "fp8_ds_mla", "--world", str(world), "--strategy", "all", "--json", str(json_file)]
    assert main([*SHARDED, *options]) == 0
    printed = capsys.readouterr().out
    assert "6 of 6 runs passed" in printed and f"{world} rank(s) in this process" in printed
    unsharded, *runs = json.loads(json_file.read_text())["runs"]
    assert (unsharded["world"], unsharded["strategy"], unsharded["chosen"]) == (1, "local", "local")
    assert [run["strategy"] for run in runs] == ["auto", "owner_merge", "exchange", "exchange_bulk", "peer_read"]
    for run in runs:
        assert run["world"] == world and run["tokens"] == unsharded["tokens"] and run["faults"] == []
        assert run["chosen"] == run["strategy"] or run["strategy"] == "auto"
        assert f"{run['strategy']}" in printed
    assert f"auto (chose {runs[0]['chosen']}) over {world}" in printed


def test_demo_draws_sharded_runs_and_chooses_by_itself(tmp_path, capsys):
    picture = tmp_path / "demo.png"
    assert main([*SHARDED, "--layout", "bf16_mla", "--world", "2", "--plot", str(picture)]) == 0
    assert "2 of 2 runs passed" in capsys.readouterr().out
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_demo_says_what_it_cannot_run(monkeypatch, capsys):
    monkeypatch.setattr(peers, "MAX_CACHES", 1)
    assert main([*SHARDED, "--layout", "fp8_ds_mla", "--world", "2", "--strategy", "all", "--tokens", "1"]) == 0
    printed = capsys.readouterr().out
    assert "Not run: peer_read: attention reads the caches of at most 1 ranks" in printed
    assert "5 of 5 runs passed" in printed


def test_demo_refuses_by_name_what_it_cannot_run(capsys):
    with pytest.raises(SystemExit) as refused:
        main([*SHARDED, "--world", "16", "--strategy", "exchange", "--strategy", "peer_read"])
    assert refused.value.code == 2
    assert "--strategy: got 'peer_read', which cannot run here: attention reads" in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["owner_merge", "exchange", "exchange_bulk", "peer_read"])
def test_demo_fails_with_a_broken_shard(strategy, monkeypatch, capsys):
    attend = loopback_ranks.LoopbackRanks.attend

    def without_the_second_shard(ranks, q, layer, *arguments):
        layer.records[1].zero_()
        return attend(ranks, q, layer, *arguments)

    monkeypatch.setattr(loopback_ranks.LoopbackRanks, "attend", without_the_second_shard)
    assert main([*SHARDED, "--layout", "fp8_ds_mla", "--world", "2", "--strategy", strategy]) == 1
    printed = capsys.readouterr().out
    name = f"FAILED glm_moe_dsa, fp8_ds_mla, context 96, {strategy} over 2: "
    assert f"{name}logits differ" in printed and f"{name}against the eager run with one shard: logits differ" in printed
    assert "1 of 2 runs passed" in printed


def test_demo_fails_with_a_wrong_patch_of_current_tokens(monkeypatch, capsys):
    write = strategies.write_ckv_records
    monkeypatch.setattr(strategies, "write_ckv_records", lambda latent, *others: write(latent * 0, *others))
    assert main([*SHARDED, "--layout", "fp8_ds_mla", "--world", "2", "--strategy", "exchange_bulk"]) == 1
    assert "1 of 2 runs passed" in capsys.readouterr().out


def drop_one_record(q, cache, indices, **kwargs):
    indices = indices.clone()
    indices[:, 0] = -1
    return decode(q, cache, indices, **kwargs)


def scale_output(q, cache, indices, **kwargs):
    out, lse = decode(q, cache, indices, **kwargs)
    return out * 1.05, lse


decode = integration.sparse_ckv_decode


@pytest.mark.parametrize("broken", [drop_one_record, scale_output])
@pytest.mark.parametrize("layout", ["bf16_mla", "nvfp4_ds_mla"])
def test_demo_fails_with_a_broken_operator(broken, layout, monkeypatch, capsys):
    monkeypatch.setattr(integration, "sparse_ckv_decode", broken)
    arguments = ["demo", "--device", "cpu", "--model", "glm_moe_dsa", "--layout", layout, "--context", "128"]
    assert main([*arguments, "--tokens", "2"]) == 1
    printed = capsys.readouterr().out
    assert f"FAILED glm_moe_dsa, {layout}, context 128" in printed
    assert "0 of 1 runs passed" in printed


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--model", "glm"], "all, glm_moe_dsa, deepseek_v32, glm5_next"),
        (["--layout", "fp8"], "all, bf16_mla, bf16_mla_nope, fp8_ds_mla"),
        (["--model", "glm5_next", "--layout", "fp8_ds_mla"], "bf16_mla_nope, fp8_mla_nope, nvfp4_mla_nope"),
        (["--device", "cuda:99"], "auto, cpu"),
        (["--dtype", "float8"], "float32, bfloat16"),
        (["--context", "128", "1"], "an integer from 2 to 65000"),
        (["--context", "1e3"], "an integer from 2 to 65000"),
        (["--world", "0"], "an integer from 1 to 16"),
        (["--world", "3"], "1, 2, 4, 8, 16"),
        (["--world", "2", "--strategy", "local"], "all, auto, owner_merge, exchange, exchange_bulk, peer_read"),
        (["--tokens", "0"], "an integer from 1 to 512"),
        (["--seed", "-1"], "an integer from 0"),
        (["--json", "no/such/directory/x.json"], "a file in a directory that exists"),
        (["--plot", "."], "a file in a directory that exists"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_demo_refuses_what_it_does_not_know(arguments, allowed, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["demo", *arguments])
    assert refused.value.code == 2
    assert f"allowed: {allowed}" in capsys.readouterr().err


def test_demo_says_how_to_install_what_is_missing(monkeypatch, capsys):
    find_spec = demo.importlib.util.find_spec
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None if name == "rich" else find_spec(name))
    assert main(["demo"]) == 1
    assert "demo needs rich: run 'pip install \"torch_sparse_mla[transformers]\"'" in capsys.readouterr().err


def test_demo_plans_each_layout_where_it_fits():
    options = argparse.Namespace(model=["glm5_next", "deepseek_v32"], layout=["fp8_mla_nope", "bf16_mla"])
    assert demo._planned_work(options) == {"glm5_next": ["fp8_mla_nope"], "deepseek_v32": ["bf16_mla"]}


def test_prompt_is_the_text_with_numbered_repetitions():
    text = bytes(demo.prompt_tokens("abc ", 20)[0].tolist()).decode()
    assert text == "[1] abc [2] abc [3] "
    # A byte that is no UTF-8, as a command line has it.
    assert bytes(demo.prompt_tokens("a\udcff", 6)[0].tolist()) == b"[1] a\xff"


ORACLE = torch.tensor([[3.0, 1.0, 0.0], [0.0, 2.0, 1.999]])


def test_judge_passes_equal_logits():
    verdict = generation.judge("bf16_mla", [0, 1], ORACLE, ORACLE, exact=True)
    assert verdict["faults"] == [] and verdict["tokens_equal"] and verdict["first_divergence"] is None


def test_judge_lets_quantised_records_part_only_within_the_gap():
    near = ORACLE + torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 2e-3]])
    verdict = generation.judge("fp8_ds_mla", [0, 2], near, ORACLE, exact=True)
    assert verdict["faults"] == [] and verdict["first_divergence"] == 1 and not verdict["tokens_equal"]
    # The same two tokens with logits that explain nothing.
    assert generation.judge("fp8_ds_mla", [0, 2], ORACLE + 1e-6, ORACLE, exact=True)["faults"]
    assert generation.judge("fp8_ds_mla", [1, 1], near, ORACLE, exact=True)["faults"]


def test_judge_allows_bf16_records_no_other_token():
    near = ORACLE + torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 2e-3]])
    assert "token 1 is 2" in generation.judge("bf16_mla", [0, 2], near, ORACLE, exact=True)["faults"][0]
    assert generation.judge("bf16_mla", [0, 2], near, ORACLE, exact=False)["faults"] == []


def test_judge_fails_large_differences_and_nan_with_equal_tokens():
    for wrong in (0.3, math.nan):
        logits = ORACLE.clone()
        logits[0, 2] += wrong
        assert "logits differ" in generation.judge("nvfp4_ds_mla", [0, 1], logits, ORACLE, exact=True)["faults"][0]


def test_judge_excuses_rows_but_not_tokens_and_not_nan():
    wrong = ORACLE.clone()
    wrong[0, 2] += 0.9
    verdict = generation.judge("bf16_mla", [1], wrong, ORACLE, exact=True, excused=1)
    assert verdict["faults"] == [] and verdict["rows_beyond"] == 1 and verdict["oracle_tokens"] == [1]
    assert "in all but 1 of 2 rows, and it is 2" in _fault(wrong + 0.1, [1])
    assert "token 0 is 2" in _fault(wrong, [2])
    wrong[0, 2] = math.nan
    assert "logits differ by up to nan" in _fault(wrong, [1])


def _fault(logits: torch.Tensor, tokens: list[int]) -> str:
    return " ".join(generation.judge("bf16_mla", tokens, logits, ORACLE, exact=True, excused=1)["faults"])


def test_judge_takes_a_prompt_without_tokens():
    verdict = generation.judge("bf16_mla", [], ORACLE, ORACLE, exact=True)
    assert verdict["faults"] == [] and verdict["oracle_tokens"] == [] and verdict["smallest_gap"] is None
    assert generation.judge("bf16_mla", [], ORACLE + 1, ORACLE, exact=True)["faults"]


@pytest.fixture
def traced_only(monkeypatch):
    """Steps of fixed shapes are traced and split, not compiled by Inductor, which takes a minute."""
    init = static_step.StaticStep.__init__
    monkeypatch.setattr(
        static_step.StaticStep, "__init__", lambda self, model, cache: init(self, model, cache, backend="eager")
    )


def test_demo_runs_in_every_mode_that_a_cpu_has(traced_only, tmp_path, capsys):
    json_file = tmp_path / "demo.json"
    options = [
        "--layout",
        "fp8_ds_mla",
        "--mode",
        "all",
        "--json",
        str(json_file),
        "--plot",
        str(tmp_path / "demo.png"),
    ]
    assert main([*SMALL, "--context", "192", *options]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 runs passed" in printed and "Modes compile: a step of fixed shapes" in printed
    eager, compiled = json.loads(json_file.read_text())["runs"]
    assert [(run["context"], run["mode"]) for run in (eager, compiled)] == [(192, "eager"), (192, "compile")]
    assert compiled["tokens"] == eager["tokens"] and compiled["faults"] == []
    assert "operators, compile" in printed


def test_demo_leaves_out_modes_that_a_model_lacks(traced_only, monkeypatch, capsys):
    monkeypatch.setattr(tiny_models, "MODELS", ("deepseek_v32", "glm5_next"))
    options = ["--layout", "bf16_mla", "--layout", "bf16_mla_nope", "--context", "80", "--tokens", "2"]
    assert main(["demo", "--device", "cpu", *options, "--mode", "compile"]) == 0
    printed = capsys.readouterr().out
    # One model in two modes, and glm5_next eager.
    assert "3 of 3 runs passed" in printed and "for models without linear attention" in printed


def test_demo_fails_where_a_mode_gives_other_tokens(traced_only, monkeypatch, capsys):
    run = static_step.StaticStep.run
    monkeypatch.setattr(static_step.StaticStep, "run", lambda self, token, position: run(self, token, position) * -1)
    assert main([*SMALL, "--context", "128", "--layout", "bf16_mla", "--mode", "compile"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED glm_moe_dsa, bf16_mla, context 128, compile: against the eager run with one shard: " in printed


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--mode", "full"], "all, eager, compile"),
        (["--mode", "graph"], "all, eager, compile"),
        (["--model", "glm5_next", "--mode", "compile"], "glm_moe_dsa, deepseek_v32"),
    ],
)
def test_demo_refuses_modes(arguments, allowed, monkeypatch, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["demo", "--device", "cpu", *arguments])
    assert refused.value.code == 2
    assert f"allowed: {allowed}" in capsys.readouterr().err


@pytest.mark.gpu
def test_demo_gives_the_same_tokens_in_every_mode_on_a_gpu(tmp_path, traced_only):
    json_file = tmp_path / "demo.json"
    options = ["--model", "glm_moe_dsa", "--layout", "fp8_ds_mla", "--context", "128", "--tokens", "6", "--mode", "all"]
    assert main(["demo", "--device", "cuda", *options, "--json", str(json_file)]) == 0
    runs = json.loads(json_file.read_text())["runs"]
    assert [run["mode"] for run in runs] == ["eager", "compile", "piecewise", "full"]
    assert all(run["tokens"] == runs[0]["tokens"] for run in runs)
