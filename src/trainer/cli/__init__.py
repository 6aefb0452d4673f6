"""The command line: parse, validate, dispatch. Read `main.py` first."""
