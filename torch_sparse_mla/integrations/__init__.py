"""Clients of the operators: `transformers` serves Hugging Face models, `tiny_models` builds small ones to try it on.

Nothing here is imported with the package: Transformers 5.17 or newer is an optional dependency.
Reading order: tiny_models (which models), paged_cache (where tokens lie), forward_checks (what is refused),
transformers (attention; what users call); prefill_pages, prefill_ranks, sharded_prefill (chunked prefills over ranks).
"""
