"""Sparse CKV decode: attention of query rows over the records that each row selected, and the merge of partial results.

takes: absorbed queries, a paged cache, slot lists. gives: attention output over the latent, and its log-sum-exp.
Reading order: contract (what the operators accept, workspace sizes) -> reference -> triton_kernels -> api.
"""
