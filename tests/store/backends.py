"""Every backend under the contract suite, and how it differs from S3's documentation. One table; nothing is skipped
elsewhere.

The emulators' differences were measured on moto 5.2 and ministack 1.5; when an update repairs one, the test that names
the property fails and the entry is removed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """`part_size` in bytes is the smallest part that need not be the last. All other fields are True as documented."""

    name: str
    part_size: int = 5 << 20
    verifies_sha256: bool = True
    reports_sha256_of_puts: bool = True
    reports_sha256_of_parts: bool = True
    verifies_total_size: bool = True
    ranges_of_versions: bool = True
    completes_if_match: bool = True
    forgets_completed_uploads: bool = True
    conflicts_on_delete_during_upload: bool = True
    hides_prefixes_of_deleted_keys: bool = True
    dates_uploads: bool = True
    refuses_parts_out_of_order: bool = True
    refuses_small_parts: bool = True
    refuses_parts_of_gone_uploads: bool = True


BACKENDS = (
    Backend("memory", part_size=64),
    # a directory has one history per key: a delete during an upload is an ordinary earlier change
    Backend("directory", part_size=64, conflicts_on_delete_during_upload=False, refuses_small_parts=False),
    Backend(
        "moto",
        verifies_sha256=False,
        reports_sha256_of_puts=False,
        reports_sha256_of_parts=False,
        verifies_total_size=False,
        completes_if_match=False,
        forgets_completed_uploads=False,
        conflicts_on_delete_during_upload=False,
        hides_prefixes_of_deleted_keys=False,
        dates_uploads=False,
        refuses_parts_of_gone_uploads=False,
    ),
    Backend(
        "ministack",
        ranges_of_versions=False,
        refuses_parts_out_of_order=False,
        refuses_small_parts=False,
        forgets_completed_uploads=False,
        conflicts_on_delete_during_upload=False,
    ),
)

SERVERS = frozenset({"moto", "ministack"})
