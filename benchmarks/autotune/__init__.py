"""The tuner beside other policies, on surfaces whose best is known."""
