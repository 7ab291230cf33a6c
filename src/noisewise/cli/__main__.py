"""`python -m noisewise.cli`."""

from __future__ import annotations

from noisewise.cli import main

if __name__ == "__main__":
    main()
