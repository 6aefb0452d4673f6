"""`trainer plan`: what a run would take, from its config alone. Read `command.py` first."""
