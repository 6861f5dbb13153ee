"""For tests of commands that torchrun starts."""

# Written to a sitecustomize.py: a native thread that wants the interpreter's lock while the interpreter ends aborts one
# run of thousands; this does in every rank of each run.
ABORTS_AT_THE_END = """
import atexit, os
if "RANK" in os.environ:
    atexit.register(os.abort)
"""
