"""Benchmarks: one shape table, one timer, one results format, one report. Start with bench_sparse_ckv_decode.py.

shapes -> inputs -> contenders (the operators, peers.py, gather_baseline.py) -> timing -> results -> report.
"""
