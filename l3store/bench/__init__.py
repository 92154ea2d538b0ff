"""Measures a backend: throughput, CPU and latency, against memcpy in the same run."""
