"""The command line: one file for each command, each a few lines over public functions.

Importing this package does not import torch; a command does when it runs.
"""

from mgtta.cli.app import app, main

__all__ = ["app", "main"]
