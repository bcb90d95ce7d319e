"""`engine.run`: call a function on every rank of a new job. (`engine.run` is the function; so this is `runner`.)"""
