"""Shared parts of the benchmarks: processes, clocks, statistics, records, tables and plots."""
