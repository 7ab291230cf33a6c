"""The client: it passes messages to the site's file or vault, which --node-config names."""

from noisewise.flower import make_client_app

app = make_client_app()
