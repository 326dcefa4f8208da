"""A service that adapts: many named streams over one model, over HTTP.

`streams` is the service without the web; `app` is HTTP around it; `client` calls it from Python.
"""
