"""Measuring decode (scripts/infer_bench.py): sides in turn, one layer by every way, whole steps, resident memory."""
