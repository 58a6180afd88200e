"""The version of moeserve, read by the packaging too.

Versions 0.18.2 to 0.19 are skipped: transformers takes the distribution that brings the import name `kernels` for its
optional kernel loader when the version lies there.
"""

VERSION = "0.1.0"
