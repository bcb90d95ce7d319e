"""Tests of ranks that die, stop, leave or come late: who is blamed, how soon, and that nothing is left behind."""
