"""The client of a site. It reads the site's own file, which its people name in --node-config."""

from noisewise.federation.flower import show_log
from noisewise.federation.flower.client import make_client_app

show_log()
app = make_client_app()
