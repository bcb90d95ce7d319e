"""The examples, the README, the recipes and the benchmarks do what they say."""
