"""Clients of the operators: `transformers` (serve a Hugging Face model) and `tiny_models` (small models to try it on).

Neither is imported with the package: Transformers 5.17 or newer is an optional dependency.
"""
