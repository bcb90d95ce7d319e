"""The engine on 1 to 4 ranks: every collective, refusals, process sets, timelines."""
