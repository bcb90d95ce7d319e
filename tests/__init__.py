"""The tests, as one package: a module imports what it shares with others by relative names, on ranks too."""
