"""Where tasks run: in this process, in worker processes, or on a Ray cluster, behind the interface in base.py."""
