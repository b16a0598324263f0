"""`afterglow` as it is, but for times: stores and directories that fail are asked again a second later, so that faults are met again and again, and
lookups have time on busy machines.
"""

from __future__ import annotations

from afterglow.cli import main
from afterglow.store.shared import directory, remote, shared_store

for module, name, seconds in (
    (remote, "REST_S", 1.0),
    (directory, "REST_S", 1.0),
    (directory, "CALL_S", 1.0),
    (shared_store, "LOOKUP_S", 3.0),
):
    assert hasattr(module, name)
    setattr(module, name, seconds)

if __name__ == "__main__":
    main()
