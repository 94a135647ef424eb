"""`python -m tests.servers install` builds the servers' environments."""

import sys

from tests.servers import NAMES
from tests.servers.environments import install

if sys.argv[1:] != ["install"]:
    raise SystemExit("usage: python -m tests.servers install")
for name in NAMES:
    print(install(name))
