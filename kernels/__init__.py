"""Operators: one typed list (ops), a plain torch reference for each, and faster backends.

Knows tensors only: no requests, no pools, no models.
"""
