"""Between boto3's dictionaries and our types. Pure."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from cachefs.store.base import Condition, ExpiryRule, PartInfo, VersionInfo
from cachefs.store.s3errors import not_s3


def field(answer: Mapping[str, Any], name: str, operation: str) -> str:
    """Return a field that every S3 answer of this kind has. Raises UnavailableError when it is not there."""
    value = answer.get(name)
    if value is None:
        raise not_s3(operation, name)
    return str(value)


def condition_headers(condition: Condition | None) -> dict[str, str]:
    """Return the request parameters of a condition."""
    if condition is None:
        return {}
    return {"IfNoneMatch": "*"} if condition.if_match is None else {"IfMatch": condition.if_match}


def checksum(answer: Mapping[str, Any]) -> str | None:
    """Return the SHA-256 the store reports, hex, without the `-N` of a composite one."""
    text = str(answer.get("ChecksumSHA256", "")).partition("-")[0]
    return b64decode(text).hex() if text else None


def completed(part: PartInfo) -> dict[str, Any]:
    """Return a part as CompleteMultipartUpload wants it."""
    entry: dict[str, Any] = {"PartNumber": part.number, "ETag": part.etag}
    return entry if part.sha256 is None else {**entry, "ChecksumSHA256": b64encode(part.sha256).decode()}


def part_info(entry: Mapping[str, Any]) -> PartInfo:
    """Return an entry of ListParts."""
    text = entry.get("ChecksumSHA256")
    return PartInfo(int(entry["PartNumber"]), str(entry["ETag"]), int(entry["Size"]), b64decode(text) if text else None)


def expiry_rules(answer: Mapping[str, Any]) -> list[ExpiryRule]:
    """Return the rules of GetBucketLifecycleConfiguration that may delete our objects, which have no tags.

    The prefix of a rule is in one of three places (API reference, LifecycleRule and LifecycleRuleFilter). A filter by
    size is taken to match.
    """
    found = []
    for rule in answer.get("Rules", []):
        chosen = rule.get("Filter", {})
        both = chosen.get("And", {})
        if rule.get("Status") != "Enabled" or chosen.get("Tag") or both.get("Tags"):
            continue
        expiration, noncurrent = rule.get("Expiration", {}), rule.get("NoncurrentVersionExpiration")
        found.append(
            ExpiryRule(
                id=str(rule.get("ID", "")),
                prefix=str(chosen.get("Prefix") or both.get("Prefix") or rule.get("Prefix") or ""),
                expires="Days" in expiration or "Date" in expiration,
                keeps=None if noncurrent is None else int(noncurrent.get("NewerNoncurrentVersions", 0)),
            )
        )
    return found


def version_info(entry: Mapping[str, Any], is_marker: bool) -> VersionInfo:
    """Return an entry of ListObjectVersions."""
    return VersionInfo(
        key=entry["Key"],
        version_id=str(entry["VersionId"]),
        is_latest=bool(entry.get("IsLatest", False)),
        is_marker=is_marker,
        size=int(entry.get("Size", 0)),
        modified=entry["LastModified"].timestamp(),
    )
