"""Real federations with Flower: a strategy for the server, a client that guards its own budget.

`records` turns Flower's arrays into parameters and back, `strategy` is the server's transport,
`site` reads a site's own file, `instruction` what a server may ask for, `client` answers it. The
library is an extra: ``pip install 'noisewise[flower]'``. Nothing here is imported by the rest of
the package.
"""
