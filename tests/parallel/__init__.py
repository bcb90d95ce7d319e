"""The engine on 1 to 4 ranks: every collective, what is refused, process sets, timelines."""
