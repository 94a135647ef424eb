"""`cachefs policy`: print access policies and lifecycle rules for a bucket, ready to use. Nothing is sent anywhere."""

from __future__ import annotations

from typing import Annotated

import typer

from cachefs.cli import show
from cachefs.cli.show import AsJson
from cachefs.config.values import location
from cachefs.errors import InvalidError
from cachefs.policy import WHAT, Document, Place, document

_COMMANDS = {
    "bucket-policy": "aws s3api put-bucket-policy --bucket {bucket} --policy file://FILE",
    "lifecycle": "aws s3api put-bucket-lifecycle-configuration --bucket {bucket} --lifecycle-configuration file://FILE",
}
_NOTES = {
    "lifecycle": "it replaces all rules of the bucket; read them back: without NewerNoncurrentVersions do not use it",
}
_ROLE_COMMAND = "aws iam put-role-policy --role-name {role} --policy-name cachefs --policy-document file://FILE"


def policy(
    store: Annotated[str, typer.Argument(help="s3://bucket/prefix")],
    *,
    account: Annotated[str, typer.Option(help="The account of the roles: 12 digits.", show_default=False)] = "",
    role_prefix: Annotated[str, typer.Option(help="What the roles' names begin with.")] = "cachefs",
    admin: Annotated[
        str, typer.Option(help="ARN that alone may change lifecycle, versioning, replication.", show_default=False)
    ] = "",
    partition: Annotated[str, typer.Option(help="aws, aws-cn or aws-us-gov.")] = "aws",
    owner_collects: Annotated[
        bool, typer.Option("--owner-collects", help="Let the owner delete as gc may: for a daemon with gc = true.")
    ] = False,
    what: Annotated[str | None, typer.Option(help=f"One document only: {', '.join(WHAT)}.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Print the bucket policy, the policies of the roles, and the lifecycle rules that suit a store."""
    where = location(store)
    if where.scheme != "s3":
        raise InvalidError(f"{store} has no policies", hint="they are for s3://bucket/prefix")
    place = Place(where.bucket, where.prefix, account, role_prefix, admin, partition, owner_collects)
    if what is not None:
        found = next((one for one in WHAT if one == what), None)
        if found is None:
            raise InvalidError(f"unknown document {what!r}", hint=f"one of {', '.join(WHAT)}")
        show.json(document(found, place))
        return
    documents = {one: document(one, place) for one in WHAT}
    if as_json:
        show.json(documents)
        return
    for name, one in documents.items():
        _print(name, one, place)


def _print(name: str, one: Document, place: Place) -> None:
    command = _COMMANDS.get(name, _ROLE_COMMAND)
    role = f"{place.roles}-{name.removeprefix('iam-')}"
    show.console.print(f"# {name}: {command.format(bucket=place.bucket, role=role)}", markup=False, highlight=False)
    if note := _NOTES.get(name):
        show.console.print(f"# {note}", markup=False, highlight=False)
    show.json(one)
