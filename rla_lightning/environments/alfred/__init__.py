"""The text world of ALFRED, as AlfWorld plays it: one exact simulator and planner for every environment set in it."""
