"""The report: tables word for word, pictures, and the refusals that keep README and results together."""

import itertools
import json

import pytest
from expecttest import assert_expected_inline

from profiling import pictures, report, results
from profiling.shapes import ExchangeShape, GatherShape, PackShape, StepShape

from . import documents

README = """# Title
<!-- report:sparse_ckv_decode -->
old table
<!-- /report -->
Text between.
<!-- report:records -->
<!-- /report -->
<!-- report:demo -->
<!-- /report -->
The end.
"""


@pytest.fixture
def folder(tmp_path):
    for document in (documents.decode_document(), documents.cpu_document(), documents.records_document()):
        results.write(document, tmp_path / "results")
    (tmp_path / "results" / "demo-cpu.json").write_text(json.dumps(documents.demo_document()))
    (tmp_path / "README.md").write_text(README)
    return tmp_path


def run(folder, *arguments: str) -> int:
    return report.main(["--readme", str(folder / "README.md"), "--results", str(folder / "results"), *arguments])


def section(document: dict) -> str:
    """In ASCII, the only text that expecttest can accept for us."""
    return report.section(document, "profiling/results").replace("\N{MICRO SIGN}", "u")


def test_modes_section():
    assert_expected_inline(
        section(documents.modes_document()),
        """\
**NVIDIA H200**, 2026-11-30 12:00 UTC, commit 0123abc, torch 2.11.0, triton 3.6.0.
Copy bandwidth in the same process: 4,000 GB/s (bytes read plus written).

A step of four layers, 8 rows, 16 heads, top-k 2048, `fp8_ds_mla`, hidden width 4096, 2 loopback ranks in turn, us:

| mode | host | step | launches by the host | kernels | graphs, MiB |
| --- | ---: | ---: | ---: | ---: | ---: |
| eager | 5,000 | 5,010 | 157 | 157 | 0 |
| full | 9.5 | 700 | 1 | 157 | 32 |

![modes on nvidia-h200](profiling/results/modes-nvidia-h200.png)""",
    )


def test_modes_picture(tmp_path):
    path = tmp_path / "modes.png"
    pictures.draw(documents.modes_document(), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


def test_decode_section():
    assert_expected_inline(
        section(documents.decode_document()),
        """\
**NVIDIA H200**, 2026-11-30 12:00 UTC, commit 0123abc, torch 2.11.0, triton 3.6.0.
Copy bandwidth in the same process: 4,000 GB/s (bytes read plus written).

`fp8_ds_mla`, top-k 2048: us, ours / FlashMLA in each cell.

| rows | byte floor, fewest heads | gather only | 16 heads | 64 heads | 128 heads |
| ---: | ---: | ---: | ---: | ---: | ---: |
| 1 | 0.35 | 3.5 | 9.0 / - | 9.0 / 19.0 | 9.0 / 19.0 |
| 8 | 2.8 | 7.0 | 16.0 / - | 16.0 / 26.0 | 16.0 / 26.0 |
| 32 | 11.1 | 19.0 | 40.0 / - | 40.0 / 50.0 | 40.0 / 50.0 |

The same with `batch_invariant=True`: us.

| rows | 16 heads | 64 heads | 128 heads |
| ---: | ---: | ---: | ---: |
| 1 | 11.0 | 11.0 | 11.0 |
| 8 | 18.0 | 18.0 | 18.0 |
| 32 | 42.0 | 42.0 | 42.0 |

us, ours in each cell.

| layout | top-k | heads | 1 row | 8 rows |
| --- | ---: | ---: | ---: | ---: |
| `nvfp4_ds_mla` | 2048 | 16 | 8.0 | 15.0 |

us, ours in each cell, 4 rows of one request share most of their records.

| layout | top-k | heads | 4 rows |
| --- | ---: | ---: | ---: |
| `fp8_ds_mla` | 2048 | 16 | 9.2 |

Host time of one eager call (1 row, 1 head, 1 record): ours 31 us.

![sparse_ckv_decode on nvidia-h200](profiling/results/sparse_ckv_decode-nvidia-h200.png)""",
    )


def test_the_portable_kernel_goes_by_its_name_beside_the_native_one():
    document = documents.decode_document()
    document["cases"] += [
        {**case, "impl": "native-cuda", "us": case["us"] / 2} for case in document["cases"] if case["impl"] == "triton"
    ]
    text = section(document)
    assert "us, ours / Triton / FlashMLA in each cell." in text
    assert "| 1 | 0.35 | 3.5 | 4.5 / 9.0 / - | 4.5 / 9.0 / 19.0 |" in text
    assert "ours 16 us, Triton 31 us" in text or "Triton 31 us, ours 16 us" in text


def test_padding_of_a_peer_is_said():
    document = documents.decode_document()
    assert "pays for 64" not in section(document)
    next(case for case in document["cases"] if case["impl"] == "flashmla")["padded_heads"] = 128
    assert "FlashMLA serves 64 or 128 heads; a call with fewer pays for 64." in section(document)


def test_cpu_section_is_in_milliseconds():
    assert_expected_inline(
        section(documents.cpu_document()),
        """\
**CPU, 2 threads**, 2026-11-30 12:00 UTC, commit 0123abc, torch 2.11.0, triton 3.6.0.
Copy bandwidth in the same process: 4,000 GB/s (bytes read plus written).

ms, native C++ / reference in each cell.

| layout | top-k | heads | 8 rows |
| --- | ---: | ---: | ---: |
| `fp8_ds_mla` | 2048 | 16 | 7.5 / 90.0 |

Not measured: FlashMLA (runs on CUDA only).""",
    )


def test_records_section():
    assert_expected_inline(
        section(documents.records_document()),
        """\
**NVIDIA H200**, 2026-11-30 12:00 UTC, commit 0123abc, torch 2.11.0, triton 3.6.0.
Copy bandwidth in the same process: 4,000 GB/s (bytes read plus written).

`write_ckv_records`: us, ours in each cell, and the share of copy bandwidth of the first.

| layout | 1 token | 64 tokens | 4096 tokens |
| --- | ---: | ---: | ---: |
| `fp8_ds_mla` | 2.0 (<1%) | 2.1 (1%) | 6.0 (31%) |

`read_ckv_records`: us, ours in each cell, and the share of copy bandwidth of the first.

| layout | 1 token | 64 tokens | 4096 tokens |
| --- | ---: | ---: | ---: |
| `fp8_ds_mla` | 2.0 (<1%) | 2.1 (1%) | 6.0 (31%) |

![records on nvidia-h200](profiling/results/records-nvidia-h200.png)""",
    )


def test_demo_section():
    document = documents.demo_document() | {"bench": "demo", "device": "cpu"}
    assert_expected_inline(
        section(document),
        """\
**cpu**

Milliseconds a token through the operators, and the speed-up over Transformers alone, at each context.

| model | layout | how | same tokens | logits differ by | bytes a token | context 512 | context 2048 |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |
| tiny | `fp8_ds_mla` | eager, 1 rank, local | 1 of 2 | 1.3e-02 | 656 (was 36,864) | 10.0 (2.50x) | 12.5 (2.00x) |
| tiny | `bf16_mla` | eager, 4 ranks, exchange | 1 of 1 | 1.3e-02 | 656 | 10.0 | - |

![demo on cpu](profiling/results/demo-cpu.png)""",
    )


def test_readme_is_rewritten_between_its_markers_only(folder):
    assert run(folder) == 0
    text = (folder / "README.md").read_text()
    assert text.startswith("# Title\n<!-- report:sparse_ckv_decode -->\n**CPU, 2 threads**")
    assert "<!-- /report -->\nText between.\n<!-- report:records -->\n**NVIDIA H200**" in text
    assert text.endswith("<!-- /report -->\nThe end.\n")
    assert "old table" not in text
    assert run(folder) == 0
    assert (folder / "README.md").read_text() == text


def test_pictures_are_drawn_where_there_is_a_line_to_draw(folder):
    run(folder)
    drawn = {path.name: path.read_bytes() for path in (folder / "results").glob("*.png")}
    assert set(drawn) == {"sparse_ckv_decode-nvidia-h200.png", "records-nvidia-h200.png", "demo-cpu.png"}
    assert all(content.startswith(b"\x89PNG") and len(content) > 10_000 for content in drawn.values())
    text = (folder / "README.md").read_text()
    assert all(f"(results/{name})" in text for name in drawn)


def test_check_passes_after_a_report_and_writes_nothing(folder, capsys):
    run(folder)
    for picture in (folder / "results").glob("*.png"):
        picture.unlink()
    assert run(folder, "--check") == 0
    assert not list((folder / "results").glob("*.png"))


def test_check_sees_a_changed_number(folder, capsys):
    run(folder)
    text = (folder / "README.md").read_text()
    (folder / "README.md").write_text(text.replace("| 16.0 / 26.0 |", "| 15.0 / 26.0 |", 1))
    assert run(folder, "--check") == 1
    assert "+| 8 |" in capsys.readouterr().out
    assert "| 15.0 / 26.0 |" in (folder / "README.md").read_text()


def test_check_sees_a_changed_result(folder):
    run(folder)
    path = folder / "results" / "records-nvidia-h200.json"
    path.write_text(path.read_text().replace('"us": 6.0, "us_min": 6.0', '"us": 4.5, "us_min": 4.5'))
    assert run(folder, "--check") == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<!-- report:records -->\n<!-- /report -->\n", "", "results hold 'records'"),
        ("The end.", "<!-- report:c4 -->\n<!-- /report -->\n", "no file 'c4-<device>.json'"),
        ("<!-- report:records -->\n<!-- /report -->\n", "<!-- report:records -->\n", "markers opened"),
    ],
)
def test_markers_and_results_must_agree(folder, capsys, old, new, message):
    text = README.replace(old, new)
    (folder / "README.md").write_text(text)
    assert run(folder) == 2
    assert message in capsys.readouterr().err
    assert (folder / "README.md").read_text() == text


def test_invalid_result_is_named(folder, capsys):
    path = folder / "results" / "records-nvidia-h200.json"
    path.write_text(path.read_text().replace('"mode": "graph"', '"mode": "guess"', 1))
    assert run(folder) == 2
    assert "records-nvidia-h200.json case 0: field 'mode'" in capsys.readouterr().err


def test_other_benchmarks_get_a_plain_table():
    shape = {"world": 4, "context": 1024}
    us = {"triton": (5.0, 4.0, 6.0), "nccl": (20.0, 19.0, 21.0)}
    cases = [results.make_case(shape, impl, "graph", times, 10, 0, None) for impl, times in us.items()]
    cases.append(results.make_case({"world": 8, "context": 1024}, "triton", "graph", (7.0, 6.0, 8.0), 10, 0, None))
    assert_expected_inline(
        section(documents.document("plan_selection", cases=cases)),
        """\
**NVIDIA H200**, 2026-11-30 12:00 UTC, commit 0123abc, torch 2.11.0, triton 3.6.0.
Copy bandwidth in the same process: 4,000 GB/s (bytes read plus written).

us.

| world | context | ours | nccl |
| ---: | ---: | ---: | ---: |
| 4 | 1024 | 5.0 | 20.0 |
| 8 | 1024 | 7.0 | - |""",
    )


def test_labels_are_moved_apart_around_their_middle():
    assert pictures.spread([0.0, 5.0, 10.0], 1.0) == [0.0, 5.0, 10.0]
    assert pictures.spread([1.0, 1.0], 1.0) == [0.5, 1.5]
    moved = pictures.spread([0.0, 0.1, 0.2, 1.0, 9.0], 1.0)
    assert all(b - a >= 1.0 - 1e-9 for a, b in itertools.pairwise(moved))
    assert moved[-1] == 9.0


def exchange_document() -> dict:
    cases = []
    for rows in (4, 8, 32):
        for layers in (1, 3):
            shape = ExchangeShape(rows, 2048, 656, 2, layers)
            for impl, us in (("direct", 4.0), ("ce", 14.0), *((("direct-per-layer", 12.0),) if layers == 3 else ())):
                cases.append(documents.case(shape, impl, us * layers) | {"union": 750.5 * rows})
        beside = ExchangeShape(rows, 2048, 656, 2, 3, "gemm")
        cases.append(documents.case(beside, "gemm alone", 60.0) | {"compute_us": 58.0})
        cases.append(documents.case(beside, "gemm beside ce", 62.5) | {"compute_us": 58.58})
    for impl, us in (("pack", 8.0), ("pack-nothing", 4.0), ("copy", 6.0)):
        cases.append(documents.case(PackShape(8192, 656), impl, us))
    peers = {"nccl-all-gather": "takes ranks that are processes"}
    return documents.document("ce_exchange", cases=cases, peers=peers, limits="No link.", left_out=["32 rows 37"])


def test_exchange_section():
    text = section(exchange_document())
    assert_expected_inline(
        text[text.index("No link.") :],
        """\
No link.

Exchanges, us; `per-layer` moves the layers singly.

| ranks | record bytes | rows | layers | records in the unions | direct | ce | direct-per-layer |
| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| 2 | 656 | 4 | 1 | 3,002 | 4.0 | 14.0 | - |
| 2 | 656 | 4 | 3 | 3,002 | 12.0 | 42.0 | 36.0 |
| 2 | 656 | 8 | 1 | 6,004 | 4.0 | 14.0 | - |
| 2 | 656 | 8 | 3 | 6,004 | 12.0 | 42.0 | 36.0 |
| 2 | 656 | 32 | 1 | 24,016 | 4.0 | 14.0 | - |
| 2 | 656 | 32 | 3 | 24,016 | 12.0 | 42.0 | 36.0 |

Three layers of 656-byte records that travel beside a computation, us: all of it, the computation by itself and how \
much slower than alone, and what the exchange adds to the whole.

| beside | ranks | rows | what runs | all | computation | slower by | exposed |
| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |
| gemm | 2 | 4 | gemm alone | 60.0 | 58.0 | - | - |
| gemm | 2 | 4 | gemm beside ce | 62.5 | 58.6 | +1.0% | 2.5 |
| gemm | 2 | 8 | gemm alone | 60.0 | 58.0 | - | - |
| gemm | 2 | 8 | gemm beside ce | 62.5 | 58.6 | +1.0% | 2.5 |
| gemm | 2 | 32 | gemm alone | 60.0 | 58.0 | - | - |
| gemm | 2 | 32 | gemm beside ce | 62.5 | 58.6 | +1.0% | 2.5 |

One rank alone, us: its records from cache to workspace (with the two launches of any exchange), the same with an \
empty plan, and a plain copy of as many bytes.

| record bytes | records | pack | empty plan | copy | copy / pack |
| ---: | ---: | ---: | ---: | ---: | ---: |
| 656 | 8,192 | 8.0 | 4.0 | 6.0 | 75% |

Not measured: nccl-all-gather (takes ranks that are processes); 32 rows 37.

![ce_exchange on nvidia-h200](profiling/results/ce_exchange-nvidia-h200.png)""",
    )


def step_document() -> dict:
    cases = []
    for rows in (1, 8, 32):
        shape = StepShape(rows, 16, 2048, "fp8_ds_mla", 2)
        cases.append(documents.case(shape, "owner_merge direct", 20.0 + rows) | {"union": 2048 * rows})
        cases.append(documents.case(shape, "owner_merge traffic direct", 9.0) | {"union": 2048 * rows})
        auto = {"union": 2048 * rows, "chosen": "owner_merge", "best": "owner_merge direct", "behind_best": 0.02}
        cases.append(documents.case(shape, "auto", 1.02 * (20.0 + rows)) | auto)
    return documents.document("dcp_decode", cases=cases)


def test_step_section():
    text = section(step_document())
    assert_expected_inline(
        text[text.index("`fp8_ds_mla`") :],
        """\
`fp8_ds_mla`, 2 ranks, 16 heads on each, top-k 2048: us a layer, of a Full layer and 3 Shared layers; what `auto` \
chose, and how far it is from the best.

| rows | records in the unions | owner_merge direct | owner_merge traffic direct | auto |
| ---: | ---: | ---: | ---: | --- |
| 1 | 2,048 | 21.0 | 9.0 | owner_merge 21.4 (+2%) |
| 8 | 16,384 | 28.0 | 9.0 | owner_merge 28.6 (+2%) |
| 32 | 65,536 | 52.0 | 9.0 | owner_merge 53.0 (+2%) |

![dcp_decode on nvidia-h200](profiling/results/dcp_decode-nvidia-h200.png)""",
    )


def gather_document() -> dict:
    cases = []
    for context in (8_192, 32_768, 131_072):
        for op, rows, tokens in (("c4_prefill_gather", 4_096, context), ("incremental_gather", 512, 512)):
            shape, received = GatherShape(op, rows, context, 2), tokens // 2 * 528
            details = {"received_bytes": received, "ordinary_received_bytes": rows * 32 * 2_052}
            link_us = received / 0.4e6
            for impl, us in (("direct", link_us / 0.5), ("nccl-all-gather", link_us / 0.25 + 10)):
                times = (us, us, us)
                cases.append(results.make_case(shape.fields(), impl, "graph", times, 1, 0, link_us, **details))
    head = {"ranks": "processes", "limits": "Two GPUs.", "link_tb_per_s": 0.4, "left_out": ["8192 context"]}
    return documents.document("c4_prefill_gather", "nvidia-h200-x2", cases=cases, **head)


def test_gather_section():
    text = section(gather_document())
    assert_expected_inline(
        text[text.index("Two GPUs.") :],
        """\
Two GPUs.

A chunk at the end of a prompt on 2 ranks, `fp8_mla_nope`, us, and the share of the link: the bytes that a \
rank has to receive, by the time, by the rate of a plain copy to a peer's memory, 400 GB/s.

| records | rows | context | MiB received | ordinary DCP, MiB | direct | nccl-all-gather |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| all | 4,096 | 8,192 | 2.06 | 256.50 | 10.8 (50%) | 31.6 (17%) |
| all | 4,096 | 32,768 | 8.25 | 256.50 | 43.3 (50%) | 96.5 (22%) |
| all | 4,096 | 131,072 | 33.00 | 256.50 | 173 (50%) | 356 (24%) |
| new ones | 512 | 8,192 | 0.13 | 32.06 | 0.68 (50%) | 11.4 (3%) |
| new ones | 512 | 32,768 | 0.13 | 32.06 | 0.68 (50%) | 11.4 (3%) |
| new ones | 512 | 131,072 | 0.13 | 32.06 | 0.68 (50%) | 11.4 (3%) |

Not measured: 8192 context.

![c4_prefill_gather on nvidia-h200-x2](profiling/results/c4_prefill_gather-nvidia-h200-x2.png)""",
    )


def test_gathers_on_one_device_have_a_plain_table_and_a_picture(tmp_path):
    document = gather_document()
    del document["ranks"]
    text = section(document)
    assert "| op | rows | context | world | layout | record_bytes | direct | nccl-all-gather |" in text
    assert ".png" in text
    pictures.draw(document, tmp_path / "gather.png")
    assert (tmp_path / "gather.png").read_bytes().startswith(b"\x89PNG")


def test_the_selector_has_a_panel_for_each_context(tmp_path):
    """Forms of a split selection, which have few rows, are in the table alone."""
    common = {"heads": 32, "topk": 2048, "mode": "graph", "us_min": 1.0, "us_max": 9.0, "floor_us": 1.0, "error": 0.0}
    cases = [
        common | {"rows": rows, "context": context, "impl": impl, "us": float(rows)}
        for rows in (1, 32, 512)
        for context in (8_192, 4_096)
        for impl in ("triton", "pytorch")
    ]
    cases.append(common | {"op": "split_select", "rows": 512, "context": 8_192, "impl": "merge", "us": 3.0, "world": 4})
    document = documents.decode_document() | {"bench": "c4_select", "cases": cases}
    assert "c4_select-" in section(document) and "split_select" in section(document)
    figure = pictures._draw_select(document)
    titles = [axis.get_title("left") for axis in figure.axes if axis.lines]
    assert titles == ["4,096 tokens of context", "8,192 tokens of context"]


def test_gathers_on_the_cpu_have_no_link():
    document = gather_document()
    del document["link_tb_per_s"]
    document["cases"] = [case | {"floor_us": None} for case in document["cases"]]
    text = section(document)
    assert "A chunk at the end of a prompt on 2 ranks, `fp8_mla_nope`, us." in text and "%" not in text


@pytest.mark.parametrize(
    "document",
    [exchange_document(), step_document(), gather_document()],
    ids=["ce_exchange", "dcp_decode", "c4_prefill_gather"],
)
def test_exchanges_and_steps_have_pictures(document, tmp_path):
    results.write(document, tmp_path)
    assert report.has_picture(document)
    pictures.draw(document, tmp_path / "picture.png")
    assert len((tmp_path / "picture.png").read_bytes()) > 10_000
