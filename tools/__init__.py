"""What developers run: generators, checks against others, and what a build needs."""
