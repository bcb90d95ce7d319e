"""Local steps and outer averaging: throughput between hosts with a slow cable, and loss beside synchronous training."""
