"""What the benchmarks share: processes, clocks, statistics, records, tables and pictures."""
