"""Small results documents with round numbers."""

from profiling import results
from profiling.shapes import DecodeShape, RecordShape


def document(bench: str, device: str = "nvidia-h200", **changes: object) -> dict:
    return {
        "bench": bench,
        "device": device,
        "device_name": "NVIDIA H200",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "cuda": "13.0",
        "commit": "0123abc",
        "date": "2026-11-30 12:00 UTC",
        "copy_tb_per_s": 4.0,
        "peers": {},
        "cases": [],
        **changes,
    }


def case(shape: DecodeShape | RecordShape, impl: str, us: float, mode: str = "graph") -> dict:
    floor_us = None if mode == "host" else shape.bytes / 4e6
    return results.make_case(shape.fields(), impl, mode, (us, us, us + 1), shape.bytes, shape.flops, floor_us)


def decode_document() -> dict:
    cases = []
    for heads in (16, 64, 128):
        for rows in (1, 8, 32):
            shape = DecodeShape(rows, heads, 2048, "fp8_ds_mla")
            cases += [case(shape, "triton", 8 + rows), case(shape, "triton-batch-invariant", 10 + rows)]
            cases += [case(shape, "gather", 3 + rows / 2)]
            if heads > 16:
                cases.append(case(shape, "flashmla", 18 + rows))
    for rows in (1, 8):
        cases.append(case(DecodeShape(rows, 16, 2048, "nvfp4_ds_mla"), "triton", 7 + rows))
    cases.append(case(DecodeShape(4, 16, 2048, "fp8_ds_mla", rows_per_request=4), "triton", 9.25))
    cases.append(case(DecodeShape(1, 1, 1, "fp8_ds_mla"), "triton", 31.4, mode="host"))
    return document("sparse_ckv_decode", cases=cases, peers={"flashmla": "ran"})


def cpu_document() -> dict:
    shape = DecodeShape(8, 16, 2048, "fp8_ds_mla")
    cases = [case(shape, "reference", 90_000, mode="call"), case(shape, "native-cpu", 7_500, mode="call")]
    changes = {"device_name": "CPU, 2 threads", "peers": {"flashmla": "runs on CUDA only"}}
    return document("sparse_ckv_decode", "cpu-2-cores", cases=cases, **changes)


def records_document() -> dict:
    shapes = [
        RecordShape(op, n, "fp8_ds_mla") for op in ("write_ckv_records", "read_ckv_records") for n in (1, 64, 4096)
    ]
    return document("records", cases=[case(shape, "triton", 2 + shape.tokens / 1024) for shape in shapes])


def modes_document() -> dict:
    sizes = {"rows": 8, "heads": 16, "topk": 2048, "layout": "fp8_ds_mla", "world": 2, "context": 8192, "hidden": 4096}
    cases = []
    for impl, host, step, launches, graph_bytes in (("eager", 5000, 5010, 157, 0), ("full", 9.5, 700, 1, 32 << 20)):
        details = {"host_calls": launches, "launches": 157, "graph_bytes": graph_bytes}
        for mode, us in (("host", host), ("call", step)):
            cases.append(results.make_case(sizes, impl, mode, (us, us, us + 1), 1000, 0, None, **details))
    return document("modes", cases=cases)


def demo_document() -> dict:
    run = {
        "model": "tiny",
        "layout": "fp8_ds_mla",
        "device": "cpu",
        "mode": "eager",
        "world": 1,
        "strategy": "local",
        "tokens_equal": True,
        "max_logit_diff": 0.0125,
        "ms_per_token": 10.0,
        "reference_ms_per_token": 25.0,
        "speedup": 2.5,
        "record_bytes_per_token": 656,
        "reference_bytes_per_token": 36_864,
    }
    alone = {"reference_ms_per_token": None, "speedup": None, "reference_bytes_per_token": None}
    return {
        "runs": [
            {**run, "context": 512},
            {**run, "context": 2048, "ms_per_token": 12.5, "speedup": 2.0, "tokens_equal": False},
            {**run, **alone, "context": 512, "layout": "bf16_mla", "world": 4, "strategy": "exchange"},
        ]
    }
