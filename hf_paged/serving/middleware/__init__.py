"""What every request passes before a route sees it, outermost first.

access log       sees everything                                          (access_log.py)
request ids      safe for logs, one for each request
cross origin     preflights are answered here                             (Starlette's)
hosts            only if names were given
keys             everything but the open paths needs one
draining         503 once the server is told to stop; counts what runs
bodies           not too large, JSON, not too deep
"""
