"""`engine.run`: a function on every rank of a new job. Not called `run`, since `engine.run` is that function."""
