"""The access policies and lifecycle rules of a bucket, as documents that AWS takes as they are. Pure.

What cachefs never does by itself, the bucket then refuses to everybody: overwriting what is create-only, moving a
pointer without a condition, hiding an object behind a delete marker, deleting a pinned version. Sources: S3 user guide,
"Enforce conditional writes on Amazon S3 buckets" and "Lifecycle configuration elements"; IAM user guide, "Policy
variables".

In a resource `*` also matches `/`, and a run may hold slashes, so `runs/*/attempts/*` stands for all runs. It matches
nothing else, because a run or a loose file with a component of that name has it encoded in its key (formats/keys.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from cachefs.errors import InvalidError
from cachefs.store.base import HISTORY

Document = dict[str, Any]
Role = Literal["member", "owner", "gc", "restore"]
What = Literal["bucket-policy", "iam-member", "iam-owner", "iam-gc", "iam-restore", "lifecycle"]

ABORT_DAYS: Final = 7
"""Days after which S3 drops an upload that nobody completed; a daemon that comes back later sends the parts again."""
POINTER_DAYS: Final = 90
"""A noncurrent version is deleted when it is older than these days and has HISTORY newer ones."""
PROBE_DAYS: Final = 2
"""Days that what a killed probe left is kept; a probe itself cleans up after one."""

_CREATE_ONLY: Final = ("runs/*/attempts/*", "runs/*/wanted/*", "runs/*/leases/*")
_POINTERS: Final = "runs/*/pointer.json"
_LEASES: Final = "runs/*/leases/*"
_LOOSE: Final = "runs/*/loose/*"
_PROBE: Final = ".probe/*"
_RUNS: Final = "runs/*"

_LIST: Final = ("s3:ListBucket", "s3:ListBucketVersions", "s3:ListBucketMultipartUploads")
_ASK: Final = ("s3:GetBucketVersioning", "s3:GetLifecycleConfiguration")
_READ: Final = ("s3:GetObject", "s3:GetObjectVersion")
_UPLOADS: Final = ("s3:ListMultipartUploadParts", "s3:AbortMultipartUpload")
_DELETE: Final = ("s3:DeleteObject", "s3:DeleteObjectVersion")
_SETTINGS: Final = (
    "s3:PutLifecycleConfiguration",
    "s3:PutBucketVersioning",
    "s3:PutReplicationConfiguration",
)


class Place(msgspec.Struct, frozen=True):
    """What the documents are about. `roles` is the beginning of the roles' names; `account` is needed for the bucket
    policy only, and `admin` is the ARN that alone may change lifecycle, versioning and replication ("": anybody).
    """

    bucket: str
    prefix: str = ""
    account: str = ""
    roles: str = "cachefs"
    admin: str = ""
    partition: str = "aws"
    owner_collects: bool = False

    def __post_init__(self) -> None:
        """Raise InvalidError for what cannot be written into an ARN."""
        for what, value, pattern in (
            ("account", self.account, r"\d{12}|"),
            ("role prefix", self.roles, r"[\w+=,.@/-]+"),
            ("admin", self.admin, r"arn:[\w-]+:(iam|sts)::\d{12}:[\w+=,.@/*-]+|"),
            ("partition", self.partition, r"aws[a-z-]*"),
            ("prefix", self.prefix, r"[\x20-\x7e\xa1-\xff]*"),  # what IAM takes in a policy
        ):
            if not re.fullmatch(pattern, value, re.ASCII):
                raise InvalidError(f"{what} {value!r} cannot be used in a policy", hint="see cachefs policy --help")

    @property
    def bucket_arn(self) -> str:
        """Return the bucket's ARN."""
        return f"arn:{self.partition}:s3:::{self.bucket}"

    def objects(self, *patterns: str) -> list[str]:
        """Return the ARNs of objects under the prefix; the prefix itself is taken literally."""
        literal = re.sub(r"[*?$]", r"${\g<0>}", self.prefix)
        return [f"{self.bucket_arn}/{literal}/{one}" if literal else f"{self.bucket_arn}/{one}" for one in patterns]

    def role(self, role: Role) -> str:
        """Return a role's ARN."""
        return f"arn:{self.partition}:iam::{self.account}:role/{self.roles}-{role}"


def document(what: What, place: Place) -> Document:
    """Return one document. Raises InvalidError when the bucket policy is asked for without an account."""
    return _DOCUMENTS[what](place)


def _statement(sid: str, effect: str, action: object, resource: object, **more: Any) -> Document:
    return {"Sid": sid, "Effect": effect, "Action": action, "Resource": resource, **more}


def _policy(*statements: Document) -> Document:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def bucket_policy(place: Place) -> Document:
    """Return the bucket policy: denials only, so it grants nobody anything, and binds administrators as well."""
    if not place.account:
        raise InvalidError("the bucket policy names roles", hint="give the account that they are in: --account ID")

    def deny(sid: str, action: object, *patterns: str, **conditions: Any) -> Document:
        condition = {"Condition": conditions} if conditions else {}
        return _statement(sid, "Deny", action, place.objects(*patterns), Principal="*", **condition)

    def unless(*roles: Role) -> Document:
        return {"aws:PrincipalArn": [place.role(role) for role in roles]}

    # CreateMultipartUpload and UploadPart are PutObject as well, but take no condition: the completion carries it.
    creates = {"s3:ObjectCreationOperation": "true"}
    statements = [
        deny("CreateOnly", "s3:PutObject", *_CREATE_ONLY, Null={"s3:if-none-match": "true"}, Bool=creates),
        deny(
            "PointerOnlyWithCondition",
            "s3:PutObject",
            _POINTERS,
            Null={"s3:if-none-match": "true", "s3:if-match": "true"},  # denied when both are absent
            Bool=creates,
        ),
        deny("PointerOnlyByOwnerAndGc", "s3:PutObject", _POINTERS, ArnNotEquals=unless("owner", "gc")),
        deny("NoCopyIn", "s3:PutObject", _RUNS, Null={"s3:x-amz-copy-source": "false"}),
        deny("NoReplicaWrites", ["s3:ReplicateObject", "s3:ReplicateDelete"], _RUNS),
        deny("NoDeleteMarkers", "s3:DeleteObject", _RUNS),
        deny("NoPointerVersionDelete", "s3:DeleteObjectVersion", _POINTERS),
        deny(
            "VersionDeleteOnlyByGc",
            "s3:DeleteObjectVersion",
            *(pattern for pattern in _CREATE_ONLY if pattern != _LEASES),
            _LOOSE,
            ArnNotEquals=unless("gc", "owner") if place.owner_collects else unless("gc"),
        ),
        deny(
            "VersionDeleteOnlyByOurRoles",  # what is left of runs/: leases
            "s3:DeleteObjectVersion",
            _RUNS,
            ArnNotEquals=unless("gc", "restore", "member", "owner"),
        ),
    ]
    if place.admin:
        only = {"ArnNotLike": {"aws:PrincipalArn": place.admin}}
        statements.append(
            _statement("SettingsOnlyByAdmin", "Deny", list(_SETTINGS), place.bucket_arn, Principal="*", Condition=only)
        )
    return _policy(*statements)


def _reading(place: Place) -> list[Document]:
    return [
        # Without a condition on s3:prefix: a HEAD of a missing key needs ListBucket to say 404, and has no prefix.
        _statement("List", "Allow", [*_LIST, *_ASK], place.bucket_arn),
        _statement("Read", "Allow", list(_READ), place.objects("*")),
        _statement("Lease", "Allow", ["s3:PutObject", "s3:DeleteObjectVersion"], place.objects(_LEASES)),
    ]


def _probing(place: Place) -> list[Document]:
    return [
        _statement("Probe", "Allow", ["s3:PutObject", *_DELETE], place.objects(_PROBE)),
        _statement("Uploads", "Allow", list(_UPLOADS), place.objects("*")),
    ]


def _saving(place: Place) -> list[Document]:
    patterns = [pattern for pattern in _CREATE_ONLY if pattern != _LEASES]
    return [_statement("Save", "Allow", "s3:PutObject", place.objects(*patterns, _LOOSE))]


def _publishing(place: Place) -> list[Document]:
    return [_statement("Publish", "Allow", "s3:PutObject", place.objects(_POINTERS))]


def _collecting(place: Place) -> list[Document]:
    patterns = [pattern for pattern in _CREATE_ONLY if pattern != _LEASES]
    return [_statement("Collect", "Allow", "s3:DeleteObjectVersion", place.objects(*patterns, _LOOSE))]


def role_policy(role: Role, place: Place) -> Document:
    """Return what a role may do: `member` saves, `owner` also publishes (with `owner_collects` it also deletes), `gc`
    retires and deletes, `restore` reads.
    """
    collecting = (_collecting,) if place.owner_collects else ()
    parts: Mapping[Role, tuple[Callable[[Place], list[Document]], ...]] = {
        "member": (_reading, _probing, _saving),
        "owner": (_reading, _probing, _saving, _publishing, *collecting),
        "gc": (_reading, _probing, _publishing, _collecting),
        "restore": (_reading,),
    }
    return _policy(*(statement for part in parts[role] for statement in part(place)))


def lifecycle(place: Place) -> Document:
    """Return the lifecycle rules. They expire nothing that a manifest or a pointer may name.

    A rule's filter is a prefix, so `runs/*/pointer.json` cannot be one. The rule for old pointers covers all of `runs/`
    instead, and is harmless there only because it keeps the newest HISTORY noncurrent versions of each key:
    a create-only key has one version, and stays even behind a delete marker. No rule may have Expiration there, nor
    NoncurrentVersionExpiration without that number; some stores drop it without a word, so read the rules back.
    """
    at = f"{place.prefix}/" if place.prefix else ""

    def rule(ident: str, prefix: str, **actions: Any) -> Document:
        return {"ID": ident, "Status": "Enabled", "Filter": {"Prefix": prefix}, **actions}

    return {
        "Rules": [
            rule("cachefs-uploads", at, AbortIncompleteMultipartUpload={"DaysAfterInitiation": ABORT_DAYS}),
            rule(
                "cachefs-old-versions",
                f"{at}runs/",
                NoncurrentVersionExpiration={
                    "NoncurrentDays": POINTER_DAYS,
                    "NewerNoncurrentVersions": HISTORY,
                },
            ),
            # Expiration by days also removes delete markers with nothing below them.
            rule(
                "cachefs-probe",
                f"{at}.probe/",
                Expiration={"Days": PROBE_DAYS},
                NoncurrentVersionExpiration={"NoncurrentDays": PROBE_DAYS},
            ),
        ]
    }


_DOCUMENTS: Final[Mapping[What, Callable[[Place], Document]]] = {
    "bucket-policy": bucket_policy,
    "iam-member": lambda place: role_policy("member", place),
    "iam-owner": lambda place: role_policy("owner", place),
    "iam-gc": lambda place: role_policy("gc", place),
    "iam-restore": lambda place: role_policy("restore", place),
    "lifecycle": lifecycle,
}
WHAT: Final[tuple[What, ...]] = tuple(_DOCUMENTS)
