"""policy.py: what each role may do to each kind of key, as AWS would decide it."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cachefs.cli.main import app
from cachefs.errors import InvalidError
from cachefs.formats.keys import Keys
from cachefs.policy import WHAT, Place, bucket_policy, document, lifecycle, role_policy
from tests.policies import Request, allowed, matches
from tests.servers.fixtures import moto_server  # noqa: F401
from tests.test_formats_keys import PATHS

PLACE = Place("ckpts", "team/llama", "123456789012", admin="arn:aws:iam::123456789012:role/ops-*")
KEYS = Keys(PLACE.prefix)
POLICY = bucket_policy(PLACE)
ROLES = ("member", "owner", "gc", "restore")
RUN, ATTEMPT, LEASE = "exp/7", "a" * 32, "e" * 32

CREATE = {"s3:if-none-match": "*", "s3:ObjectCreationOperation": "true"}
SWAP = {"s3:if-match": '"e"', "s3:ObjectCreationOperation": "true"}
PLAIN = {"s3:ObjectCreationOperation": "true"}
PART = {"s3:ObjectCreationOperation": "false"}
"""CreateMultipartUpload and UploadPart."""
COPY = {**CREATE, "s3:x-amz-copy-source": "other/key"}

SHARD = KEYS.shard(RUN, ATTEMPT, "node-0", "b" * 32, "model.bin")
POINTER = KEYS.pointer(RUN)
LOOSE = KEYS.loose(RUN, "logs/out")
PROBE = KEYS.probe("id") + "a"
OWN_KEYS = {
    "shard": SHARD,
    "manifest": KEYS.manifest(RUN, ATTEMPT, opened=1, sealed=1),
    "report": KEYS.member(RUN, ATTEMPT, "node-0"),
    "share of a test": KEYS.member_test(RUN, ATTEMPT, 1, "node-0"),
    "wish": KEYS.wanted(RUN, ATTEMPT),
}


def may(role, action, key, context=None, *, unbounded=False):
    """`role` is one of ours, or any other name for somebody who may do everything that the bucket does not deny; with
    `unbounded` that is so for ours, too.
    """
    resource = f"arn:aws:s3:::ckpts/{key}" if key else "arn:aws:s3:::ckpts"
    action = f"s3:{action}"
    everything = {"Statement": [{"Effect": "Allow", "Action": action, "Resource": "*"}]}
    granted = role_policy(role, PLACE) if role in ROLES and not unbounded else everything
    principal = f"arn:aws:iam::123456789012:role/cachefs-{role}"
    return allowed(Request(principal, action, resource, context or {}), granted, POLICY)


def who(action, key, context=None):
    return {role for role in ROLES if may(role, action, key, context)}


@pytest.mark.parametrize("key", OWN_KEYS.values(), ids=OWN_KEYS)
def test_what_an_attempt_holds_is_created_once_and_deleted_by_gc_only(key):
    assert who("PutObject", key, CREATE) == {"member", "owner"}
    assert who("PutObject", key, PART) == {"member", "owner"}
    assert who("PutObject", key, PLAIN) == who("PutObject", key, SWAP) == who("PutObject", key, COPY) == set()
    assert who("DeleteObject", key) == set()
    assert who("DeleteObjectVersion", key) == {"gc"}
    assert who("GetObjectVersion", key) == set(ROLES)


def test_the_pointer_moves_under_a_condition_and_by_its_writers_only():
    assert who("PutObject", POINTER, CREATE) == who("PutObject", POINTER, SWAP) == {"owner", "gc"}
    assert who("PutObject", POINTER, PLAIN) == who("PutObject", POINTER, COPY) == set()
    assert who("DeleteObject", POINTER) == who("DeleteObjectVersion", POINTER) == set()
    assert who("GetObject", POINTER) == set(ROLES)
    for role in ROLES:  # also one that was given too much
        assert not may(role, "DeleteObjectVersion", POINTER, unbounded=True)
        assert may(role, "PutObject", POINTER, SWAP, unbounded=True) == (role in ("owner", "gc"))


def test_leases_are_made_once_and_removed_by_readers_and_gc():
    key = KEYS.lease(RUN, LEASE)
    assert who("PutObject", key, CREATE) == set(ROLES)
    assert who("PutObject", key, PLAIN) == who("DeleteObject", key) == set()
    assert who("DeleteObjectVersion", key) == set(ROLES)


def test_loose_files_are_overwritten_but_not_removed_by_who_writes_them():
    assert who("PutObject", LOOSE, PLAIN) == who("PutObject", LOOSE, PART) == {"member", "owner"}
    assert who("DeleteObject", LOOSE) == set()
    assert who("DeleteObjectVersion", LOOSE) == {"gc"}


def test_an_owner_that_collects_may_delete_what_gc_may():
    """Both documents have to say so: `gc = true` retires nothing where either does not."""
    place = msgspec.structs.replace(PLACE, owner_collects=True)
    for key in (*OWN_KEYS.values(), LOOSE, POINTER):
        request = Request(
            "arn:aws:iam::123456789012:role/cachefs-owner", "s3:DeleteObjectVersion", f"arn:aws:s3:::ckpts/{key}", {}
        )
        both = [(one, other) for one in (PLACE, place) for other in (PLACE, place)]
        granted = [allowed(request, role_policy("owner", one), bucket_policy(other)) for one, other in both]
        assert granted == [False, False, False, key != POINTER]
    assert role_policy("member", place) == role_policy("member", PLACE)
    text = (
        CliRunner()
        .invoke(app, ["policy", "s3://ckpts/team", "--account", "1" * 12, "--owner-collects", "--json"])
        .stdout
    )
    assert "Collect" in {one["Sid"] for one in json.loads(text)["iam-owner"]["Statement"]}


def test_the_probe_may_do_under_its_prefix_what_it_asks_about():
    probing = {"member", "owner", "gc"}
    for context in (CREATE, SWAP, PLAIN, PART):
        assert who("PutObject", PROBE, context) == probing
    assert who("DeleteObject", PROBE) == who("DeleteObjectVersion", PROBE) == probing


@pytest.mark.parametrize("action", ["ListBucket", "ListBucketVersions", "GetBucketVersioning"])
def test_all_roles_list(action):
    assert who(action, "") == set(ROLES)


@pytest.mark.parametrize("action", ["AbortMultipartUpload", "ListMultipartUploadParts"])
def test_who_uploads_can_take_uploads_up_and_abort_them(action):
    assert who(action, SHARD) == {"member", "owner", "gc"}


def test_nobody_has_more_rights_than_the_bucket_leaves():
    """An administrator with all rights: of the account, but none of our roles."""
    for key in (*OWN_KEYS.values(), POINTER, KEYS.lease(RUN, LEASE), LOOSE, f"{PLACE.prefix}/runs/unknown"):
        assert not may("root", "DeleteObject", key)
        assert not may("root", "DeleteObjectVersion", key)
        assert not may("root", "ReplicateObject", key)
        assert not may("root", "ReplicateDelete", key)
        assert not may("root", "PutObject", key, COPY)
    for key in (*OWN_KEYS.values(), KEYS.lease(RUN, LEASE)):
        assert not may("root", "PutObject", key, PLAIN)
        assert may("root", "PutObject", key, CREATE)
    assert not may("root", "PutObject", POINTER, SWAP)
    assert may("root", "PutObject", "other/team/file", PLAIN)  # other prefixes of the bucket are not ours
    assert may("root", "DeleteObject", "other/team/file")
    assert may("root", "DeleteObject", f"{PLACE.prefix}/runs.txt")


def test_settings_of_the_bucket_are_the_admins():
    for action in ("PutLifecycleConfiguration", "PutBucketVersioning", "PutReplicationConfiguration"):
        assert not may("root", action, "")
        principal = "arn:aws:iam::123456789012:role/ops-anna"
        request = Request(principal, f"s3:{action}", "arn:aws:s3:::ckpts", {})
        everything = {"Statement": [{"Effect": "Allow", "Action": f"s3:{action}", "Resource": "*"}]}
        assert allowed(request, everything, POLICY)
        assert allowed(request, everything, bucket_policy(Place("ckpts", "", "123456789012")))


# Names that try to look like ours.

NAMES = st.sampled_from(
    ["pointer.json", "attempts", "loose", "wanted", "leases", "runs", ".probe", "pointer", "a*b", "?", "attempts/x"]
)
PATTERNS = {
    "attempts": "runs/*/attempts/*",
    "wanted": "runs/*/wanted/*",
    "leases": "runs/*/leases/*",
    "loose": "runs/*/loose/*",
    "pointer": "runs/*/pointer.json",
    "probe": ".probe/*",
}


def kinds(key):
    return {
        kind for kind, pattern in PATTERNS.items() if matches(PLACE.objects(pattern)[0], f"arn:aws:s3:::ckpts/{key}")
    }


@given(run=PATHS | NAMES, path=PATHS | NAMES, member=st.text(min_size=1, max_size=8) | NAMES)
@example("attempts/loose", "attempts/x/pointer.json", "pointer")
@example("a", "pointer.json", "attempts")
@example("loose", "x/attempts/y", "leases")
@example("a", "logs/pointer.json", "loose")
def test_every_key_is_of_one_kind_whatever_run_file_and_member_are_called(run, path, member):
    member = member.replace("/", "")  # as cachefs.members demands
    assert kinds(KEYS.loose(run, path)) == {"loose"}
    assert kinds(KEYS.pointer(run)) == {"pointer"}
    assert kinds(KEYS.wanted(run, ATTEMPT)) == {"wanted"}
    assert kinds(KEYS.lease(run, LEASE)) == {"leases"}
    for key in (
        KEYS.open(run, ATTEMPT),
        KEYS.close(run, ATTEMPT),
        KEYS.manifest(run, ATTEMPT, opened=1, sealed=2),
        KEYS.test(run, ATTEMPT, opened=1, sealed=1),
        KEYS.abandoned(run, ATTEMPT),
        KEYS.shard(run, ATTEMPT, member or "m", "b" * 32, path),
        KEYS.member(run, ATTEMPT, member),
        KEYS.member_test(run, ATTEMPT, 1, member),
    ):
        assert kinds(key) == {"attempts"}
    assert kinds(KEYS.probe("id") + "a") == {"probe"}


@given(st.text("*?$[]{}a/b-", max_size=6).map(lambda text: text.strip("/")), PATHS)
@example("a*", "r")
@example("${aws:username}", "r")
def test_a_prefix_is_taken_literally(prefix, run):
    place = Place("ckpts", prefix, "123456789012")
    pattern = place.objects("runs/*/attempts/*")[0]
    assert matches(pattern, f"arn:aws:s3:::ckpts/{Keys(prefix).open(run, ATTEMPT)}")
    if prefix:
        assert not matches(pattern, f"arn:aws:s3:::ckpts/{Keys(prefix + 'x').open(run, ATTEMPT)}")
        assert (
            not matches(pattern, f"arn:aws:s3:::ckpts/{Keys('x' + prefix[1:]).open(run, ATTEMPT)}") or prefix[0] == "x"
        )


def test_crafted_keys_win_nothing():
    """Keys that no cachefs makes, written past it with a member's credentials."""
    for key in ("runs/r/loose/pointer.json", "runs/r/loose/attempts/pointer.json", "runs/r/wanted/pointer.json"):
        assert not may("member", "PutObject", f"{PLACE.prefix}/{key}", SWAP)
    for key in ("runs/r/attempts/a/loose/x", "runs/r/loose/attempts/x", "runs/r/leases/loose/x"):
        assert not may("member", "PutObject", f"{PLACE.prefix}/{key}", PLAIN)
    for key in ("runs/r/attempts/a/leases/x", "runs/r/loose/leases/x"):
        assert not may("restore", "DeleteObjectVersion", f"{PLACE.prefix}/{key}")
    assert not may("gc", "DeleteObjectVersion", f"{PLACE.prefix}/runs/r/loose/pointer.json")
    assert not may("member", "PutObject", f"{PLACE.prefix}/runs/r/other", CREATE)
    assert not may("member", "PutObject", "elsewhere/runs/r/attempts/a/open.json", CREATE)


# Lifecycle.


@pytest.mark.parametrize("prefix", ["", "team/llama"])
def test_no_rule_can_expire_what_a_manifest_names(prefix):
    rules = lifecycle(Place("ckpts", prefix))["Rules"]
    for key in (Keys(prefix).open(RUN, ATTEMPT), Keys(prefix).pointer(RUN), Keys(prefix).loose(RUN, "x")):
        covering = [rule for rule in rules if key.startswith(rule["Filter"]["Prefix"])]
        assert covering
        for rule in covering:
            assert "Expiration" not in rule
            assert "Transitions" not in rule
            old = rule.get("NoncurrentVersionExpiration")
            assert old is None or (old["NewerNoncurrentVersions"] == 100 and old["NoncurrentDays"] >= 90)
    (probe,) = [rule for rule in rules if "Expiration" in rule]
    assert Keys(prefix).probe("id").startswith(probe["Filter"]["Prefix"])


# The documents as such.


@pytest.mark.server
@pytest.mark.parametrize("what", WHAT)
def test_servers_take_the_documents(what, moto_server):  # noqa: F811
    session = moto_server.session()
    made = document(what, Place(moto_server.bucket(), "a*/b", "123456789012", admin=PLACE.admin))
    s3 = session.client("s3", endpoint_url=moto_server.endpoint_url)
    bucket = moto_server.bucket()
    if what == "lifecycle":
        s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=made)
        kept = s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
        del made["Rules"][1]["NoncurrentVersionExpiration"]["NewerNoncurrentVersions"]  # moto drops it
        assert kept == made["Rules"]
    elif what == "bucket-policy":
        s3.put_bucket_policy(Bucket=bucket, Policy=json.dumps(made))
        assert json.loads(s3.get_bucket_policy(Bucket=bucket)["Policy"]) == made
    else:
        iam = session.client("iam", endpoint_url=moto_server.endpoint_url)
        created = iam.create_policy(PolicyName=f"{what}-{bucket}", PolicyDocument=json.dumps(made))["Policy"]
        found = iam.get_policy_version(PolicyArn=created["Arn"], VersionId=created["DefaultVersionId"])
        assert found["PolicyVersion"]["Document"] == made
        iam.close()
    s3.close()


@pytest.mark.parametrize("what", WHAT)
def test_documents_fit_into_the_limits_of_aws(what):
    """S3: 20 KB for a bucket policy; IAM: 6,144 characters for a managed policy."""
    made = document(what, Place("b" * 63, "p" * 100, "123456789012", roles="r" * 50, admin=PLACE.admin))
    size = len(json.dumps(made, separators=(",", ":")))
    assert size < (6_144 if what.startswith("iam-") else 20_000)
    sids = [statement["Sid"] for statement in made.get("Statement", [])]
    assert len(set(sids)) == len(sids)
    assert all(sid.isalnum() for sid in sids)


@pytest.mark.parametrize(
    "place",
    [
        {"account": "12"},
        {"account": "12345678901a"},
        {"roles": "a b"},
        {"roles": ""},
        {"admin": "me"},
        {"partition": "azure"},
        {"prefix": "\u0416"},
        {"prefix": "a\nb"},
    ],
)
def test_what_is_no_part_of_an_arn_is_refused(place):
    with pytest.raises(InvalidError, match="cannot be used in a policy"):
        Place("ckpts", **place)


def run(*arguments):
    return CliRunner().invoke(app, ["policy", *arguments], catch_exceptions=True)


def test_the_command_prints_documents_ready_to_use():
    account = ("--account", "123456789012")
    assert json.loads(run("s3://ckpts/team/llama", "--what", "iam-gc").stdout) == role_policy("gc", PLACE)
    everything = json.loads(run("s3://ckpts/team/llama", *account, "--json").stdout)
    assert list(everything) == list(WHAT)
    assert everything["lifecycle"] == lifecycle(PLACE)
    text = run("s3://ckpts/team/llama", *account, "--role-prefix", "train").stdout
    assert "# iam-owner: aws iam put-role-policy --role-name train-owner " in text
    assert "put-bucket-policy --bucket ckpts " in text
    assert "role/train-gc" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["file:///data"], "has no policies"),
        (["s3://ckpts"], "the bucket policy names roles"),
        (["s3://ckpts", "--what", "acl"], "unknown document 'acl'"),
        (["s3://ckpts", "--what", "lifecycle", "--account", "1"], "account '1' cannot be used"),
        (["ckpts"], "must be file:///absolute/directory or s3://bucket/prefix"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message):
    done = run(*arguments)
    assert isinstance(done.exception, InvalidError)
    assert message in str(done.exception)
