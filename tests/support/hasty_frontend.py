"""A frontend process whose streams show a sign of life, and their status, fifty times as soon."""

from __future__ import annotations

from launcher.frontend_main import leave, main
from moeserve.frontend import limits

if __name__ == "__main__":
    limits.KEEP_ALIVE_S /= 50
    leave(main())
