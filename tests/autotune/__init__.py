"""The tuner: its policy, alone and on simulated surfaces, and its search in real jobs."""
