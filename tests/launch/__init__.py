"""The launcher: what it starts, shows, passes on and says at the end."""
